"""Tokenizer: special tokens once, the template as published, and stop strings found whatever the tokens' edges are."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.text.chat_format import TEMPLATE_NAMES, template_message
from eagle_ray.text.tokenizer import MAX_CHARS_PER_TOKEN, REPLACEMENT_CHAR, ChatTemplateError, TextOptions, Tokenizer
from tests.helpers.tokenizers import LFS_POINTER, SPECIAL, write_tokenizer

BOS, EOS, USER, ASSISTANT, END = range(5)
VOCAB = 330
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(directory):
    return Tokenizer.load(directory)


def ids_of(text: Tokenizer, string: str) -> list[int]:
    return text.encode(string)[1:]


def shown(text: Tokenizer, ids: list[int], stops: list[str]) -> str:
    """The text of ids with the special tokens that the stops name, and no others."""
    named = {i for i, token in enumerate(SPECIAL) if any(token in stop for stop in stops)}
    return text.decode_with_special([i for i in ids if i >= len(SPECIAL) or i in named])


def holds_stop(spelled: Callable[[list[int]], str], ids: list[int], stops: list[str], min_tokens: int) -> bool:
    """Whether the whole characters of ids hold a stop string that ends past those of the first min_tokens ids."""
    num_endless = len(spelled(ids[:min_tokens]).rstrip(REPLACEMENT_CHAR))
    whole = spelled(ids).rstrip(REPLACEMENT_CHAR)
    return any(whole.find(stop, max(0, num_endless - len(stop) + 1)) >= 0 for stop in stops)


def kept_by_decoding_everything(text: Tokenizer, ids: list[int], stops: list[str], min_tokens: int = 0) -> int | None:
    """What StopCheck must return: the first prefix that holds a stop string."""
    naming = [stop for stop in stops if any(token in stop for token in SPECIAL)]
    for end in range(min_tokens + 1, len(ids) + 1):
        is_named = holds_stop(lambda some: shown(text, some, naming), ids[:end], naming, min_tokens)
        if is_named or holds_stop(text.decode, ids[:end], stops, min_tokens):
            return end
    return None


@st.composite
def outputs(draw, text: Tokenizer) -> tuple[list[int], list[str]]:
    """Ids, and stop strings out of their text, with and without special tokens."""
    emoji = ids_of(text, "😀é日")
    id_ = st.integers(0, VOCAB - 1) | st.sampled_from(emoji) | st.integers(0, len(SPECIAL) - 1)
    ids = draw(st.lists(id_, min_size=1, max_size=30))
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, len(ids) - 1))
        some = [i for i in ids[first : first + draw(st.integers(1, 4))] if i >= len(SPECIAL) or draw(st.booleans())]
        spelled = draw(st.sampled_from([text.decode, text.decode_with_special]))(some)
        start = draw(st.integers(0, 3))
        stops += [stop for stop in [spelled[start:].strip(REPLACEMENT_CHAR)] if stop]
    return ids, stops


def kept(text: Tokenizer, ids: list[int], stops: list[str], ids_per_step: int = 1, min_tokens: int = 0) -> int | None:
    """The answer of a check that is asked after each step, as the engine asks."""
    check = text.stop_check(stops, TextOptions(min_tokens=min_tokens))
    for end in range(ids_per_step, len(ids) + ids_per_step, ids_per_step):
        if (keep := check(ids[:end])) is not None:
            return keep
    return None


def test_a_prompt_gets_the_tokenizers_special_tokens(text):
    ids = text.encode("the cat 😀")
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert text.decode(ids) == "the cat 😀"


def test_a_conversation_gets_what_the_template_writes_and_nothing_more(text):
    assert text.render_chat(HI) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    assert text.encode_chat(HI) == [BOS, USER, *ids_of(text, "Hi"), END, ASSISTANT]
    assert text.decode_with_special(text.encode_chat(HI)) == text.render_chat(HI)


def test_a_byte_order_mark_of_a_template_file_is_not_in_the_prompt(text, tmp_path, directory):
    (tmp_path / "own.jinja").write_text(text.info()["chat_template"], "utf-8-sig")
    assert Tokenizer.load(directory, str(tmp_path / "own.jinja")).render_chat(HI) == text.render_chat(HI)


def test_a_target_without_a_template_refuses_messages(tmp_path, directory):
    for bare in (
        Tokenizer.load(write_tokenizer(tmp_path / "bare", chat_template=None)),
        Tokenizer.load(directory, "none"),
    ):
        assert bare.encode("Hi")[0] == BOS
        with pytest.raises(RequestError, match="need a chat template") as error:
            bare.encode_chat(HI)
        assert error.value.code == "no_chat_template"


def test_what_the_template_refuses_is_the_rows_error(text):
    with pytest.raises(RequestError, match="no tools here") as error:
        text.encode_chat([{"role": "tool", "content": "x"}])
    assert error.value.code == "bad_messages"


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_whatever_a_template_raises_is_the_rows_error(tmp_path, directory, template):
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(RequestError, match=r"refuses these messages: (TypeError|RecursionError)") as error:
        Tokenizer.load(directory, str(tmp_path / "mine.jinja")).encode_chat(HI)
    assert error.value.code == "bad_messages"


def test_arguments_that_the_template_refuses_are_named(tmp_path, directory):
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{% for call in m.tool_calls %}{% for k, v in call.function.arguments.items() %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    text = Tokenizer.load(directory, str(tmp_path / "mine.jinja"))

    def calls(arguments: str) -> list[dict]:
        return [template_message({"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]})]

    assert text.render_chat(calls('{"a": 1}')) == "a=1;" and text.render_chat(calls("null")) == ""
    for arguments in ("[1]", "{broken"):
        with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not"):
            text.encode_chat([*HI, *calls(arguments)])


def test_a_template_may_come_from_a_file(tmp_path, directory):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert Tokenizer.load(directory, str(tmp_path / "mine.jinja")).render_chat(HI) == "[Hi]"


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "How are you?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
VICUNAS_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
SPELLED = {
    "vicuna": [
        (HI, f"<|bos|>{VICUNAS_SYSTEM} USER: Hi ASSISTANT:"),
        (TURNS, f"<|bos|>{VICUNAS_SYSTEM} USER: Hi ASSISTANT: Hello!<|eos|>USER: How are you? ASSISTANT:"),
        ([SYSTEM, *HI], "<|bos|>Be brief. USER: Hi ASSISTANT:"),
    ],
    "llama-2": [
        (HI, "<|bos|>[INST] Hi [/INST]"),
        (TURNS, "<|bos|>[INST] Hi [/INST] Hello! <|eos|><|bos|>[INST] How are you? [/INST]"),
        (
            [SYSTEM, *TURNS],
            "<|bos|>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! <|eos|><|bos|>[INST] How are you? [/INST]",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "messages", "spelled"), [(name, *case) for name, cases in SPELLED.items() for case in cases]
)
def test_templates_by_name_say_what_their_targets_were_trained_on(directory, name, messages, spelled):
    text = Tokenizer.load(directory, name)
    assert text.render_chat(messages) == spelled
    assert text.decode_with_special(text.encode_chat(messages)) == spelled
    assert text.encode_chat(messages).count(BOS) == spelled.count("<|bos|>")  # as tokens, and no further one


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("messages", [TURNS[1:], [*HI, *HI], [*HI, SYSTEM], [{"role": "tool", "content": "x"}]])
def test_templates_by_name_refuse_what_their_targets_never_saw(directory, name, messages):
    with pytest.raises(RequestError, match="user and assistant take turns") as error:
        Tokenizer.load(directory, name).render_chat(messages)
    assert error.value.code == "bad_messages"


def test_the_names_are_those_of_the_files():
    assert set(TEMPLATE_NAMES) == SPELLED.keys()


def test_vicunas_tokenizer_is_a_sentencepiece_model_alone(tmp_path):
    """lmsys published tokenizer.model and no tokenizer.json; without sentencepiece nobody could read it."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    trained = tmp_path / "tokenizer.model"
    with trained.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([VICUNAS_SYSTEM, "the cat sat on the mat", "How are you?"] * 40),
            model_writer=file,
            model_type="bpe",
            vocab_size=360,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    said = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | {"add_bos_token": True, "legacy": False}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    text = Tokenizer.load(tmp_path, "vicuna")
    own = SentencePieceProcessor(model_file=str(trained))
    for words in ("the cat sat on the mat", "How are  you? naïve"):
        assert text.encode(words) == [own.bos_id(), *own.encode(words)]
        assert text.decode(text.encode(words)) == words
    ids = text.encode_chat(HI)
    assert ids[0] == own.bos_id() and own.bos_id() not in ids[1:]
    assert text.decode(ids) == f"{VICUNAS_SYSTEM} USER: Hi ASSISTANT:"


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"the tokenizer in .* cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", LFS_POINTER, "tokenizer.json is a Git LFS pointer, not the file itself. Run `git lfs pull`"),
        ("tokenizer.json", '{"model": {"type": "Bigram"}}', "cannot be read from tokenizer.json: .*Download it again"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read as JSON: .*Download the model again"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json must hold a JSON object, got list"),
        ("generation_config.json", LFS_POINTER, "generation_config.json is a Git LFS pointer"),
        ("generation_config.json", "[]", "generation_config.json must hold a JSON object, got list"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id must be an integer or a list of integers"),
        ("chat_template.jinja", LFS_POINTER, "chat_template.jinja is a Git LFS pointer"),
        ("chat_template.jinja", "{% for m in messages %}", "chat template in .* is not a Jinja template: line 1: "),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, file, content, words):
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / file).write_text(content)
    with pytest.raises(EngineError, match=words):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{% if x %}", "mine.jinja is not a Jinja template: line 1: "),
        ("{{ x | nofilter }}", "is not a Jinja template: line 1: No filter named 'nofilter'"),
        (LFS_POINTER, "mine.jinja is a Git LFS pointer"),
        (None, "mine.jinja cannot be read: .*No such file.* Name a Jinja file"),
    ],
)
def test_a_template_file_that_is_none_is_named(tmp_path, directory, content, words):
    if content is not None:
        (tmp_path / "mine.jinja").write_text(content)
    with pytest.raises(ChatTemplateError, match=words):
        Tokenizer.load(directory, str(tmp_path / "mine.jinja"))


