"""LengthCounts: estimate the distribution of output lengths from finished rows and from rows that are still decoding.

The first rows to finish are short ones, so their mean is too small. A row that is still decoding is
known to be longer than its present length, and counts as such (the Kaplan-Meier estimate of
survival).

    >>> counts = LengthCounts()
    >>> counts.add_done([100, 100, 200, 400])
    >>> round(counts.curve(max_tokens=4096).mean, -1)
    200.0
    >>> counts.running = bins_of([390] * 4)
    >>> counts.curve(max_tokens=4096).mean > 400
    True

Lengths are counted in bins whose ends grow by the fourth root of two, so that counts of several
workers can be added and are small to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

BINS_PER_DOUBLING = 4
NUM_BINS = 20 * BINS_PER_DOUBLING + 1  # up to 2^20 tokens
NO_SHARE = 1e-9  # probability below which no row of the distribution is that long
# The upper end of each bin; the first one has outputs of one token, and of none.
DOUBLINGS = np.arange(NUM_BINS) / BINS_PER_DOUBLING
ENDS = 2.0**DOUBLINGS
# A length that a bin stands for. Nothing is between the first bins, which have one integer at most.
HALFWAY = (ENDS[:-1] + ENDS[1:]) / 2
MIDDLES = np.concatenate([ENDS[:1], HALFWAY])


def bin_of(lengths: np.ndarray) -> np.ndarray:
    """Return the index of the bin that each length is in."""
    lengths = np.maximum(lengths, 1.0)
    doublings = np.log2(lengths)
    steps = doublings * BINS_PER_DOUBLING
    # Without the small number, rounding would put the end of a bin into the next one.
    index = np.ceil(steps - 1e-9)
    index = index.astype(int)
    return np.minimum(index, NUM_BINS - 1)


def bins_of(lengths: Iterable[float]) -> np.ndarray:
    """Return how many of the lengths are in each bin."""
    values = np.asarray(list(lengths), float)
    index = bin_of(values)
    counts = np.bincount(index, minlength=NUM_BINS)
    return counts.astype(float)


def no_rows() -> np.ndarray:
    """Return counts of no rows: 0 for each bin."""
    return np.zeros(NUM_BINS)


@dataclass(slots=True)
class LengthCounts:
    """Rows of one class, counted by their lengths in tokens.

    Attributes:
        done: number of finished rows in each bin of lengths.
        tokens: total tokens of the finished rows.
        running: number of decoding rows in each bin of present lengths.
    """

    done: np.ndarray = field(default_factory=no_rows)
    tokens: float = 0.0
    running: np.ndarray = field(default_factory=no_rows)

    @property
    def num_done(self) -> float:
        return float(self.done.sum())

    @property
    def tokens_so_far(self) -> float:
        """Return the total tokens of finished and decoding rows."""
        tokens_of_running = float(self.running @ MIDDLES)
        return self.tokens + tokens_of_running

    @property
    def num_running(self) -> float:
        return float(self.running.sum())

    def add_done(self, lengths: Sequence[float]) -> None:
        """Count rows that are done."""
        self.done = self.done + bins_of(lengths)
        self.tokens += float(sum(lengths))

    def plus(self, other: LengthCounts, weight: float = 1.0) -> LengthCounts:
        """Return the sum of these counts and another's, whose rows count as `weight` rows each."""
        done = self.done + weight * other.done
        tokens = self.tokens + weight * other.tokens
        running = self.running + weight * other.running
        return LengthCounts(done, tokens, running)

    def curve(self, max_tokens: float) -> LengthCurve:
        """Return the estimated distribution of lengths; without any observation every row has max_tokens.

        Args:
            max_tokens: maximum tokens of an output.
        """
        # Rows at risk of ending in a bin: those that end there or later, those that have more by
        # now, and half of those that are in it.
        ended_later = _reversed_sums(self.done)
        has_more = _reversed_sums(self.running)
        later = ended_later + has_more - self.running / 2

        # The share of them that ends in the bin, and the share of all rows that is longer.
        ends = np.divide(self.done, later, out=no_rows(), where=later > 0)
        ends = np.minimum(ends, 1.0)
        stays = 1.0 - ends
        survival = np.cumprod(stays)
        before = np.concatenate([[1.0], survival[:-1]])
        mass = before - survival
        lengths = self._middles()
        lengths = np.minimum(lengths, max_tokens)

        # What is longer than every row that is done: twice as long as the longest one so far.
        rest = float(survival[-1])
        if rest > 0:
            rows = self.done + self.running
            seen = np.flatnonzero(rows)
            longest = max_tokens
            if len(seen):
                longest = MIDDLES[seen[-1]]
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
        scaled = MIDDLES * scale
        return np.maximum(scaled, 1.0)


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """A distribution of lengths.

    Attributes:
        lengths: possible lengths, of which some may be equal.
        mass: probability of each length.
        max_tokens: maximum length.
        unseen: probability of lengths beyond all observed ones, up to max_tokens.
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
        variance = self._mean_square - self.mean**2
        return max(0.0, variance)

    @property
    def _mean_square(self) -> float:
        squares = self.lengths**2
        return float(squares @ self.mass)

    def tokens_left(self, running: np.ndarray) -> tuple[float, float]:
        """Return mean and variance of the total tokens that decoding rows will still get.

        Args:
            running: number of rows in each bin of present lengths.
        """
        mean = 0.0
        variance = 0.0
        for index in np.flatnonzero(running):
            num_rows = running[index]
            age = min(MIDDLES[index], self.max_tokens)
            longer = self.lengths > age
            mass = self.mass[longer]
            share = float(mass.sum())
            if share > NO_SHARE:
                left = self.lengths[longer] - age
                weights = mass / share
                expected = float(left @ weights)
                squares = left**2
                mean_square = float(squares @ weights)
                spread = max(0.0, mean_square - expected**2)
            else:  # longer than any row that is done: as long again
                expected = min(age, self.max_tokens - age)
                spread = expected**2
            mean += num_rows * expected
            variance += num_rows * spread
        return mean, variance

    @property
    def mean_left(self) -> float:
        """Return the mean tokens that a decoding row will still get, in slots that have long been full."""
        # A slot holds a row in proportion to its length, and is on average halfway through it.
        mean = max(self.mean, 1e-9)
        return self._mean_square / (2 * mean)

    def longest_of(self, running: np.ndarray, share: float = 0.5) -> float:
        """Return a quantile of the tokens that the longest of these decoding rows will still get.

        Args:
            running: number of rows in each bin of present lengths.
        """
        if not running.any():
            return 0.0

        # For each number of tokens: the probability, as a logarithm, that no row needs more.
        below = ENDS[self.max_tokens > ENDS]
        candidates = np.append(below, self.max_tokens)
        candidates = np.unique(candidates)
        log_all = np.zeros(len(candidates))
        for index in np.flatnonzero(running):
            age = min(MIDDLES[index], self.max_tokens)
            longer = self.lengths > age
            mass = self.mass[longer]
            total = float(mass.sum())
            if total <= NO_SHARE:  # longer than any row that is done: as long again
                expected = min(age, self.max_tokens - age)
                expected = max(expected, 1.0)
                ended = 1.0 - np.exp(-candidates / expected)
            else:
                left = self.lengths[longer] - age
                has_ended = left <= candidates[:, None]
                ended = (mass * has_ended).sum(1)
                ended = ended / total
            ended = np.maximum(ended, 1e-12)
            log_all += running[index] * np.log(ended)

        is_enough = log_all >= np.log(share)
        return self._first(candidates[is_enough])

    def _first(self, lengths: np.ndarray) -> float:
        """Return the first of these lengths, or max_tokens if there is none."""
        if not len(lengths):
            return self.max_tokens
        return float(lengths[0])

    def longest_row(self, num_rows: float, share: float = 0.5) -> float:
        """Return a quantile of the length of the longest of some waiting rows; 0 without rows."""
        if num_rows <= 0:
            return 0.0
        lengths, shorter = self._cumulative()
        # All rows are shorter than a length at this quantile if each one is at a higher quantile.
        share_of_one = share ** (1.0 / max(num_rows, 1.0))
        is_enough = shorter >= share_of_one - 1e-9
        return self._first(lengths[is_enough])

    def _cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths, ascending, and the probability that a row is at most as long as each of them."""
        order = np.argsort(self.lengths)
        mass = self.mass[order]
        seen = 1.0 - self.unseen
        return self.lengths[order], np.cumsum(mass) * seen

    def longest_left(self, num_rows: float, share: float = 0.5) -> float:
        """Return a quantile of the tokens that the longest decoding row will still get, in slots
        that have long been full.

        A long row occupies a slot for longer, so rows in slots are longer than rows on average.
        """
        lengths, shorter = self._cumulative()
        lengths = np.append(lengths, self.max_tokens)
        survival = np.append(1.0 - shorter, 0.0)

        # The share of slots whose row has more than `starts` tokens left.
        starts = np.concatenate([[0.0], lengths[:-1]])
        longer = np.concatenate([[1.0], survival[:-1]])
        area = longer * (lengths - starts)
        total = max(area.sum(), 1e-12)
        excess = _reversed_sums(area) / total

        share_of_one = share ** (1.0 / max(num_rows, 1.0))
        wanted = 1.0 - share_of_one
        possible = lengths[excess >= wanted]
        shortest = float(lengths[0])
        return float(possible.max(initial=shortest))


def _reversed_sums(values: np.ndarray) -> np.ndarray:
    """Return for each value the sum of it and of all that come after it."""
    backwards = values[::-1]
    sums = backwards.cumsum()
    return sums[::-1]
