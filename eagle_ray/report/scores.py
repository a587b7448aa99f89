"""Scores of sampled answers: mean, pass@k and majority vote over problems, with 95 % intervals.

A problem is an input row; its samples are the answers to it. The mean and pass@k of a group are
means over its problems, so a problem with more samples does not weigh more. pass@k is the unbiased
estimator of Chen et al. 2021 (arXiv 2107.03374): of n samples, c pass, and 1 - C(n - c, k) / C(n,
k) is the chance that one of k drawn ones passes. The majority vote is the score of the answer that
most samples give; tied answers count equally.

    >>> samples = [ScoredSample("q1", "math", 1.0, "4"), ScoredSample("q1", "math", 0.0, "5")]
    >>> score_report(samples)["total"]["pass_at"]["2"]["mean"]
    1.0
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_ray.report.intervals import t_quantile
from eagle_ray.report.text import NO_VALUE, number, render

MIN_PROBLEMS = 8  # problems that an interval of values other than 0 and 1 takes
Z = 1.959964  # the normal distribution's 97.5 % quantile
PASS_WORDS = frozenset({"yes", "true", "correct", "pass", "passed"})
FAIL_WORDS = frozenset({"no", "false", "incorrect", "wrong", "fail", "failed"})


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One answer.

    Attributes:
        problem: key of the input row.
        group: value of the column that the report is grouped by; "" without one.
        score: score of the answer; a sample without one (None) is counted and left out.
        answer: text that the majority vote compares; None differs from all other answers.
    """

    problem: str
    group: str
    score: float | None
    answer: str | None


def as_score(value: Any) -> float | None:
    """Return a number for a boolean, a number, or a text such as 1, 0.5, yes or incorrect; else None."""
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    word = value.strip().strip(".!\"'").lower()
    if word in PASS_WORDS or word in FAIL_WORDS:
        return float(word in PASS_WORDS)
    try:
        score = float(word)
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate from num_samples samples, at least k."""
    num_failed = num_samples - num_passed
    if num_failed < k:
        return 1.0
    none_passes = math.prod(1.0 - k / i for i in range(num_failed + 1, num_samples + 1))
    return 1.0 - none_passes


def majority_score(samples: list[tuple[str | None, float]]) -> float:
    """Return the mean score of the most frequent answers.

        >>> majority_score([("4", 1.0), ("4", 1.0), ("5", 0.0)])
        1.0

    Args:
        samples: answer and score of each sample.
    """
    by_answer: dict[object, list[float]] = defaultdict(list)
    for place, (answer, score) in enumerate(samples):
        key = place if answer is None else answer
        by_answer[key].append(score)

    groups = by_answer.values()
    max_votes = max(map(len, groups))
    tied = [np.mean(group) for group in groups if len(group) == max_votes]
    return float(np.mean(tied))


def interval_of(values: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over problems, or None for too few.

    The interval is Wilson's if all values are 0 or 1, and Student's t otherwise.
    """
    num = len(values)
    mean = float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        return _wilson_interval(mean, num)
    if num < MIN_PROBLEMS:
        return None
    deviation = float(values.std(ddof=1))
    half = t_quantile(0.975, num - 1) * deviation / math.sqrt(num)
    return mean - half, mean + half


def _wilson_interval(mean: float, num: int) -> tuple[float, float]:
    center = mean + Z * Z / (2 * num)
    variance = mean * (1 - mean) / num
    spread = Z * math.sqrt(variance + Z * Z / (4 * num * num))
    scale = 1 + Z * Z / num
    low = (center - spread) / scale
    high = (center + spread) / scale
    return max(0.0, low), min(1.0, high)


