"""Stop strings are found whatever the tokens' edges are, and a growing text is always the beginning of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_ray.text.output_text import REPLACEMENT_CHAR, TextOptions
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.tokenizers import SPECIAL, ids_of, write_tokenizer

BOS, EOS, USER, ASSISTANT, END = range(5)
VOCAB = 330


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("target")))


def shown_text(text: Tokenizer, ids: list[int], stops: list[str]) -> str:
    """The text of ids with the special tokens that the stops name, and no others."""
    named = {i for i, token in enumerate(SPECIAL) if any(token in stop for stop in stops)}
    return text.decode_with_special([i for i in ids if i >= len(SPECIAL) or i in named])


def contains_stop(
    spelled: Callable[[list[int]], str], ids: list[int], stops: list[str], min_tokens: int
) -> bool:
    """Whether the whole characters of ids hold a stop string that ends past those of the first min_tokens ids."""
    num_endless = len(spelled(ids[:min_tokens]).rstrip(REPLACEMENT_CHAR))
    whole = spelled(ids).rstrip(REPLACEMENT_CHAR)
    return any(whole.find(stop, max(0, num_endless - len(stop) + 1)) >= 0 for stop in stops)


def stop_by_full_decoding(
    text: Tokenizer, ids: list[int], stops: list[str], min_tokens: int = 0
) -> int | None:
    """What StopCheck must return: the first prefix that holds a stop string."""
    naming = [stop for stop in stops if any(token in stop for token in SPECIAL)]
    for end in range(min_tokens + 1, len(ids) + 1):
        is_named = contains_stop(
            lambda some: shown_text(text, some, naming), ids[:end], naming, min_tokens
        )
        if is_named or contains_stop(text.decode, ids[:end], stops, min_tokens):
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
        some = [
            i
            for i in ids[first : first + draw(st.integers(1, 4))]
            if i >= len(SPECIAL) or draw(st.booleans())
        ]
        spelled = draw(st.sampled_from([text.decode, text.decode_with_special]))(some)
        start = draw(st.integers(0, 3))
        stops += [stop for stop in [spelled[start:].strip(REPLACEMENT_CHAR)] if stop]
    return ids, stops


def stop_position(
    text: Tokenizer, ids: list[int], stops: list[str], ids_per_step: int = 1, min_tokens: int = 0
) -> int | None:
    """The answer of a check that is asked after each step, as the engine asks."""
    check = text.stop_check(stops, TextOptions(min_tokens=min_tokens))
    for end in range(ids_per_step, len(ids) + ids_per_step, ids_per_step):
        if (keep := check(ids[:end])) is not None:
            return keep
    return None


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
def test_a_stop_string_ends_with_the_token_that_completes_it(
    text, pieces, stops, num_kept, per_step
):
    tokens = [ids_of(text, piece) for piece in pieces]
    ids = [id for token in tokens for id in token]
    wanted = None if num_kept is None else sum(map(len, tokens[:num_kept]))
    assert stop_position(text, ids, stops, per_step) == stop_by_full_decoding(text, ids, stops)
    if all(len(token) == 1 for token in tokens):
        assert stop_position(text, ids, stops, per_step) == wanted


def test_a_character_of_several_tokens_stops_at_its_last(text):
    ids = ids_of(text, "a😀b")
    assert len(ids) == 6
    assert stop_position(text, ids, ["😀"]) == 5
    assert stop_position(text, ids, ["a"]) == 1


def test_half_a_character_does_not_hide_the_text_before_it(text):
    ids = [*ids_of(text, "the"), *ids_of(text, "😀")[:2]]
    assert stop_position(text, ids, ["the"], ids_per_step=100) == len(ids_of(text, "the"))


@pytest.mark.parametrize("num_examples", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_the_window_finds_what_decoding_everything_finds(text, num_examples):
    @settings(deadline=None, max_examples=num_examples)
    @given(data=st.data())
    def holds(data):
        ids, stops = data.draw(outputs(text))
        if stops:
            per_step, min_tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
            wanted = stop_by_full_decoding(text, ids, stops, min_tokens)
            assert stop_position(text, ids, stops, per_step, min_tokens) == wanted

    holds()


def test_partial_character_at_min_tokens_counts_no_earlier_text(text):
    ids = [*ids_of(text, "a"), *ids_of(text, "😀")]
    assert stop_position(text, ids, ["a"], min_tokens=2) is None
    assert stop_position(text, ids, ["😀"], min_tokens=2) == len(ids)


def test_tokenizer_that_drops_the_first_space_shows_the_others():
    words = {"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "\u2581sat": 3}
    tokenizer = FastTokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    text = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())
    assert text.decode([1, 2, 3]) == "the cat sat"
    assert stop_position(text, [1, 2, 3], ["e c"]) == 2
    assert stop_position(text, [1, 1, 2, 3], ["t s"]) == 4
    assert stop_position(text, [1, 2, 3], [" the"]) is None


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


@pytest.mark.parametrize("num_examples", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_streamed_text_is_always_a_prefix_of_the_final_text(text, num_examples):
    @settings(deadline=None, max_examples=num_examples)
    @given(data=st.data())
    def holds(data):
        ids, stops = data.draw(outputs(text))
        output = ids[: stop_position(text, ids, stops)] if stops else ids
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

    holds()


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
def test_stop_string_may_name_special_tokens_absent_from_text(
    text, stops, before, stop, min_tokens
):
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


def test_special_tokens_joined_with_spaces_are_found_as_stops():
    tokenizer = FastTokenizer(
        models.WordLevel({"<unk>": 0, "red": 1, "blue": 2, "<sep>": 3}, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<sep>"])
    text = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())
    for stop, num_kept, before in (
        ("<sep>", 3, "red blue"),
        ("blue <sep>", 3, "red "),
        ("<sep> red", 4, "red blue"),
    ):
        assert text.stop_check([stop])([1, 2, 3, 1]) == num_kept
        assert text.final_text([1, 2, 3, 1][:num_kept], [stop]) == before


def test_a_growing_text_holds_back_no_more_than_it_must(text):
    growing = text.decode_stream(["END", "ENOUGH"])
    assert [growing.grow(ids_of(text, part)) for part in ("a E", "N", "T", "EN")] == [
        "a ",
        "",
        "ENT",
        "",
    ]
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
    assert stream.grow([USER]) + stream.grow(ids[:-1]) + stream.end(
        [USER, *ids]
    ) == text.decode_with_special([USER, *ids[:-1]])


@pytest.fixture(scope="module")
def byte_tokens() -> Tokenizer:
    """A tokenizer of 256 bytes, 2 to 257, and of a word, 1, as sentencepiece's with byte_fallback."""
    vocab = {"<unk>": 0, "\u2581hat": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    tokenizer = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, frozenset())


