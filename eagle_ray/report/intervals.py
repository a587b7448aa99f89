"""Statistics: intervals of a ratio measured once a round (Student's t on logarithms) and of a difference of means.

    >>> ratio_interval([1.9, 2.1, 2.0])
    Interval(mean=1.998..., low=1.76..., high=2.26..., bound=1.83...)

Both sides of a ratio are measured in the same round, so that what slows a whole round down cancels.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

RESAMPLES = 2000
Counted = tuple[float, float]  # a sum, and how much it is over: a number of things, or seconds
GRID = 20_000  # steps of the numerical integral behind a quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """low, high: 95 %, two-sided. bound: 95 %, one-sided lower; 0 and inf: not known."""

    mean: float
    low: float
    high: float
    bound: float


def ratio_interval(ratios: list[float]) -> Interval:
    """ratios: positive, one for each round, at least one; a single round has no interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, freedom = statistics.fmean(logs), len(logs) - 1
    if not freedom:
        return Interval(math.exp(mean), 0.0, math.inf, 0.0)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    wide, one_sided = t_quantile(0.975, freedom) * error, t_quantile(0.95, freedom) * error
    return Interval(*(math.exp(x) for x in (mean, mean - wide, mean + wide, mean - one_sided)))


def pooled_ratio(rounds: Sequence[tuple[Counted, Counted]], seed: int = 0) -> Interval:
    """Return the ratio of both sides' tokens per second over all rounds, with a bootstrap interval over rounds.

    rounds: tokens and seconds of both sides, at least one round. The mean is the ratio of sums; a geometric mean of
    the rounds' ratios would depend on how uneven a side's rounds are.
    """
    draw = random.Random(seed)
    resampled = sorted(_ratio(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    low, bound = (resampled[round(share * RESAMPLES)] for share in (0.025, 0.05))
    return Interval(_ratio(rounds), low, resampled[-1 - round(0.025 * RESAMPLES)], bound)


def _ratio(rounds: Sequence[tuple[Counted, Counted]]) -> float:
    tokens, seconds = ([sum(each[side][part] for each in rounds) for side in (0, 1)] for part in (0, 1))
    return tokens[0] / seconds[0] / (tokens[1] / seconds[1])


@dataclass(frozen=True, slots=True)
class DifferenceInterval:
    """Of two pooled means. low, high: 95 %, two-sided, over what was resampled."""

    mean: float
    low: float
    high: float


def difference_interval(pairs: Sequence[tuple[Counted, Counted]], seed: int = 0) -> DifferenceInterval:
    """Return the difference of both sides' pooled means, with a bootstrap interval over pairs, at least one.

    pairs: sum and count of both sides per prompt; a side without any counts as a mean of 0.
    """
    draw = random.Random(seed)
    resampled = sorted(_difference(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    edge = round(0.025 * RESAMPLES)
    return DifferenceInterval(_difference(pairs), resampled[edge], resampled[-1 - edge])


def _difference(pairs: Sequence[tuple[Counted, Counted]]) -> float:
    first, second = (
        sum(pair[side][0] for pair in pairs) / max(sum(pair[side][1] for pair in pairs), 1) for side in (0, 1)
    )
    return first - second


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Student's t, for probabilities above 1/2: with x = sqrt(freedom) tan(angle) its density is cos^(freedom-1)."""
    step = math.pi / 2 / GRID
    density = [math.cos((i + 0.5) * step) ** (freedom - 1) for i in range(GRID)]
    wanted, area = (2 * probability - 1) * sum(density), 0.0
    for i, height in enumerate(density):
        if area + height >= wanted:
            return math.sqrt(freedom) * math.tan((i + (wanted - area) / height) * step)
        area += height
    return math.inf
