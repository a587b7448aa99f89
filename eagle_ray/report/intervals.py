"""Statistics: intervals of a ratio measured once a round (Student's t on logarithms) and of a difference of means.

    >>> ratio_interval([1.9, 2.1, 2.0])
    Interval(mean=1.998..., low=1.76..., high=2.26..., bound=1.83...)

Both sides of a ratio are measured in one round, so that a disturbance of the whole round cancels.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

INTERVAL_RESAMPLES = 2000
Counted = tuple[float, float]  # a sum, and what it is divided by: a count, or seconds
GRID = 20_000  # steps of the numerical integral behind a quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % intervals.

    Attributes:
        mean: mean, or ratio.
        low, high: two-sided interval; 0 and inf if unknown.
        bound: lower end of the one-sided interval; 0 if unknown.
    """

    mean: float
    low: float
    high: float
    bound: float


def ratio_interval(ratios: list[float]) -> Interval:
    """Return the geometric mean of ratios and its intervals.

    Args:
        ratios: positive ratios, one for each round, at least one. A single round has no interval.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    if not freedom:
        return Interval(math.exp(mean), 0.0, math.inf, 0.0)

    error = statistics.stdev(logs) / math.sqrt(len(logs))
    wide = t_quantile(0.975, freedom) * error
    one_sided = t_quantile(0.95, freedom) * error
    return Interval(
        mean=math.exp(mean),
        low=math.exp(mean - wide),
        high=math.exp(mean + wide),
        bound=math.exp(mean - one_sided),
    )


def pooled_ratio(rounds: Sequence[tuple[Counted, Counted]], seed: int = 0) -> Interval:
    """Return the ratio of both sides' tokens per second over all rounds, with a bootstrap interval over rounds.

    The mean is the ratio of sums; a geometric mean of the rounds' ratios would depend on how uneven
    a side's rounds are.

    Args:
        rounds: tokens and seconds of both sides, at least one round.
    """
    draw = random.Random(seed)
    resampled = []
    for _ in range(INTERVAL_RESAMPLES):
        drawn = draw.choices(rounds, k=len(rounds))
        resampled.append(_ratio(drawn))
    resampled.sort()
    edge = round(0.025 * INTERVAL_RESAMPLES)
    one_sided_edge = round(0.05 * INTERVAL_RESAMPLES)
    return Interval(
        mean=_ratio(rounds),
        low=resampled[edge],
        high=resampled[-1 - edge],
        bound=resampled[one_sided_edge],
    )


def _ratio(rounds: Sequence[tuple[Counted, Counted]]) -> float:
    speed_a = _speed([a for a, _ in rounds])
    speed_b = _speed([b for _, b in rounds])
    return speed_a / speed_b


def _speed(counted: Sequence[Counted]) -> float:
    tokens = sum(tokens for tokens, _ in counted)
    seconds = sum(seconds for _, seconds in counted)
    return tokens / seconds


@dataclass(frozen=True, slots=True)
class DifferenceInterval:
    """The difference of two pooled means.

    Attributes:
        mean: difference of the means.
        low, high: two-sided 95 % interval over what was resampled.
    """

    mean: float
    low: float
    high: float


def difference_interval(
    pairs: Sequence[tuple[Counted, Counted]], seed: int = 0
) -> DifferenceInterval:
    """Return the difference of both sides' pooled means, with a bootstrap interval over pairs, at least one.

    Args:
        pairs: sum and count of both sides per prompt. A side whose counts are all 0 has the mean 0.
    """
    draw = random.Random(seed)
    resampled = []
    for _ in range(INTERVAL_RESAMPLES):
        drawn = draw.choices(pairs, k=len(pairs))
        resampled.append(_difference(drawn))
    resampled.sort()
    edge = round(0.025 * INTERVAL_RESAMPLES)
    return DifferenceInterval(_difference(pairs), resampled[edge], resampled[-1 - edge])


def _difference(pairs: Sequence[tuple[Counted, Counted]]) -> float:
    return _mean([first for first, _ in pairs]) - _mean([second for _, second in pairs])


def _mean(counted: Sequence[Counted]) -> float:
    total = sum(amount for amount, _ in counted)
    return total / max(sum(count for _, count in counted), 1)


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, for probabilities above 1/2.

    With x = sqrt(freedom) tan(angle) the density over the angle is cos^(freedom-1).
    """
    step = math.pi / 2 / GRID
    density = [math.cos((i + 0.5) * step) ** (freedom - 1) for i in range(GRID)]

    # The density is symmetric, so half of the probability lies below the first angle, 0.
    wanted = (2 * probability - 1) * sum(density)
    area = 0.0
    for i, height in enumerate(density):
        if area + height >= wanted:
            share = (wanted - area) / height
            return math.sqrt(freedom) * math.tan((i + share) * step)
        area += height
    return math.inf
