"""LengthCounts: how long outputs are, from rows that are done and from rows that engines still decode.

The first rows that end are short ones, so their mean is too small. A row in an engine is known to be
longer than what it has so far, and counts as such (the Kaplan-Meier estimate of survival).

    >>> counts = LengthCounts()
    >>> counts.add_done([100, 100, 200, 400])
    >>> round(counts.curve(max_tokens=4096).mean, -1)
    200.0
    >>> counts.running = bins_of([390] * 4)
    >>> counts.curve(max_tokens=4096).mean > 400
    True

Lengths are counted in bins whose ends grow by the fourth root of two, so that counts of workers add
up and are small to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

BINS_PER_DOUBLING = 4
NUM_BINS = 20 * BINS_PER_DOUBLING + 1  # up to 2^20 tokens
# The upper end of each bin; the first one has outputs of one token, and of none.
ENDS = 2.0 ** (np.arange(NUM_BINS) / BINS_PER_DOUBLING)
# A length that a bin stands for. Nothing is between the first bins, which have one integer at most.
MIDDLES = np.concatenate([ENDS[:1], (ENDS[:-1] + ENDS[1:]) / 2])


def bin_of(lengths: np.ndarray) -> np.ndarray:
    """Return the bin of each length."""
    doublings = np.log2(np.maximum(lengths, 1.0))
    ends = np.ceil(doublings * BINS_PER_DOUBLING - 1e-9)
    index = ends.astype(int)
    return np.minimum(index, NUM_BINS - 1)


def bins_of(lengths: Iterable[float]) -> np.ndarray:
    """Return how many of the lengths are in each bin."""
    values = np.asarray(list(lengths), float)
    counts = np.bincount(bin_of(values), minlength=NUM_BINS)
    return counts.astype(float)


@dataclass(slots=True)
class LengthCounts:
    """Rows of one class.

    Attributes:
        done: rows that are done, by the bin of their length.
        tokens: all tokens of those rows.
        running: rows in engines, by the bin of the tokens that they have so far.
    """

    done: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    tokens: float = 0.0
    running: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))

    @property
    def num_done(self) -> float:
        return float(self.done.sum())

    @property
    def tokens_so_far(self) -> float:
        """Return the tokens of rows that are done and of rows in engines."""
        return self.tokens + float(self.running @ MIDDLES)

    @property
    def num_running(self) -> float:
        return float(self.running.sum())

    def add_done(self, lengths: Sequence[float]) -> None:
        """Count rows that are done."""
        self.done = self.done + bins_of(lengths)
        self.tokens += float(sum(lengths))

    def plus(self, other: LengthCounts, weight: float = 1.0) -> LengthCounts:
        """Return these rows and those of another one, each of which counts as `weight` rows."""
        done = self.done + weight * other.done
        tokens = self.tokens + weight * other.tokens
        running = self.running + weight * other.running
        return LengthCounts(done, tokens, running)

    def curve(self, max_tokens: float) -> LengthCurve:
        """Return the distribution of lengths; every row has max_tokens if none is known.

        Args:
            max_tokens: no output is longer.
        """
        # Rows at risk of ending in a bin: those that end there or later, those that have more by
        # now, and half of those that are in it.
        ended_later = _reversed_sums(self.done)
        has_more = _reversed_sums(self.running)
        later = ended_later + has_more - self.running / 2
        ends = np.divide(self.done, later, out=np.zeros(NUM_BINS), where=later > 0)
        stays = 1.0 - np.minimum(ends, 1.0)
        survival = np.cumprod(stays)
        before = np.concatenate([[1.0], survival[:-1]])
        mass = before - survival
        lengths = np.minimum(self._middles(), max_tokens)

        # What is longer than every row that is done: twice as long as the longest one so far.
        rest = float(survival[-1])
        if rest > 0:
            seen = np.flatnonzero(self.done + self.running)
            longest = MIDDLES[seen[-1]] if len(seen) else max_tokens
            twice = min(2 * longest, max_tokens)
            lengths = np.append(lengths, twice)
            mass = np.append(mass, rest)
        unseen = 1.0 / (self.num_done + 1.0)
        shares = mass / mass.sum()
        return LengthCurve(lengths, shares, max_tokens, unseen)

    def _middles(self) -> np.ndarray:
        """Return a length for each bin, scaled so that the rows that are done have their tokens."""
        total = float(self.done @ MIDDLES)
        scale = 1.0
        if total > 0 and self.tokens > 0:
            scale = self.tokens / total
        return np.maximum(MIDDLES * scale, 1.0)


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """A distribution of lengths.

    Attributes:
        lengths: values, of which some may be equal.
        mass: their probabilities.
        max_tokens: no length is longer.
        unseen: probability of a length that no row had so far, which may be as long as max_tokens.
    """

    lengths: np.ndarray
    mass: np.ndarray
    max_tokens: float
    unseen: float = 0.0

    @property
    def mean(self) -> float:
        return float(self.lengths @ self.mass)

    @property
    def variance(self) -> float:
        mean_square = float(self.lengths**2 @ self.mass)
        return max(0.0, mean_square - self.mean**2)

    def tokens_left(self, running: np.ndarray) -> tuple[float, float]:
        """Return the mean and the variance of what rows in engines still get, all together.

        Args:
            running: rows by the bin of the tokens that they have.
        """
        mean = variance = 0.0
        for index in np.flatnonzero(running):
            age = min(MIDDLES[index], self.max_tokens)
            longer = self.lengths > age
            share = float(self.mass[longer].sum())
            if share > 1e-9:
                left = self.lengths[longer] - age
                weights = self.mass[longer] / share
                expected = float(left @ weights)
                mean_square = float(left**2 @ weights)
                spread = max(0.0, mean_square - expected**2)
            else:  # longer than any row that is done: as long again
                expected = min(age, self.max_tokens - age)
                spread = expected**2
            mean += running[index] * expected
            variance += running[index] * spread
        return mean, variance

    @property
    def mean_left(self) -> float:
        """Return what a row in a slot still gets in the mean, at a moment when slots have long been full."""
        mean_square = float(self.lengths**2 @ self.mass)
        return mean_square / (2 * max(self.mean, 1e-9))

    def longest_of(self, running: np.ndarray, share: float = 0.5) -> float:
        """Return what the longest of these rows still gets, at this quantile.

        Args:
            running: rows by the bin of the tokens that they have.
        """
        below = ENDS[self.max_tokens > ENDS]
        candidates = np.unique(np.append(below, self.max_tokens))
        log_all = np.zeros(len(candidates))
        for index in np.flatnonzero(running):
            age = min(MIDDLES[index], self.max_tokens)
            longer = self.lengths > age
            total = float(self.mass[longer].sum())
            if total <= 1e-9:  # longer than any row that is done: as long again
                expected = max(min(age, self.max_tokens - age), 1.0)
                ended = 1.0 - np.exp(-candidates / expected)
            else:
                left = self.lengths[longer] - age
                has_ended = left <= candidates[:, None]
                ended = (self.mass[longer] * has_ended).sum(1) / total
            log_ended = np.log(np.maximum(ended, 1e-12))
            log_all += running[index] * log_ended

        if not running.any():
            return 0.0
        enough = candidates[log_all >= np.log(share)]
        return float(enough[0]) if len(enough) else self.max_tokens

    def longest_row(self, num_rows: float, share: float = 0.5) -> float:
        """Return the length of the longest of rows that wait, at this quantile; 0 without rows."""
        if num_rows <= 0:
            return 0.0
        order = np.argsort(self.lengths)
        shorter = np.cumsum(self.mass[order]) * (1.0 - self.unseen)
        share_of_one = share ** (1.0 / max(num_rows, 1.0))
        enough = self.lengths[order][shorter >= share_of_one - 1e-9]
        return float(enough[0]) if len(enough) else self.max_tokens

    def longest_left(self, num_rows: float, share: float = 0.5) -> float:
        """Return what the longest of rows in slots that have long been full still gets, at this quantile.

        A slot holds a long row for longer, so rows in slots are longer than rows are.
        """
        order = np.argsort(self.lengths)
        lengths = np.append(self.lengths[order], self.max_tokens)
        seen = np.cumsum(self.mass[order]) * (1.0 - self.unseen)
        survival = np.append(1.0 - seen, 0.0)
        starts = np.concatenate([[0.0], lengths[:-1]])
        # The share of slots whose row has more than `starts` tokens left.
        area = np.concatenate([[1.0], survival[:-1]]) * (lengths - starts)
        excess = area[::-1].cumsum()[::-1] / max(area.sum(), 1e-12)
        wanted = 1.0 - share ** (1.0 / max(num_rows, 1.0))
        return float(lengths[excess >= wanted].max(initial=float(lengths[0])))


def _reversed_sums(values: np.ndarray) -> np.ndarray:
    return values[::-1].cumsum()[::-1]