def test_a_targets_own_template_may_begin_with_a_byte_order_mark(tmp_path):
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("<|bos|>{{ messages[0].content }}", "utf-8-sig")
    assert Tokenizer.load(tmp_path).render_chat(HI) == "<|bos|>Hi"


def test_an_answer_ends_at_the_tokenizers_eos_and_at_the_configs(tmp_path):
    write_tokenizer(tmp_path)  # the tokenizer's is 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    text = Tokenizer.load(tmp_path)
    assert text.eos_ids == {1, 4}
    assert text.final_text([*ids_of(text, "cat"), 1], []) == text.final_text([*ids_of(text, "cat"), 4], []) == "cat"
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "eos_token_id": [2, 3]}')
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_ids == {1, 2}  # 3 is no token of the target


def test_a_target_without_a_tokenizer_has_no_text(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_no_stops_no_check(text):
    assert text.stop_check([]) is None


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize(
    ("pieces", "stops", "num_kept"),
    [
        (["the", " cat", " sat"], ["cat"], 2),  # inside a token
        (["the", " cat", " sat"], ["e c"], 2),  # begins inside one token, ends inside the next
        (["S", "T", "O", "P", " the"], ["STOP"], 4),  # over several tokens
        (["S", "T", "O", "S", "T", "O", "P"], ["STOP"], 7),  # a false start
        (["the", " end", "."], ["end.", " e"], 2),  # the earliest to complete wins
        (["the", " end", "."], ["absent"], None),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(text, pieces, stops, num_kept, per_step):
    tokens = [ids_of(text, piece) for piece in pieces]
    ids = [id for token in tokens for id in token]
    wanted = None if num_kept is None else sum(map(len, tokens[:num_kept]))
    assert kept(text, ids, stops, per_step) == kept_by_decoding_everything(text, ids, stops)
    if all(len(token) == 1 for token in tokens):
        assert kept(text, ids, stops, per_step) == wanted


def test_a_character_of_several_tokens_stops_at_its_last(text):
    ids = ids_of(text, "a😀b")
    assert len(ids) == 6
    assert kept(text, ids, ["😀"]) == 5
    assert kept(text, ids, ["a"]) == 1


def test_half_a_character_does_not_hide_the_text_before_it(text):
    ids = [*ids_of(text, "the"), *ids_of(text, "😀")[:2]]
    assert kept(text, ids, ["the"], ids_per_step=100) == len(ids_of(text, "the"))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_the_window_finds_what_decoding_everything_finds(text, data):
    ids, stops = data.draw(outputs(text))
    if stops:
        per_step, min_tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
        wanted = kept_by_decoding_everything(text, ids, stops, min_tokens)
        assert kept(text, ids, stops, per_step, min_tokens) == wanted


def test_half_a_character_at_min_tokens_does_not_count_the_text_before_it_again(text):
    ids = [*ids_of(text, "a"), *ids_of(text, "😀")]
    assert kept(text, ids, ["a"], min_tokens=2) is None
    assert kept(text, ids, ["😀"], min_tokens=2) == len(ids)


def test_a_tokenizer_that_drops_the_first_space_still_shows_the_others():
    words = {"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "\u2581sat": 3}
    tokenizer = FastTokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    text = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())
    assert text.decode([1, 2, 3]) == "the cat sat"
    assert kept(text, [1, 2, 3], ["e c"]) == 2
    assert kept(text, [1, 1, 2, 3], ["t s"]) == 4
    assert kept(text, [1, 2, 3], [" the"]) is None


def test_an_outputs_text_has_neither_eos_nor_stop(text):
    assert text.final_text([*ids_of(text, "the cat"), END], []) == "the cat"
    assert text.final_text(ids_of(text, "the cat sat"), [" sat"]) == "the cat"
    assert text.final_text(ids_of(text, "the cat sat"), ["sat", "cat"]) == "the "
    assert text.final_text(ids_of(text, "the cat"), ["dog"]) == "the cat"
    assert text.final_text([], ["x"]) == ""


def test_of_two_stops_in_one_token_the_one_that_ends_first_cuts(text):
    ids = ids_of(text, "hello there")
    assert text.final_text(ids, ["llo t", "l"]) == "he"
    assert text.final_text(ids, ["ello", "hello"]) == ""


def test_a_prompt_far_too_long_is_refused_by_its_beginning(directory, monkeypatch):
    """A hundred megabytes made whole into tokens would end the process."""
    text, seen = Tokenizer.load(directory, max_model_len=50), []
    encode = text._tokenizer.encode
    monkeypatch.setattr(text._tokenizer, "encode", lambda words, **how: seen.append(len(words)) or encode(words, **how))
    for ask in (text.encode, lambda words: text.encode_chat([{"role": "user", "content": words}])):
        with pytest.raises(RequestError, match=r"of 1\d+ characters .*model\.max_model_len is 50") as error:
            ask("é日" * 50_000)
        assert error.value.code == "prompt_too_long" and max(seen) == MAX_CHARS_PER_TOKEN * 50


def test_long_words_of_few_tokens_are_looked_at_whole(directory):
    """Many characters a token in the beginning: the number of tokens decides, not that of characters."""
    text, free = Tokenizer.load(directory, max_model_len=3), Tokenizer.load(directory)
    words = "the " * 12
    assert len(words) > MAX_CHARS_PER_TOKEN * 3 and text.encode(words) == free.encode(words)


def test_an_eos_that_is_no_special_token_is_left_out_too(tmp_path):
    target = write_tokenizer(tmp_path)
    plain_id = Tokenizer.load(target).encode("the")[-1]
    (target / "generation_config.json").write_text(f'{{"eos_token_id": {plain_id}}}')
    text = Tokenizer.load(target)
    assert text.final_text([*ids_of(text, "cat"), plain_id], []) == "cat"


def test_the_config_names_the_eos_where_the_generation_config_does_not(tmp_path):
    target = write_tokenizer(tmp_path)
    (target / "generation_config.json").unlink()
    (target / "config.json").write_text('{"eos_token_id": 7}')
    text = Tokenizer.load(target)
    assert text.final_text([*ids_of(text, "cat"), 7], []) == "cat"


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_what_a_growing_text_tells_is_always_the_beginning_of_the_whole(text, data):
    ids, stops = data.draw(outputs(text))
    output = ids[: kept(text, ids, stops)] if stops else ids
    whole, growing, told, per_step = (
        text.final_text(output, stops),
        text.decode_stream(stops),
        "",
        data.draw(st.integers(1, 6)),
    )
    for start in range(0, len(output) - per_step, per_step):
        told += growing.grow(output[start : start + per_step])
        assert whole.startswith(told)
    assert told + growing.end(output) == whole


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize(
    ("stops", "before", "stop"),
    [
        (["<|user|>"], "the cat", "<|user|>"),
        (["cat<|user|>"], "the ", "cat<|user|>"),
        (["<|user|> sat"], "the cat", "<|user|> sat"),
        (["absent", "<|user|>", "sat"], "the cat", "<|user|>"),
        (["<|user|><|user|>", "sat"], "the cat ", "sat"),
        (["cat sat"], "the ", "cat sat"),  # without the tokens that the text leaves out
        (["cat<|end|>", "<|user|>"], "the cat", "<|user|>"),
    ],
)
def test_a_stop_string_may_name_special_tokens_that_the_text_leaves_out(text, stops, before, stop, min_tokens):
    ids = [*ids_of(text, "the cat"), USER, *ids_of(text, " sat on")]
    options = TextOptions(min_tokens=min_tokens)
    num_kept = text.stop_check(stops, options)(ids)
    assert text.final_text(ids[:num_kept], stops, options) == before
    keeping = TextOptions(include_stop=True, min_tokens=min_tokens)
    assert text.final_text(ids[:num_kept], stops, keeping) == before + stop
    growing = text.decode_stream(stops, options)
    told = "".join(growing.grow([token]) for token in ids[: num_kept - 1])
    assert before.startswith(told) and told + growing.end(ids[:num_kept]) == before


def test_a_stop_string_may_end_in_an_eos_that_is_ignored(text):
    ids = [*ids_of(text, "the cat"), END]
    assert text.stop_check(["cat<|end|>"])(ids) == len(ids)
    assert text.final_text(ids, ["cat<|end|>"]) == "the "
    assert text.final_text(ids, ["<|end|>"]) == "the cat"


def test_special_tokens_that_a_tokenizer_joins_with_spaces_are_found():
    tokenizer = FastTokenizer(models.WordLevel({"<unk>": 0, "red": 1, "blue": 2, "<sep>": 3}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<sep>"])
    text = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())
    for stop, num_kept, before in (("<sep>", 3, "red blue"), ("blue <sep>", 3, "red "), ("<sep> red", 4, "red blue")):
        assert text.stop_check([stop])([1, 2, 3, 1]) == num_kept
        assert text.final_text([1, 2, 3, 1][:num_kept], [stop]) == before


def test_a_growing_text_holds_back_no_more_than_it_must(text):
    growing = text.decode_stream(["END", "ENOUGH"])
    assert [growing.grow(ids_of(text, part)) for part in ("a E", "N", "T", "EN")] == ["a ", "", "ENT", ""]
    assert growing.end(ids_of(text, "a ENTEN")) == "EN"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A tokenizer of three words: 1 the, 2 cat, 3 sat."""
    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "\u2581sat": 3}
    tokenizer = FastTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())


def test_stop_strings_count_after_the_first_min_tokens(words):
    ids, options = [1, 2, 3, 1, 2], TextOptions(min_tokens=3)
    check = words.stop_check([" cat"], options)
    assert [check(ids[:end]) for end in range(1, 6)] == [None, None, None, None, 5]
    assert words.final_text(ids, [" cat"], options) == "the cat sat the"
    assert words.final_text(ids[:3], [" cat"], options) == "the cat sat"
    assert words.stop_check([" cat"], TextOptions(min_tokens=1))(ids) == 2


def test_a_stop_string_may_begin_before_min_tokens_and_end_after(words):
    check = words.stop_check(["cat sat"], TextOptions(min_tokens=2))
    assert [check([1, 2, 3][:end]) for end in (1, 2, 3)] == [None, None, 3]
    assert words.final_text([1, 2, 3], ["cat sat"], TextOptions(min_tokens=2)) == "the "


def test_what_ended_the_output_can_stay_in_its_text(words):
    keep = TextOptions(include_stop=True, stop_token_ids=frozenset([3]))
    assert words.final_text([1, 2, 3], ["cat"], keep) == "the cat"
    assert words.final_text([1, 2, 3], [], keep) == "the cat sat"
    assert words.final_text([1, 2, 3], [], TextOptions(stop_token_ids=frozenset([3]))) == "the cat"


def test_special_tokens_can_stay_in_the_text(text):
    ids = [*ids_of(text, "the cat"), END]
    assert text.final_text(ids, [], TextOptions(skip_special_tokens=False)) == "the cat"
    kept_end = text.final_text(ids, [], TextOptions(skip_special_tokens=False, include_stop=True))
    assert kept_end == text.decode_with_special(ids) != "the cat"
    stream = text.decode_stream([], TextOptions(skip_special_tokens=False))
    assert stream.grow([USER]) + stream.grow(ids[:-1]) + stream.end([USER, *ids]) == text.decode_with_special(
        [USER, *ids[:-1]]
    )


def test_a_word_is_spelled_at_the_beginning_and_after_a_space(text):
    for word in ("cat", " cat"):
        assert text.word_ids(word) == [text.encode(form, add_special_tokens=False) for form in ("cat", " cat")]
    assert text.word_ids("\n")[0] == text.encode("\n", add_special_tokens=False)
