"""Read the roles of a GGUF file's tokens: special, end of an answer, never split.

end_ids(file.metadata)        # [128001, 128009]: the tokens that end an answer
special_ids(file.metadata)    # the control tokens
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType

OWN_TOKENIZER = "Put the model's own config.json and tokenizer.json into the directory of the file"
END_KEYS = ("eos", "eot", "eom")  # names in keys of the ends of a sequence, a turn and a message
# Tokens that end an answer in llama.cpp, too, whatever their file says of them.
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
)
# Texts of END_TEXTS that an ordinary token may be, since they are HTML's.
MARKUP = {
    "</s>",
    "<eos>",
}
# Tokens of a vocabulary in which <|end|> ends a message and no answer.
HARMONY = {
    "<|return|>",
    "<|call|>",
}


def special_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids of special tokens."""
    return [id for id, kind in enumerate(token_types(metadata)) if kind == TokenType.CONTROL]


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the tokens that end an answer: the EOS, further ones that metadata keys name, and those with END_TEXTS.

    Files of models without an end-of-turn token, and old files of Llama 3, name only the EOS.
    Raises KeyError.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in END_KEYS]
    texts = END_TEXTS - {"<|end|>"} if HARMONY.issubset(tokens) else END_TEXTS
    types = token_types(metadata)
    known = [
        id for id, text in enumerate(tokens) if text in texts and types[id] != TokenType.NORMAL
    ]
    return list(dict.fromkeys(id for id in (*named, *known) if id is not None))


def token_types(metadata: dict[str, Any]) -> list[int]:
    """Return the type of each token. Tokens with END_TEXTS become special, since some files mark them as ordinary."""
    pairs = zip(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True
    )
    special = END_TEXTS - MARKUP
    return [TokenType.CONTROL if text in special else kind for text, kind in pairs]


def added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that are never split in a text, special or not."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokens = zip(metadata["tokenizer.ggml.tokens"], token_types(metadata), strict=True)
    return [
        {"id": id, "content": content, **flags, "special": special[TokenType(kind)]}
        for id, (content, kind) in enumerate(tokens)
        if kind in special
    ]


def post_processor(metadata: dict[str, Any], adds_bos: bool) -> dict[str, Any] | None:
    """Return the post-processor that puts the BOS token before a text, or None.

    Args:
        adds_bos: whether to add it if the file does not specify it.
    """
    if not metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        return None
    id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][id]
    before = {"SpecialToken": {"id": bos, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, before, second],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }
