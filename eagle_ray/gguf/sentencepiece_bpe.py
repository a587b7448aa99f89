"""Convert the SentencePiece tokenizer of a GGUF file (tokenizer.ggml.model is llama) to tokenizer.json.

    sentencepiece_json(file.metadata)     # {"model": {"type": "BPE", "byte_fallback": true, ...}, ...}

The file has no merges. SentencePiece joins the two neighbours whose piece has the best score, so
every way to cut a piece in two is a merge, the best pieces first. For Gemma the order of the ids
replaces scores, as in transformers: converters write -1000 for its runs of spaces.

Other models put a space before a text, and after each special token in it. So do llama.cpp and the
tokenizer.json of Llama 2, Mistral 7B and Phi-3.
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType

from eagle_ray.gguf.token_roles import added_tokens, post_processor

PIECE_SPACE = "\u2581"  # the character for a space in pieces
BY_ID = ("gemma", "gemma2", "gemma3")  # architectures whose merges are in the order of their ids
STRIPS_RIGHT = "phi3"  # architecture whose special tokens take the white space behind them
KEEPS_RIGHT = ("<unk>", "<s>", "<|endoftext|>")  # but for these
DECODER = [
    {"type": "Replace", "pattern": {"String": PIECE_SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # the space put before a text
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": PIECE_SPACE}
PREPEND = {"type": "Prepend", "prepend": PIECE_SPACE}
SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def sentencepiece_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises KeyError."""
    architecture = metadata["general.architecture"]
    tokens = [_spelled(token) for token in metadata["tokenizer.ggml.tokens"]]
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", architecture not in BY_ID)
    ranks = range(len(tokens)) if architecture in BY_ID else _ranks(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, architecture, set(tokens)),
        "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
        if adds_space
        else REPLACE,
        "pre_tokenizer": None if adds_space else SPLIT,
        "post_processor": post_processor(metadata, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": [*DECODER, STRIP] if adds_space else DECODER},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _unknown(metadata, tokens),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges_of(tokens, list(ranks)),
        },
    }


def merges_of(tokens: list[str], ranks: list[int]) -> list[list[str]]:
    """Return all pairs of pieces that merge into a piece, those of the best pieces first.

    Among the merges of one piece, those with the longest first part come last, as in transformers.

    Args:
        ranks: rank of each token; the best piece has the lowest.
    """
    ids = {token: id for id, token in enumerate(tokens)}
    pairs = []
    for token, rank in zip(tokens, ranks, strict=True):
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ids and right in ids:
                pairs.append((rank, -cut, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return [[left, right] for _, _, left, right in pairs]


def _ranks(metadata: dict[str, Any]) -> list[int]:
    """Return the place of each token among all, by score. Equal scores have equal ranks."""
    scores = metadata["tokenizer.ggml.scores"]
    place = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
    return [place[score] for score in scores]


def _spelled(token: str) -> str:
    """Return a run of spaces, which converters write as such, in the letters of other pieces."""
    return PIECE_SPACE * len(token) if " " in token and not token.strip(" ") else token


def _unknown(metadata: dict[str, Any], tokens: list[str]) -> str | None:
    """Return the token of what has no piece and no bytes."""
    id = metadata.get("tokenizer.ggml.unknown_token_id")
    if id is None:
        types = metadata["tokenizer.ggml.token_type"]
        id = types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else None
    return None if id is None else tokens[id]


def _added(metadata: dict[str, Any], architecture: str, pieces: set[str]) -> list[dict[str, Any]]:
    """Return the tokens that are never split. Runs of spaces are none: merges lead to them."""
    added = [token for token in added_tokens(metadata) if token["content"] in pieces]
    if architecture != STRIPS_RIGHT:
        return added
    return [
        token
        | {
            "rstrip": token["content"] not in KEEPS_RIGHT
            and (token["special"] or token["content"] == "</s>")
        }
        for token in added
    ]