def score_report(samples: Iterable[ScoredSample], pass_at: float | None = None) -> dict[str, Any]:
    """Return the scores of all problems ("total") and of each group ("groups").

    Args:
        pass_at: lowest score that passes. Without it, pass@k is given only if every score is 0 or
            1.
    """
    problems: dict[str, dict[str, list[ScoredSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        problems[sample.group][sample.problem].append(sample)

    everything = [of_problem for group in problems.values() for of_problem in group.values()]
    if pass_at is None and _are_binary(everything):
        pass_at = 1.0

    groups = {}
    for name, group in sorted(problems.items()):
        if name:
            groups[name] = _scores_of(list(group.values()), pass_at)
    return {"pass_at_score": pass_at, "total": _scores_of(everything, pass_at), "groups": groups}


def _are_binary(problems: list[list[ScoredSample]]) -> bool:
    return all(sample.score in (None, 0.0, 1.0) for problem in problems for sample in problem)


def _scores_of(problems: list[list[ScoredSample]], pass_at: float | None) -> dict[str, Any]:
    # Problems without a scored sample are left out.
    scored = []
    for problem in problems:
        answers = [(s.answer, s.score) for s in problem if s.score is not None]
        if answers:
            scored.append(answers)

    counts = {
        "problems": len(problems),
        "samples": sum(map(len, problems)),
        "scored": sum(map(len, scored)),
    }
    if not scored:
        return counts | {"mean": _estimate([]), "pass_at": {}, "majority": None}

    means = [float(np.mean([score for _, score in problem])) for problem in scored]
    passed = {}
    if pass_at is not None:
        for k in _ks(scored):
            passed[str(k)] = _pass_estimate(scored, pass_at, k)
    votes = None
    if _has_votes(scored):
        votes = _estimate([majority_score(problem) for problem in scored])
    return counts | {"mean": _estimate(means), "pass_at": passed, "majority": votes}


def _ks(problems: list[list[Any]]) -> list[int]:
    """Return 1, 2, 4 ... and n, up to the fewest samples that a problem has; none for one sample."""
    num_samples = min(map(len, problems))
    if num_samples == 1:
        return []
    powers = [2**i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def _pass_estimate(problems: list[list[Any]], pass_at: float, k: int) -> dict[str, Any]:
    estimates = []
    for problem in problems:
        num_passed = sum(score >= pass_at for _, score in problem)
        estimates.append(pass_at_k(len(problem), num_passed, k))
    return _estimate(estimates)


def _has_votes(problems: list[list[Any]]) -> bool:
    """Return whether some problem has an answer that two of its samples give."""
    answers = ([answer for answer, _ in problem if answer is not None] for problem in problems)
    return any(len(set(given)) < len(given) for given in answers)


def _estimate(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"mean": None, "interval": None}
    array = np.array(values)
    interval = interval_of(array)
    return {"mean": float(array.mean()), "interval": list(interval) if interval else None}


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Scores as text, for a terminal or a page.

    Attributes:
        header: titles of the columns.
        groups: lines of the groups; empty if the scores are not grouped.
        total: line of all problems.
        note: explanation of the numbers, and how many samples have no score.
    """

    header: list[str]
    groups: list[list[str]]
    total: list[str]
    note: str


def score_table(scores: dict[str, Any]) -> ScoreTable:
    """Return scores as a table.

    Args:
        scores: report of `score_report`, with the names of the score's column as "column" and of the
            groups' column as "by".
    """
    total = scores["total"]
    ks = list(total["pass_at"])
    header = [scores["by"] or "", "problems", "samples", "mean"]
    header += [f"pass@{k}" for k in ks]
    if total["majority"]:
        header.append("majority")

    def line(name: str, group: dict[str, Any]) -> list[str]:
        estimates = [group["mean"]]
        estimates += [group["pass_at"].get(k) for k in ks]
        if total["majority"]:
            estimates.append(group["majority"])
        counts = [number(group["problems"]), number(group["samples"])]
        return [name, *counts, *map(_estimate_text, estimates)]

    groups = [line(name, group) for name, group in scores["groups"].items()]
    return ScoreTable(header, groups, line("all", total), _note(scores))


def scores_text(scores: dict[str, Any]) -> str:
    """Return a table with a line for each group and a total, and a note on the samples without a score."""
    table = score_table(scores)
    return f"{render(table.header, [*table.groups, table.total])}\n{table.note}"


def _note(scores: dict[str, Any]) -> str:
    total = scores["total"]
    note = f"scores: column {scores['column']}, means over problems with 95 % intervals"
    if total["pass_at"]:
        note += f", a sample passes from {scores['pass_at_score']:g}"
    num_left = total["samples"] - total["scored"]
    if num_left:
        note += f"; {num_left:,} of {total['samples']:,} samples have no score and are left out"
    return note


def _estimate_text(estimate: dict[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return NO_VALUE
    mean = f"{estimate['mean']:.3f}"
    if not estimate["interval"]:
        return mean
    low, high = estimate["interval"]
    return f"{mean} [{low:.3f}, {high:.3f}]"
