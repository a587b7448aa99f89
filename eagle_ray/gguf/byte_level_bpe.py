"""Convert the byte-level BPE tokenizer of a GGUF file (tokenizer.ggml.model is gpt2) to tokenizer.json.

    byte_level_json(file.metadata)        # {"model": {"type": "BPE", ...}, "pre_tokenizer": ..., ...}

SCHEMES has the supported ways to split text; tests compare each with a tokenizer that transformers
builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.token_roles import OWN_TOKENIZER, added_tokens, post_processor


@dataclass(frozen=True, slots=True)
class Scheme:
    """Settings of a byte-level tokenizer other than its vocabulary and merges.

    Attributes:
        pre_tokenizers: pre-tokenizers that split text into words, as in tokenizer.json.
        normalizer: normalizer that runs before them, or None.
        ignore_merges: whether a word that is a token stays whole even if merges would not produce
            it.
        adds_bos: whether an encoded text begins with the BOS token if the file does not specify it.
    """

    pre_tokenizers: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split_by(pattern: str) -> list[dict[str, Any]]:
    """Return pre-tokenizers that split text by a pattern and map its bytes to letters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(use_regex=False)]


def _cl100k(digits: str) -> list[dict[str, Any]]:
    """Return pre-tokenizers for the pattern of OpenAI's cl100k.

    Args:
        digits: regular expression of a number, such as one to three digits.
    """
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    return _split_by(rf"{words}|{SPACES}")


def _cased(ending: str, digits: str) -> list[dict[str, Any]]:
    """Return pre-tokenizers for the pattern of OpenAI's o200k, in which a word starts at its capital letters.

    Args:
        ending: regular expression of what may end a word, such as 's.
        digits: regular expression of a number.
    """
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"
    return _split_by(rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")


SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _cl100k(r"\p{N}{1,3}")
EACH_DIGIT = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SCHEMES = {  # by tokenizer.ggml.pre
    "smollm": Scheme(EACH_DIGIT),
    "refact": Scheme(EACH_DIGIT),  # Granite
    "qwen2": Scheme(_cl100k(r"\p{N}"), normalizer={"type": "NFC"}),
    "llama-bpe": Scheme(LLAMA3, ignore_merges=True, adds_bos=True),
    "smaug-bpe": Scheme(LLAMA3),  # SmolLM 3
    "dbrx": Scheme(LLAMA3),  # vocabularies of cl100k
    "glm4": Scheme(LLAMA3, ignore_merges=True),
    "chatglm-bpe": Scheme(LLAMA3),
    "tekken": Scheme(_cased("", r"\p{N}"), ignore_merges=True, adds_bos=True),  # Mistral
    "gpt-4o": Scheme(_cased(CONTRACTIONS, r"\p{N}{1,3}")),  # gpt-oss
}


def byte_level_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GGUFError for an unknown way to split text, KeyError."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = metadata["tokenizer.ggml.merges"]
    scheme = _scheme(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(metadata),
        "normalizer": scheme.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": scheme.pre_tokenizers},
        "post_processor": post_processor(metadata, scheme.adds_bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": scheme.ignore_merges,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _scheme(metadata: dict[str, Any]) -> Scheme:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in SCHEMES:
        raise GGUFError(
            f"tokenizer.ggml.pre is {name!r}. Known: {', '.join(SCHEMES)}. {OWN_TOKENIZER}"
        )
    return SCHEMES[name]