def test_text_that_ends_inside_a_character_keeps_earlier_ones(byte_tokens):
    ids = [2 + byte for byte in "日é😀".encode()]
    assert byte_tokens.decode(ids) == "日é😀"
    assert byte_tokens.decode(ids[:-1]) == "日é" + REPLACEMENT_CHAR
    assert byte_tokens.decode([*ids[:-1], 1]) == f"日é{REPLACEMENT_CHAR} hat"


@pytest.mark.parametrize("num_examples", [70, pytest.param(200, marks=pytest.mark.slow)])
def test_bytes_that_are_no_character_do_not_take_a_text_back(byte_tokens, num_examples):
    @settings(deadline=None, max_examples=num_examples)
    @given(data=st.data())
    def holds(data):
        spelled = [2 + byte for byte in "日é😀".encode()]
        ids = data.draw(st.lists(st.sampled_from([1, 2 + 0xFF, *spelled]), min_size=1, max_size=20))
        ids = data.draw(st.sampled_from([ids, spelled[: len(ids)], [*spelled, *ids]]))
        growing, whole = byte_tokens.decode_stream([]), byte_tokens.final_text(ids, [])
        told = ""
        for token in ids:
            told += growing.grow([token])
            assert whole.startswith(told)
        assert told + growing.end(ids) == whole

    holds()


def test_text_and_its_parts_end_in_one_place(text):
    """A stop string may begin before a marker that the text leaves out, and end behind it."""
    ids = [*ids_of(text, "q;w"), END, *ids_of(text, "xyz")]
    showing = text.stop_searches([SPECIAL[END]])[0].text
    assert text.final_text(ids, ["wx"]) == "q;"
    assert showing.final_text(ids, ["wx"]) == "q;"
    assert showing.final_text(ids, ["xy"]) == f"q;w{SPECIAL[END]}"
    num_ids = text.stop_check(["wx"])(ids)
    stream = showing.decode_stream(["wx"])
    told = [stream.grow([token]) for token in ids[: num_ids - 1]]
    assert "".join(told) == "q;" and stream.end(ids[:num_ids]) == ""
