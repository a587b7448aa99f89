"""Score whole texts: windows over their tokens, and columns of the summed log-probabilities.

    >>> [(w.start, w.first, w.end) for w in windows(num_tokens=12, max_length=5, stride=3)]
    [(0, 1, 6), (3, 6, 9), (6, 9, 12)]

A window reads the tokens from `start` on and scores the tokens from `first` on. So every token
except the first one is scored once. The first window scores as many tokens as the model reads at
once. Each later window scores `stride` tokens, after as many tokens of context as fit. These are
the windows of lm-eval's loglikelihood_rolling, whose stride is max_length - context_len + 1.

A document begins with the tokenizer's BOS token, or else its end-of-sequence token. That token is
read and not scored. Without a tokenizer, the first token is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.continuations import Continuation, ContinuationScores
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence as EngineSequence
from eagle_ray.requests.score_columns import score_columns
from eagle_ray.requests.scored_prompts import num_bytes, prefix_id
from eagle_ray.text.tokenizer import Tokenizer

# Ids of all windows of a document, which are held at once: half a gigabyte with their tries.
MAX_WINDOW_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a document: tokens [start, end) are read, and of these [first, end) are scored."""

    start: int
    first: int
    end: int


def windows(num_tokens: int, max_length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a document.

    Args:
        num_tokens: tokens of the document.
        max_length: tokens that the model reads at once. The last token of a window is scored, not
            read.
        stride: tokens that each window but the first one scores; at most max_length.
    """
    first = 1
    scored = max_length
    while first < num_tokens:
        end = min(first + scored, num_tokens)
        yield Window(max(0, end - max_length - 1), first, end)
        first = end
        scored = stride


def scored_document(
    prompt_ids: list[int], tokenizer: Tokenizer, max_length: int | None, stride: int | None
) -> list[tuple[list[int], ContinuationScores]]:
    """Return the windows of a document: token ids of each context, and the tokens scored after it.

    Raises RequestError if the windows hold too many tokens, or for a stride above max_length.

    Args:
        prompt_ids: token ids of the document, with or without the BOS token.
        tokenizer: tokenizer of the target.
        max_length: tokens that the model reads at once; None for a single window.
        stride: tokens that later windows score; None is half of max_length.
    """
    ids = prompt_ids
    if tokenizer.has_text and ids[:1] != [front := prefix_id(tokenizer)]:
        ids = [front, *ids]
    max_length = max_length or len(ids)
    stride = max(1, max_length // 2) if stride is None else stride
    if stride > max_length:
        raise RequestError(
            "invalid_sampling",
            f"score_stride: must be at most {max_length} (model.max_model_len), got {stride}. Lower it",
        )
    num_windows = 1 + max(0, len(ids) - 2 - max_length + stride) // stride
    if num_windows * (min(max_length, len(ids)) + 1) > MAX_WINDOW_TOKENS:
        raise RequestError(
            "prompt_too_long",
            f"the document of {len(ids)} tokens has {num_windows} windows of {max_length}, together more than "
            f"{MAX_WINDOW_TOKENS} tokens. Divide the document, or raise score_stride",
        )
    parts = []
    for window in windows(len(ids), max_length, stride):
        scored = Continuation(ids[window.first : window.end])
        parts.append((ids[window.start : window.first], ContinuationScores([scored], "the prompt")))
    return parts or [(ids, ContinuationScores([Continuation([])]))]


def scored_ids(sequences: Sequence[EngineSequence]) -> list[int]:
    """Return the token ids of a document that its windows score."""
    ids: list[int] = []
    for sequence in sequences:
        assert sequence.scoring is not None, "as scored_document makes them"
        ids += sequence.scoring.continuations[0].token_ids
    return ids


def document_ids(sequences: Sequence[EngineSequence]) -> list[int]:
    """Return the token ids of a document: the first window's context, then all scored tokens."""
    return sequences[0].prompt_ids + scored_ids(sequences)


def document_columns(
    sequences: Sequence[EngineSequence], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the columns of a document whose windows are finished.

    `bytes` is null without a tokenizer, and `bits_per_byte` is null without bytes.
    """
    scores = []
    num_verified = 0
    for sequence in sequences:
        assert sequence.scoring is not None, "as scored_document makes them"
        scores.append(sequence.scoring.results()[0].score)
        num_verified += sequence.scoring.num_verified
    total = math.fsum(scores)
    size = _num_bytes(sequences, tokenizer)
    return {
        "loglikelihood": total,
        "tokens": len(scored_ids(sequences)),
        "bytes": size,
        "bits_per_byte": -total / (size * math.log(2)) if size else None,
        "num_verified": num_verified,
    }


def prompt_and_scores(
    sequences: Sequence[EngineSequence], tokenizer: Tokenizer | None
) -> tuple[list[int], dict[str, Any]]:
    """Return the token ids of a request's prompt, and its score columns, which are empty without scores."""
    first = sequences[0]
    if first.sampling.score_text:
        return document_ids(sequences), document_columns(sequences, tokenizer)
    if first.scoring is None:
        return first.prompt_ids, {}
    return first.prompt_ids, score_columns(first.scoring)


def _num_bytes(sequences: Sequence[EngineSequence], tokenizer: Tokenizer | None) -> int | None:
    """Return the bytes of the scored text in UTF-8, without the BOS token; None without a tokenizer."""
    if tokenizer is None:
        return None
    text = sequences[0].prompt_text
    if text is None:
        return num_bytes(scored_ids(sequences), tokenizer)
    front = tokenizer.decode_with_special(sequences[0].prompt_ids[:1])
    return len(text.removeprefix(front).encode())
