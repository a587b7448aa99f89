"""Write the byte-level BPE tokenizer of a GGUF file in transformers' layout.

    tokenizer_json(file.metadata)                     # the content of tokenizer.json
    tokenizer_config(file.metadata, max_length)       # the content of tokenizer_config.json
    end_ids(file.metadata)                            # [128001, 128009]: the tokens that end an answer

SCHEMES holds the ways to split text that tests compare with tokenizers which transformers builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from eagle_ray.gguf.blocks import GGUFError


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a tokenizer does besides its vocabulary and merges.

    Attributes:
        pre_tokenizers: what splits text into words before merges, as tokenizer.json writes it.
        normalizer: what text becomes before that.
        ignore_merges: whether a word that is a token stays whole, although merges may not lead to it.
        adds_bos: whether an encoded text begins with the BOS token if the file does not say it.
    """

    pre_tokenizers: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_by(digits: str) -> list[dict[str, Any]]:
    """Return what splits text by the pattern of OpenAI's cl100k, in which a number is some digits."""
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    pattern = rf"{words}|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


SCHEMES = {  # by tokenizer.ggml.pre
    "smollm": Scheme([{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]),
    "qwen2": Scheme(_split_by(r"\p{N}"), normalizer={"type": "NFC"}),
    "llama-bpe": Scheme(_split_by(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
}
TEMPLATE = "tokenizer.chat_template"  # further ones are named behind it, after a dot
OWN_TOKENIZER = "Put the model's own config.json and tokenizer.json into the directory of the file"
ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
ENDS = ("eos", "eot", "eom")  # of a sequence, a turn, a message, as keys name them
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)  # tokens that end an answer in llama.cpp, too, whatever their file says of them
MARKUP = {"</s>", "<eos>"}  # of END_TEXTS; an ordinary token may be this text, which is HTML's
HARMONY = {"<|return|>", "<|call|>"}  # of a vocabulary in which <|end|> ends a message and no answer


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises GGUFError if the tokenizer is not a known byte-level BPE."""
    tokens, merges = _vocabulary(metadata)
    scheme = _scheme(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata),
        "normalizer": scheme.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": scheme.pre_tokenizers},
        "post_processor": _post_processor(metadata, scheme),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
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
    template = metadata.get(TEMPLATE)
    named = {key.removeprefix(f"{TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{TEMPLATE}.")}
    if named:
        all_templates = named if template is None else {"default": template} | named
        template = [{"name": name, "template": text} for name, text in all_templates.items()]
    return config if template is None else config | {"chat_template": template}


def special_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids of special tokens."""
    return [id for id, kind in enumerate(_token_types(metadata)) if kind == TokenType.CONTROL]


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that keys name, the EOS first, and those of END_TEXTS.

    Files of models without a turn of their own, and old ones of Llama 3, name none but the EOS. Raises KeyError.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ENDS]
    texts = END_TEXTS - {"<|end|>"} if HARMONY.issubset(tokens) else END_TEXTS
    types = _token_types(metadata)
    known = [id for id, text in enumerate(tokens) if text in texts and types[id] != TokenType.NORMAL]
    return list(dict.fromkeys(id for id in (*named, *known) if id is not None))


def _token_types(metadata: dict[str, Any]) -> list[int]:
    """Return the type of each token. Those of END_TEXTS are special: some files have them as ordinary ones."""
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    special = END_TEXTS - MARKUP
    return [TokenType.CONTROL if text in special else kind for text, kind in pairs]


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GGUFError(f"tokenizer.ggml.model is {kind!r}. Known: 'gpt2' (byte-level BPE). {OWN_TOKENIZER}")
    return metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]


def _scheme(metadata: dict[str, Any]) -> Scheme:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in SCHEMES:
        raise GGUFError(f"tokenizer.ggml.pre is {name!r}. Known: {', '.join(SCHEMES)}. {OWN_TOKENIZER}")
    return SCHEMES[name]


def _added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that stand for themselves in a text, special or not."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokens = zip(metadata["tokenizer.ggml.tokens"], _token_types(metadata), strict=True)
    return [
        {"id": id, "content": content, **flags, "special": special[TokenType(kind)]}
        for id, (content, kind) in enumerate(tokens)
        if kind in special
    ]


def _post_processor(metadata: dict[str, Any], scheme: Scheme) -> dict[str, Any] | None:
    """Return what puts the BOS token before a text, or None."""
    if not metadata.get("tokenizer.ggml.add_bos_token", scheme.adds_bos):
        return None
    id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][id]
    before = [{"SpecialToken": {"id": bos, "type_id": 0}}]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first],
        "pair": [*before, first, *before, second],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }
