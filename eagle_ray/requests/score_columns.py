"""Convert the scores of a finished sequence to columns of a row. Python's outputs have them as attributes."""

from __future__ import annotations

from typing import Any

from eagle_ray.core.continuations import ContinuationScores, ScoredContinuation
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings

# The columns, by name, that only rows with continuations have, and those that only documents have.
SCORE_COLUMNS = (
    "scores",
    "score_tokens",
    "score_bytes",
    "is_greedy",
    "best",
    "best_by_byte",
    "label_mass",
    "num_verified",
)
DOCUMENT_SCORE_COLUMNS = ("loglikelihood", "tokens", "bytes", "bits_per_byte")


def score_columns(scores: ContinuationScores) -> dict[str, Any]:
    """Return the columns of complete scores.

    `best` is the index of the continuation with the highest score; of equal scores, the first.
    `best_by_byte` is the index of the highest score divided by the continuation's bytes;
    continuations of no bytes are left out. `label_mass` is the probability that the next token is
    the first token of any continuation.
    """
    results = scores.results()
    sizes = [result.num_bytes for result in results]
    return {
        "scores": [result.score for result in results],
        "score_tokens": [result.num_tokens for result in results],
        "score_bytes": None if None in sizes else sizes,
        "is_greedy": [result.is_greedy for result in results],
        "best": max(range(len(results)), key=lambda i: results[i].score, default=None),
        "best_by_byte": _best_by_byte(results),
        "label_mass": scores.label_mass(),
        "num_verified": scores.num_verified,
    }


def continuations_column(sampling: SamplingSettings, is_stored: bool) -> dict[str, Any]:
    """Return the column of the texts that were scored after a prompt: continuations, or else choices.

    Args:
        sampling: parameters of the request.
        is_stored: whether the output stores prompts; without them the column stays null.
    """
    scored = sampling.choice if sampling.continuations is None else sampling.continuations
    if scored is None or not is_stored:
        return {}
    return {"continuations": dump_json(scored, ensure_ascii=False)}


def _best_by_byte(results: list[ScoredContinuation]) -> int | None:
    by_byte: dict[int, float] = {}
    for i, result in enumerate(results):
        if result.num_bytes is None:
            return None
        if result.num_bytes:
            by_byte[i] = result.score / result.num_bytes
    return max(by_byte, key=by_byte.__getitem__, default=None)
