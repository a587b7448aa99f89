"""Write the byte-level BPE tokenizer of a GGUF file in transformers' layout.

tokenizer_json(file.metadata)                     # the content of tokenizer.json
tokenizer_config(file.metadata, max_length)       # the content of tokenizer_config.json
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType

from eagle_ray.gguf.blocks import GGUFError

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
}
OWN_TOKENIZER = "Put the model's own config.json and tokenizer.json into the directory of the file"
ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GGUFError if the tokenizer is not a known byte-level BPE."""
    tokens, merges = _vocabulary(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(id, tokens[id]) for id in special_ids(metadata)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(metadata)},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json. max_length: of a sequence, in tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {role: tokens[metadata[key]] for role, key in ROLES.items() if key in metadata}
    extra = [tokens[id] for id in special_ids(metadata) if tokens[id] not in roles.values()]
    config = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **roles,
        "extra_special_tokens": extra,
    }
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}


def special_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids of special tokens."""
    return [id for id, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == TokenType.CONTROL]


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GGUFError(f"tokenizer.ggml.model is {kind!r}. Known: 'gpt2' (byte-level BPE). {OWN_TOKENIZER}")
    return metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]


def _pre_tokenizers(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise GGUFError(f"tokenizer.ggml.pre is {name!r}. Known: {', '.join(PRE_TOKENIZERS)}. {OWN_TOKENIZER}")
    return PRE_TOKENIZERS[name]


def _added_token(id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **flags}
