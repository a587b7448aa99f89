"""SentencePiece models as llama.cpp's converter writes them into GGUF files, and back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import sentencepiece
from gguf import TokenType

ODD = [
    "\u00a0",
    "  ",
    "     ",
    "\n\n",
    "\t",
    "🙂",
    "é",
    "e\u0301",
    "東",
    "<b>",
    "</b>",
    "½",
]
ODD += ["0", "123", "x1y2", "'s", "...", "\r\n", "\u200b", "Ω"]


def metadata_of_model(model: bytes, architecture: str) -> dict[str, Any]:
    """Return the metadata of a GGUF file. model: as sentencepiece writes it."""
    own = sentencepiece.SentencePieceProcessor(model_proto=model)
    spaces = "\u2581\u2581"
    named = ("<b>", spaces, "\n") if architecture.startswith("gemma") else ("<b>",)
    tokens, scores, types = [], [], []
    for id in range(own.get_piece_size()):
        piece, score = own.id_to_piece(id), own.get_score(id)
        kind = TokenType.NORMAL
        if own.is_unknown(id):
            kind = TokenType.UNKNOWN
        elif own.is_control(id):
            kind = TokenType.CONTROL
        elif own.is_byte(id):
            kind = TokenType.BYTE
        elif piece.startswith(named):
            # The configuration of the tokenizer names them, and converters write -1000 for those.
            kind, score = TokenType.USER_DEFINED, -1000.0
            piece = piece.replace("\u2581", " ")
        tokens.append(piece)
        scores.append(score)
        types.append(int(kind))
    metadata = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": own.bos_id(),
        "tokenizer.ggml.eos_token_id": own.eos_id(),
        "tokenizer.ggml.unknown_token_id": own.unk_id(),
    }
    return (
        metadata
        if architecture == "llama"
        else metadata | {"tokenizer.ggml.add_space_prefix": architecture == "phi3"}
    )


def random_texts(sentences: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return texts of cuts of the sentences and of odd letters."""
    rng = random.Random(seed)
    pieces = list(ODD)
    for sentence in sentences:
        for _ in range(20):
            first = rng.randrange(len(sentence))
            pieces.append(sentence[first : first + rng.randint(1, 12)])
    return ["".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(count)]
