"""Estimate the remaining work of a run, in tokens and in seconds of one worker, with its uncertainty.

tokens = tokens_left({"math": ClassLeft(counts, waiting=500)}, max_tokens=4096)
work = work_left(tokens, speed)
work.expected, work.quantile(0.8)      # seconds of one worker
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

from eagle_ray.scaling.lengths import LengthCounts

# Shares of runs that end within a predicted time.
LIKELY = 0.8
SURE = 0.95
PRIOR_ROWS = 4.0  # rows of all classes that count in the lengths of each one
MIN_WINDOW_S = 120.0  # seconds over which speed is measured, at least
WINDOW_SHARE = 0.25  # share of the run so far
MAX_WINDOW_S = 1200.0
NUM_PARTS = 8  # parts of the window, whose spread is the uncertainty of the speed
# Relative standard deviation of the speed to come, next to the one that was measured: runs whose
# input, neighbours or cards change. Found by calibration in jobs/bench/deadlines.py.
SPEED_DRIFT = 0.03


@dataclass(frozen=True, slots=True)
class Amount:
    """An estimate of a positive number: its mean and its standard deviation."""

    expected: float
    deviation: float

    def quantile(self, share: float) -> float:
        """Return a quantile of a log-normal distribution with this mean and deviation."""
        if self.expected <= 0 or self.deviation <= 0:
            return max(self.expected, 0.0)
        variance = math.log1p((self.deviation / self.expected) ** 2)
        spread = math.sqrt(variance)
        return self.expected * math.exp(NormalDist().inv_cdf(share) * spread - variance / 2)

    def times(self, factor: float, relative: float = 0.0) -> Amount:
        """Return this estimate multiplied by an uncertain factor.

        Args:
            factor: mean of the factor.
            relative: standard deviation of the factor, as a share of its mean.
        """
        expected = self.expected * factor
        own = self.deviation * factor
        return Amount(expected, math.hypot(own, expected * relative))


@dataclass(frozen=True, slots=True)
class ClassLeft:
    """The state of the rows of one class, such as one category of prompts.

    Attributes:
        counts: output lengths of finished rows, and present lengths of decoding ones.
        waiting: number of rows that have not begun.
    """

    counts: LengthCounts
    waiting: float


def all_classes(classes: Mapping[str, ClassLeft]) -> LengthCounts:
    """Return the length counts of all classes added up."""
    total = LengthCounts()
    for each in classes.values():
        total = total.plus(each.counts)
    return total


def tokens_left(classes: Mapping[str, ClassLeft], max_tokens: float) -> Amount:
    """Estimate how many tokens running and waiting rows are still to generate.

    Lengths of a class are mixed with PRIOR_ROWS average rows of all classes, which matter if the class has
    few rows.
    """
    pooled = all_classes(classes)
    prior = PRIOR_ROWS / max(pooled.num_done + pooled.num_running, PRIOR_ROWS)
    mean = variance = 0.0
    for each in classes.values():
        counts = each.counts if len(classes) == 1 else each.counts.plus(pooled, prior)
        curve = counts.curve(max_tokens)
        of_running = curve.tokens_left(each.counts.running)
        # Rows differ, and their mean is known from the rows so far alone, none of which may have been
        # one of the longest.
        known = max(counts.num_done, 1.0)
        unseen = each.waiting * (max_tokens - curve.mean) / (known + 1.0)
        of_waiting = curve.variance * (each.waiting + each.waiting**2 / known) + unseen**2
        mean += of_running[0] + each.waiting * curve.mean
        variance += of_running[1] + of_waiting
    return Amount(mean, math.sqrt(variance))


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured decode speed of a worker, with its uncertainty for the rest of the run.

    Attributes:
        tokens_per_s: tokens that one worker generates in a second.
        relative: standard deviation of the future speed, as a share of tokens_per_s. It combines
            the error of the measurement and SPEED_DRIFT.
    """

    tokens_per_s: float
    relative: float


@dataclass(slots=True)
class SpeedWindow:
    """The speed of a run's workers over the last minutes, from running totals.

    Attributes:
        points: (monotonic clock in s, worker-seconds so far, tokens so far), oldest first.
    """

    points: deque[tuple[float, float, float]] = field(default_factory=deque)
    _began: float | None = None

    def add(self, now: float, worker_s: float, tokens: float) -> None:
        """Add the totals at this time. They are dropped if no worker has decoded since the last ones.

        Args:
            now: a monotonic clock, in seconds.
            worker_s: seconds that all workers together have decoded since the run began.
            tokens: tokens that they have generated in that time.
        """
        if self.points and worker_s <= self.points[-1][1]:
            return
        if self._began is None:
            self._began = now
        self.points.append((now, worker_s, tokens))
        wanted = (now - self._began) * WINDOW_SHARE
        window = min(max(wanted, MIN_WINDOW_S), MAX_WINDOW_S)
        while len(self.points) > 2 and now - self.points[1][0] >= window:
            self.points.popleft()

    def speed(self) -> Speed | None:
        """Return the speed over the window, or None until two points show progress."""
        if len(self.points) < 2:
            return None
        first = self.points[0]
        last = self.points[-1]
        worker_s = last[1] - first[1]
        tokens = last[2] - first[2]
        if worker_s <= 0 or tokens <= 0:
            return None
        speeds = self._speeds_of_parts()
        relative = SPEED_DRIFT
        if len(speeds) > 2:
            mean = sum(speeds) / len(speeds)
            spread = math.sqrt(sum((each - mean) ** 2 for each in speeds) / (len(speeds) - 1))
            relative = math.hypot(relative, spread / max(mean, 1e-9) / math.sqrt(len(speeds)))
        return Speed(tokens / worker_s, relative)

    def _speeds_of_parts(self) -> list[float]:
        points = list(self.points)
        step = max(1, len(points) // NUM_PARTS)
        chosen = points[::step]
        speeds = []
        for before, after in pairwise(chosen):
            if after[1] > before[1]:
                speeds.append((after[2] - before[2]) / (after[1] - before[1]))
        return speeds


def work_left(tokens: Amount, speed: Speed) -> Amount:
    """Estimate the seconds that one worker with full slots needs for these tokens."""
    return tokens.times(1.0 / speed.tokens_per_s, speed.relative)
