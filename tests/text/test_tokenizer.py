"""Tokenizer: special tokens once, and the template as published."""

from __future__ import annotations

import json

import pytest

from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.text.chat_format import TEMPLATE_NAMES, template_message
from eagle_ray.text.chat_template import ChatTemplateError
from eagle_ray.text.output_text import REPLACEMENT_CHAR
from eagle_ray.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer
from tests.support.tokenizers import LFS_POINTER, ids_of, write_tokenizer

BOS, EOS, USER, ASSISTANT, END = range(5)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(directory):
    return Tokenizer.load(directory)


def test_a_prompt_gets_the_tokenizers_special_tokens(text):
    ids = text.encode("the cat 😀")
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert text.decode(ids) == "the cat 😀"


def test_chat_prompt_is_what_the_template_writes_and_no_more(text):
    assert text.render_chat(HI) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    assert text.encode_chat(HI) == [BOS, USER, *ids_of(text, "Hi"), END, ASSISTANT]
    assert text.decode_with_special(text.encode_chat(HI)) == text.render_chat(HI)


def test_byte_order_mark_of_a_template_file_is_not_in_the_prompt(text, tmp_path, directory):
    (tmp_path / "own.jinja").write_text(text.info()["chat_template"], "utf-8-sig")
    assert Tokenizer.load(directory, str(tmp_path / "own.jinja")).render_chat(
        HI
    ) == text.render_chat(HI)


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
    with pytest.raises(
        RequestError, match=r"refuses these messages: (TypeError|RecursionError)"
    ) as error:
        Tokenizer.load(directory, str(tmp_path / "mine.jinja")).encode_chat(HI)
    assert error.value.code == "bad_messages"


def test_arguments_that_the_template_refuses_are_named(tmp_path, directory):
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{% for call in m.tool_calls %}{% for k, v in call.function.arguments.items() %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    text = Tokenizer.load(directory, str(tmp_path / "mine.jinja"))

    def calls(arguments: str) -> list[dict]:
        return [
            template_message(
                {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
            )
        ]

    assert text.render_chat(calls('{"a": 1}')) == "a=1;" and text.render_chat(calls("null")) == ""
    for arguments in ("[1]", "{broken"):
        with pytest.raises(
            RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not"
        ):
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
        (
            TURNS,
            f"<|bos|>{VICUNAS_SYSTEM} USER: Hi ASSISTANT: Hello!<|eos|>USER: How are you? ASSISTANT:",
        ),
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
    ("name", "messages", "spelled"),
    [(name, *case) for name, cases in SPELLED.items() for case in cases],
)
def test_named_templates_render_what_their_targets_trained_on(directory, name, messages, spelled):
    text = Tokenizer.load(directory, name)
    assert text.render_chat(messages) == spelled
    assert text.decode_with_special(text.encode_chat(messages)) == spelled
    assert text.encode_chat(messages).count(BOS) == spelled.count(
        "<|bos|>"
    )  # as tokens, and no further one


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize(
    "messages", [TURNS[1:], [*HI, *HI], [*HI, SYSTEM], [{"role": "tool", "content": "x"}]]
)
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
    said = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(said | {"add_bos_token": True, "legacy": False})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    text = Tokenizer.load(tmp_path, "vicuna")
    own = SentencePieceProcessor(model_file=str(trained))
    for words in ("the cat sat on the mat", "How are  you? naïve"):
        assert text.encode(words) == [own.bos_id(), *own.encode(words)]
        assert text.decode(text.encode(words)) == words
    ids = text.encode("日é😀")
    for end in range(len(ids)):  # the marks of a character that is cut off differ
        assert text.decode(ids[:end]).rstrip(REPLACEMENT_CHAR) == own.decode(ids[:end]).rstrip(
            REPLACEMENT_CHAR
        )
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
        (
            "tokenizer.json",
            LFS_POINTER,
            "tokenizer.json is a Git LFS pointer, not the file itself. Run `git lfs pull`",
        ),
        (
            "tokenizer.json",
            '{"model": {"type": "Bigram"}}',
            "cannot be read from tokenizer.json: .*Download it again",
        ),
        (
            "tokenizer_config.json",
            "{",
            "tokenizer_config.json cannot be read as JSON: .*Download the model again",
        ),
        (
            "special_tokens_map.json",
            "[]",
            "special_tokens_map.json must hold a JSON object, got list",
        ),
        ("generation_config.json", LFS_POINTER, "generation_config.json is a Git LFS pointer"),
        (
            "generation_config.json",
            "[]",
            "generation_config.json must hold a JSON object, got list",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": "</s>"}',
            "eos_token_id must be an integer or a list of integers",
        ),
        ("chat_template.jinja", LFS_POINTER, "chat_template.jinja is a Git LFS pointer"),
        (
            "chat_template.jinja",
            "{% for m in messages %}",
            "chat template in .* is not a Jinja template: line 1: ",
        ),
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
    assert (
        text.final_text([*ids_of(text, "cat"), 1], [])
        == text.final_text([*ids_of(text, "cat"), 4], [])
        == "cat"
    )
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "eos_token_id": [2, 3]}')
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_ids == {1, 2}  # 3 is no token of the target


def test_a_target_without_a_tokenizer_has_no_text(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_a_prompt_far_too_long_is_refused_by_its_beginning(directory, monkeypatch):
    """A hundred megabytes made whole into tokens would end the process."""
    text, seen = Tokenizer.load(directory, max_model_len=50), []
    encode = text.hf_tokenizer.encode
    monkeypatch.setattr(
        text.hf_tokenizer,
        "encode",
        lambda words, **how: seen.append(len(words)) or encode(words, **how),
    )
    for ask in (text.encode, lambda words: text.encode_chat([{"role": "user", "content": words}])):
        with pytest.raises(
            RequestError, match=r"of 1\d+ characters .*model\.max_model_len is 50"
        ) as error:
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


def test_eos_is_from_config_if_generation_config_is_missing(tmp_path):
    target = write_tokenizer(tmp_path)
    (target / "generation_config.json").unlink()
    (target / "config.json").write_text('{"eos_token_id": 7}')
    text = Tokenizer.load(target)
    assert text.final_text([*ids_of(text, "cat"), 7], []) == "cat"


def test_a_word_is_spelled_at_the_beginning_and_after_a_space(text):
    for word in ("cat", " cat"):
        assert text.word_ids(word) == [
            text.encode(form, add_special_tokens=False) for form in ("cat", " cat")
        ]
    assert text.word_ids("\n")[0] == text.encode("\n", add_special_tokens=False)


def test_a_rendered_chat_given_as_a_prompt_has_one_bos(text):
    rendered = text.render_chat(HI)
    assert text.encode(rendered) == text.encode_chat(HI)
    assert text.encode("<|bos|>") == [BOS] and text.encode("<|bos|><|bos|>x")[:2] == [BOS, BOS]
    assert text.encode("<|bos|><|bos|>x", add_special_tokens=False)[:2] == [BOS, BOS]
