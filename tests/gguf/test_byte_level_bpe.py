"""Tokenizers of GGUF files against those that transformers builds of one vocabulary."""

import json
import random

import pytest
from tokenizers import Tokenizer as Backend
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf import convert_gguf_tokenizer

from eagle_ray.gguf.byte_level_bpe import SCHEMES
from eagle_ray.gguf.tokenizer_files import tokenizer_config, tokenizer_json
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.gguf import byte_letters, toy_metadata

WHOLE = "xyz"  # a token that no merges lead to
WORDS = [
    "th",
    "the",
    " t",
    " the",
    "in",
    "ing",
    "12",
    "123",
    "\n\n",
    "  ",
    "'s",
    "er",
    " a",
    "é",
    "ab",
    "abc",
    "!!",
]
PIECES = [
    "the",
    " the",
    "thing",
    "1",
    "12345",
    "６７",
    "'s",
    "'LL",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "\n",
    "\r\n",
    " \n",
]
PIECES += [
    "  ",
    "!!",
    "?\n",
    "\t",
    "abc",
    "ABC",
    "don't",
    " ",
    "½",
    "Ⅻ",
    "<|im_start|>",
    "<tool_call>",
    "_x",
    "\u00a0",
    WHOLE,
]
CASED = ["theIng", "THEing abC", "THE 12345/67/\n\n", "it's IT'S theTHE'll", "a/b//\r\n c"]
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
]  # the last one is added, not special


def letters(text: bytes) -> str:
    return "".join(byte_letters()[byte] for byte in text)


def metadata_of(pre: str) -> dict:
    """Return a vocabulary of bytes, of the beginnings of WORDS, made by one merge each, of WHOLE and of SPECIAL."""
    words = {word.encode()[:size] for word in WORDS for size in range(2, len(word.encode()) + 1)}
    joined = sorted(words, key=lambda word: (len(word), word))
    tokens = [letters(bytes([byte])) for byte in range(256)] + [*map(letters, joined), WHOLE]
    metadata = toy_metadata(
        **{
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens + SPECIAL,
            "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 3, 4],
            "tokenizer.ggml.merges": [
                f"{letters(word[:-1])} {letters(word[-1:])}" for word in joined
            ],
            "tokenizer.ggml.bos_token_id": len(tokens) + 1,
            "tokenizer.ggml.eos_token_id": len(tokens) + 2,
            "tokenizer.ggml.unknown_token_id": len(tokens),
            "tokenizer.ggml.padding_token_id": len(tokens),
        }
    )
    del metadata["tokenizer.ggml.add_bos_token"]
    return metadata


def texts() -> list[str]:
    rng = random.Random(0)
    return ["", *("".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(400))]


def backend(metadata: dict) -> Backend:
    return Backend.from_str(json.dumps(tokenizer_json(metadata)))


def test_qwen2_splits_and_normalises_as_transformers_does():
    metadata = metadata_of("qwen2")
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    own = Qwen2Tokenizer(vocab=vocab, merges=merges, extra_special_tokens=SPECIAL[1:3])
    own.add_tokens(SPECIAL[3:])
    found = backend(metadata)
    for text in texts():
        assert found.encode(text).ids == own.encode(text), repr(text)
        assert found.decode(found.encode(text).ids) == own.decode(
            own.encode(text), skip_special_tokens=True
        )


def test_llama_3_splits_and_merges_as_transformers_does():
    """Its converter reads the ranks of byte strings. A word with a rank stays whole."""
    metadata = metadata_of("llama-bpe")
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    words = metadata["tokenizer.ggml.tokens"][: -len(SPECIAL)]
    ranks = {bytes(byte_of[letter] for letter in word): id for id, word in enumerate(words)}

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, tiktoken_url):
            return ranks

    converter = Converter("", extra_special_tokens=SPECIAL)
    _, merges = converter.extract_vocab_merges_from_model("")
    metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    own, found = converter.converted(), backend(metadata)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    for text in texts():
        expected = own.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert found.encode(text).ids == [bos, *expected]


@pytest.mark.parametrize(
    "pre", ["qwen2", "llama-bpe", "smaug-bpe", "dbrx", "glm4", "tekken", "gpt-4o"]
)
def test_texts_are_split_as_transformers_reads_such_files(pre):
    """It has no record of glm4, whose pattern llama.cpp has as that of Llama 3."""
    metadata = metadata_of(pre)
    scheme = SCHEMES[pre]
    given = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": "dbrx" if pre == "glm4" else pre,
        "tokens": metadata["tokenizer.ggml.tokens"],
        "merges": metadata["tokenizer.ggml.merges"],
        "token_type": metadata["tokenizer.ggml.token_type"],
    }
    own, _ = convert_gguf_tokenizer("llama", given)
    written = tokenizer_json(metadata) | {"normalizer": None}  # which it leaves out
    written["model"]["ignore_merges"] = False
    found = Backend.from_str(json.dumps(written))
    for text in [*texts(), *CASED]:
        expected = own.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected, repr(text)
    assert written["pre_tokenizer"]["pretokenizers"] == scheme.pre_tokenizers


@pytest.mark.parametrize(
    ("pre", "adds_bos"), [("qwen2", False), ("llama-bpe", True), ("smollm", False)]
)
def test_a_target_adds_bos_to_a_prompt_and_not_to_a_chat(tmp_path, pre, adds_bos):
    metadata = metadata_of(pre)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(metadata)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata, 128)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.encode("abc")[0] == bos) == adds_bos
    assert tokenizer.encode_chat([{"role": "user", "content": "abc"}])[:2] == [
        bos,
        tokenizer.encode("abc")[-1],
    ]
    assert (
        tokenizer.decode(tokenizer.encode("the thing, 123 <tool_call>"))
        == "the thing, 123 <tool_call>"
    )
    explicit = metadata | {"tokenizer.ggml.add_bos_token": not adds_bos}
    assert (tokenizer_json(explicit)["post_processor"] is not None) != adds_bos
