"""Summarise rows with scored continuations: accuracy, label mass and calibration.

    summary = choices_summary(read, has_answer=True)
    summary["accuracy"], summary["label_mass"]      # 0.71, 0.93

A row is right if its column `answer` is the index `best`, as in lm-eval's `acc`, and right by byte
if it is `best_by_byte`, as in `acc_norm`. The confidence of a row is the best continuation's share
of the total probability, and its margin is the difference of the two best scores.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow.compute as pc

from eagle_ray.report.histogram import histogram
from eagle_ray.report.summary import ReadColumns
from eagle_ray.report.text import counted, number

ANSWER_COLUMN = "answer"  # an input column: the index of the right continuation
CHOICE_COLUMNS = ["scores", "best", "best_by_byte", "label_mass"]
NUM_CONFIDENCE_BINS = 10  # equal bins from 0 to 1


def choices_summary(read: ReadColumns, has_answer: bool) -> dict[str, Any] | None:
    """Return the summary of scored rows, or None if there are none.

    `calibration` has for each bin of confidence its rows, their mean confidence and how many are right;
    `best_scores` and `margins` are histograms.

    Args:
        has_answer: whether the rows have the column ANSWER_COLUMN.
    """
    rows: list[dict[str, Any]] = []
    for table in read([*CHOICE_COLUMNS, ANSWER_COLUMN] if has_answer else CHOICE_COLUMNS):
        rows += table.filter(pc.is_valid(table["best"])).to_pylist()
    if not rows:
        return None
    masses = [row["label_mass"] for row in rows if row["label_mass"] is not None]
    answered = [row for row in rows if _is_index(row.get(ANSWER_COLUMN), row["scores"])]
    return {
        "rows": len(rows),
        "label_mass": sum(masses) / len(masses) if masses else None,
        "answered": len(answered),
        "accuracy": _share_of(answered, "best"),
        "accuracy_by_byte": _share_of(answered, "best_by_byte"),
        "calibration": _calibration(answered),
        "best_scores": histogram([row["scores"][row["best"]] for row in rows]),
        "margins": histogram([margin_of(row["scores"]) for row in rows if len(row["scores"]) > 1]),
    }


def choices_line(summary: dict[str, Any] | None) -> str:
    """Return one line about the scored rows of a run; empty without any."""
    if not summary:
        return ""
    parts = [counted(summary["rows"], "row")]
    if summary["accuracy"] is not None:
        by_byte = number(summary["accuracy_by_byte"], 3)
        parts.append(f"accuracy {summary['accuracy']:.3f}, by byte {by_byte}")
    if summary["label_mass"] is not None:
        parts.append(f"label mass {summary['label_mass']:.3f}")
    return f"scores: {', '.join(parts)}"


def confidence_of(scores: list[float]) -> float:
    """Return the best continuation's share of the probability of all continuations."""
    largest = max(scores)
    return 1 / sum(math.exp(score - largest) for score in scores)


def margin_of(scores: list[float]) -> float:
    """Return the difference of the two best scores; there must be at least two."""
    second, best = sorted(scores)[-2:]
    return best - second


def _is_index(answer: Any, scores: list[float]) -> bool:
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    return is_number and 0 <= answer < len(scores)


def _share_of(answered: list[dict[str, Any]], column: str) -> float | None:
    """Return the share of rows whose column equals the answer; None if a row has no value."""
    if not answered or any(row[column] is None for row in answered):
        return None
    return sum(row[column] == row[ANSWER_COLUMN] for row in answered) / len(answered)


def _calibration(answered: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not answered:
        return None
    counts = [0] * NUM_CONFIDENCE_BINS
    confidences = [0.0] * NUM_CONFIDENCE_BINS
    right = [0] * NUM_CONFIDENCE_BINS
    for row in answered:
        confidence = confidence_of(row["scores"])
        place = min(int(confidence * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
        counts[place] += 1
        confidences[place] += confidence
        right[place] += row["best"] == row[ANSWER_COLUMN]
    means = [
        total / count if count else 0.0 for total, count in zip(confidences, counts, strict=True)
    ]
    return {"rows": counts, "confidence": means, "right": right}
