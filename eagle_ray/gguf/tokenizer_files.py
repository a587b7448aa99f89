"""Write the tokenizer of a GGUF file in transformers' layout.

tokenizer_json(file.metadata)                     # the content of tokenizer.json
tokenizer_config(file.metadata, max_length)       # the content of tokenizer_config.json
"""

from __future__ import annotations

from typing import Any

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.byte_level_bpe import byte_level_json
from eagle_ray.gguf.sentencepiece_bpe import sentencepiece_json
from eagle_ray.gguf.token_roles import OWN_TOKENIZER, special_ids

TOKENIZER_KINDS = {"gpt2": byte_level_json, "llama": sentencepiece_json}  # by tokenizer.ggml.model
GGUF_TEMPLATE = "tokenizer.chat_template"  # further ones are named behind it, after a dot
SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GGUFError if the kind of tokenizer is not supported, KeyError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in TOKENIZER_KINDS:
        raise GGUFError(
            f"tokenizer.ggml.model is {kind!r}. Known: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece). "
            f"{OWN_TOKENIZER}"
        )
    return TOKENIZER_KINDS[kind](metadata)


def tokenizer_config(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json.

    Args:
        max_length: maximum length of a sequence, in tokens.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {
        role: tokens[metadata[key]] for role, key in SPECIAL_TOKEN_KEYS.items() if key in metadata
    }
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
    template = metadata.get(GGUF_TEMPLATE)
    named = {
        key.removeprefix(f"{GGUF_TEMPLATE}."): text
        for key, text in metadata.items()
        if key.startswith(f"{GGUF_TEMPLATE}.")
    }
    if named:
        all_templates = named if template is None else {"default": template} | named
        template = [{"name": name, "template": text} for name, text in all_templates.items()]
    return config if template is None else config | {"chat_template": template}
