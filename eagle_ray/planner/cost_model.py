"""StepCosts: predict the seconds of a step's parts (draft, verify, overhead) from their numbers of rows.

Costs are measured before the first request (`engine/calibrate.py`) and corrected by every step. A
machine that slows down is slower at all sizes. So most of a deviation corrects the whole curve, and
a small part only the size that was run. Without that rule, a few slow passes at the start once kept
drafts off for a whole job.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from eagle_ray.core.device import StepTimes
from eagle_ray.planner.planner import StepOutcome

# Rows of a pass that are measured, and between which a budget on a GPU chooses.
BUCKETS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
)
LOOKUP_S = 5e-5  # seconds of a look-up for one sequence, until some are observed
COST_RATE = 0.2  # weight of one time for all sizes; of the first ones more
SIZE_RATE = 0.05  # weight of one time for the sizes that were run
MAX_RATIO = 2.0  # a longer or shorter time counts as this times the predicted one: other work on the machine
# The limit for the first MAX_FIRST_TIMES, where they may be far from the measurement.
MAX_FIRST_RATIO = 8.0
MAX_FIRST_TIMES = 4  # the measurement is one of them
USUAL_GROWTH = 1.5  # times the measured overhead: as much as others on the machine may make of it
BAR = 48  # characters of the longest
WORTH_ROWS = 6  # rows around which the slope of a row is shown
WORTH_TREES = ((4, 2), (8, 3), (16, 4))  # nodes and levels of trees whose break-even is shown
TITLES = {
    "verify": "verify: a pass of the target, by rows",
    "catch_up": "catch up: the draft head's first pass of a step, with level 1, by tokens",
    "expand": "expand: one further level of drafts, by rows",
    "plain_overhead": "overhead of a step without drafts, by sequences",
    "draft_overhead": "overhead of a step with drafts, by sequences",
}


@dataclass(slots=True)
class CostCurve:
    """Seconds of one pass by its number of rows: piecewise linear and never falling.

    Attributes:
        seconds: measured seconds. Falling neighbours are pooled (isotonic regression on their
            logarithms).
        trusts_first: whether the first observed times replace the measurement, because that timed
            other work.
    """

    rows: list[int]
    seconds: list[float]
    trusts_first: bool = field(default=False, compare=False)
    _rising: list[float] = field(init=False)
    # Observed times; the measurement counts as one.
    _num_times: int = field(init=False, default=1, compare=False)
    # By index.
    _num_times_of_new: dict[int, int] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._rising = isotonic(self.seconds)

    def __call__(self, rows: float) -> float:
        """Return the seconds at `rows`; past the last measured number extrapolate at least the average slope."""
        if len(self.rows) == 1:
            return self._rising[0]
        if rows > self.rows[-1]:
            return self._rising[-1] + self._slope_beyond * (rows - self.rows[-1])
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        a = self.rows[right - 1]
        b = self.rows[right]
        x = self._rising[right - 1]
        y = self._rising[right]
        return x + (y - x) * max(rows - a, 0) / (b - a)

    def at(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the seconds for an array of numbers of rows."""
        beyond = np.maximum(np.subtract(rows, self.rows[-1]), 0)
        return np.interp(rows, self.rows, self._rising) + self._slope_beyond * beyond

    def slope(self, rows: float) -> float:
        """Return the seconds that one more row costs, averaged over the octave around `rows`."""
        low = rows / math.sqrt(2)
        high = rows * math.sqrt(2)
        return (self(high) - self(low)) / (high - low)

    @property
    def per_row(self) -> float:
        """Return the seconds that one more row costs, averaged over all sizes."""
        return (self._rising[-1] - self._rising[0]) / max(self.rows[-1] - self.rows[0], 1)

    @property
    def _slope_beyond(self) -> float:
        """Return the seconds of one more row past the last measured number.

        The slope over the last doubling or over all sizes, whichever is more; two adjacent sizes
        would be too noisy.
        """
        if len(self.rows) == 1:
            return 0.0
        half = self.rows[-1] / 2
        return max((self._rising[-1] - self(half)) / half, self.per_row)

    def update(self, rows: float, ratio: float) -> None:
        """Correct the curve by a pass of `rows` that took `ratio` times its prediction.

        A pass that is larger than all before by an eighth becomes a new point of the curve. Its
        time includes one-time work, so only half of its excess counts, in logarithms; the next such
        pass corrects it.
        """
        if rows > self.rows[-1] * 9 / 8:
            self.seconds = [*self.seconds, self(rows) * min(ratio, math.sqrt(ratio))]
            self.rows = [*self.rows, round(rows)]
            self._num_times_of_new[len(self.rows) - 1] = 0
        else:
            self._count(rows)
            limit = (
                MAX_FIRST_RATIO
                if self.trusts_first and self._num_times <= MAX_FIRST_TIMES
                else MAX_RATIO
            )
            surprise = math.log(min(max(ratio, 1 / limit), limit))
            self.seconds = [
                s * math.exp(gain * surprise)
                for s, gain in zip(self._rising, self._gains(rows), strict=True)
            ]
        self._rising = isotonic(self.seconds)

    def _count(self, rows: float) -> None:
        self._num_times += 1
        for index in self._shares(rows).keys() & self._num_times_of_new.keys():
            self._num_times_of_new[index] += 1

    def _gains(self, rows: float) -> list[float]:
        """Return the share of a surprise at `rows` by which to correct each size.

        A new size first takes the surprise as its own, since its time was only seen once.
        """
        own = {index: share * self._size_rate(index) for index, share in self._shares(rows).items()}
        common = max(1 / self._num_times, COST_RATE) * (1 - sum(own.values()))
        return [common + own.get(index, 0.0) for index in range(len(self.rows))]

    def _size_rate(self, index: int) -> float:
        """Return the weight of a time for one size: SIZE_RATE, or more for the first times of a new size."""
        return (
            max(1 / self._num_times_of_new[index], SIZE_RATE)
            if index in self._num_times_of_new
            else SIZE_RATE
        )

    def _shares(self, rows: float) -> dict[int, float]:
        """Return the indices of the measured numbers next to `rows` and their interpolation weights."""
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        left = right if self.rows[right] <= rows else max(right - 1, 0)
        if left == right:
            return {right: 1.0}
        share = (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        return {left: 1 - share, right: share}


def isotonic(seconds: list[float]) -> list[float]:
    """Return the nearest non-decreasing sequence; falling neighbours are replaced by their geometric mean."""
    if all(a <= b for a, b in pairwise(seconds)):
        return seconds
    pools: list[tuple[float, int]] = []  # mean logarithm and number of what shares it
    for value in seconds:
        mean = math.log(value)
        count = 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean = (before * number + mean * count) / (number + count)
            count = number + count
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


@dataclass(slots=True)
class StepCosts:
    """The costs of all parts of a step, in seconds.

    Attributes:
        verify: seconds of the target's pass by rows, without the parts for sequences and context.
        attention_per_token: seconds added per cached token.
        catch_up: seconds of the drafter's first pass, which reads pending pairs and drafts level 1,
            by its rows. Replayed, these are two passes, of which the second is padded by sequences.
        expand: seconds of each further draft level, by rows.
        plain_overhead, draft_overhead: seconds of the rest of a plain and of a drafting step, by
            sequences.
        attention_per_row: seconds added per cached token and per row of its sequence beyond the
            first.
        per_sequence: seconds added to a pass per sequence.
        lookup: seconds of a draft by lookups alone, by sequences. It is learned from steps and not
            measured.
    """

    verify: CostCurve
    attention_per_token: float
    catch_up: CostCurve
    expand: CostCurve
    plain_overhead: CostCurve
    draft_overhead: CostCurve
    attention_per_row: float = 0.0
    per_sequence: float = 0.0
    lookup: CostCurve = field(default_factory=lambda: CostCurve([1, 64], [LOOKUP_S, 64 * LOOKUP_S]))
    _measured_overhead: CostCurve = field(init=False, compare=False)  # plain_overhead at the start
    _measured_draft_overhead: CostCurve = field(init=False, compare=False)  # likewise

    def __post_init__(self) -> None:
        self._measured_overhead = CostCurve(self.plain_overhead.rows, self.plain_overhead.seconds)
        self._measured_draft_overhead = CostCurve(
            self.draft_overhead.rows, self.draft_overhead.seconds
        )
        self.plain_overhead.trusts_first = True

    def verify_seconds(
        self, num_rows: int, num_cached: float, batch_size: int, num_prefill_rows: int = 0
    ) -> float:
        """Return the seconds of a pass of the target.

        Args:
            num_cached: cached tokens of all sequences of the batch together.
            num_prefill_rows: prompt rows in that pass.
        """
        return self.verify(num_rows + num_prefill_rows) + self._context_seconds(
            num_rows / batch_size, num_cached, batch_size
        )

    def verify_seconds_by_rows(
        self, num_rows: Sequence[int], num_cached: float, batch_size: int, num_prefill_rows: int = 0
    ) -> np.ndarray:
        """Return the seconds of the target's pass for several numbers of rows."""
        rows = np.asarray(num_rows)
        return self.verify.at(rows + num_prefill_rows) + self._context_seconds(
            rows / batch_size, num_cached, batch_size
        )

    def row_seconds(
        self, num_rows: float, num_cached: float, batch_size: int, num_prefill_rows: int = 0
    ) -> float:
        """Return the seconds that one more row costs in a pass of about num_rows rows."""
        attention_s = self.attention_per_row * num_cached / batch_size
        return (
            self.verify.slope(num_rows + num_prefill_rows)
            + attention_s
            + self.rows_overhead(1, batch_size)
        )

    def rows_overhead(self, num_rows: Any, batch_size: int) -> Any:
        """Return the seconds that a step's rows cost after the pass, for sampling and the like, beyond draft_overhead.

        The measurement had greedy rows. Sampling, penalties and log-probabilities cost more per
        row, which is learned from plain steps, where each sequence has one row: on a 2-core CPU 1.4
        ms per row of SmolLM2, as much as its verification.

        Args:
            num_rows: number of rows, or an array of several.
        """
        more_s = self.plain_overhead(batch_size) - USUAL_GROWTH * self._measured_overhead(
            batch_size
        )
        return max(more_s, 0.0) / batch_size * num_rows

    def tree_overhead(self, batch_size: int) -> float:
        """Return the seconds by which a step with verified drafts exceeds a plain one, besides
        drafting and verification."""
        return max(self.draft_overhead(batch_size) - self.plain_overhead(batch_size), 0.0)

    def _context_seconds(self, rows_each: Any, num_cached: float, batch_size: int) -> Any:
        """Return the seconds that the sequences of a batch and their cached tokens add to a pass.

        Args:
            rows_each: rows per sequence, one number or several.
        """
        return self.per_sequence * batch_size + num_cached * (
            self.attention_per_token + self.attention_per_row * (rows_each - 1)
        )

    def draft_seconds(self, pair_rows: float, level_rows: int, depth: int) -> float:
        """Return the seconds of drafting `depth` levels: pair_rows rows read pending pairs,
        level_rows rows draft each further level."""
        return self.catch_up(pair_rows) + (depth - 1) * self.expand(level_rows)

    def level_seconds(self, level_rows: Sequence[int], max_depth: int) -> np.ndarray:
        """Return the seconds of all levels after the first, [widths, max_depth], for all depths from 1 on.

        Args:
            level_rows: rows of a level's pass, by width.
        """
        return np.outer(self.expand.at(level_rows), range(max_depth))

    def plain_seconds(self, batch_size: int, num_cached: float, num_rows: int = 0) -> float:
        """Return the seconds of a plain step.

        Args:
            num_rows: rows of its pass, if the pass is padded.
        """
        return self.verify_seconds(
            max(num_rows, batch_size), num_cached, batch_size
        ) + self.plain_overhead(batch_size)

    def break_even(self, num_nodes: int, depth: int) -> float:
        """Return the tokens per pass (tau) from which drafting for one sequence is no slower than plain decoding.

        The context is empty, and each level has one parent.

        Args:
            num_nodes: nodes that are verified, the root included.
            depth: levels that are drafted.
        """
        draft_s = self.draft_seconds(num_nodes, 1, depth) + self.draft_overhead(1)
        step_s = draft_s + self.verify_seconds(num_nodes, 0, 1) + self.rows_overhead(num_nodes, 1)
        return step_s / self.plain_seconds(1, 0)

    def predict(self, outcome: StepOutcome) -> StepTimes:
        """Return the predicted times of the parts of an observed step."""
        verify = self.verify_seconds(
            outcome.num_rows, outcome.num_cached, outcome.batch_size, outcome.num_prefill_rows
        )
        rest = self.plain_overhead(outcome.batch_size)
        if outcome.depth:
            rest = self.draft_overhead(outcome.batch_size) + self.rows_overhead(
                outcome.num_rows, outcome.batch_size
            )
        draft = 0.0
        if outcome.plan.lookups_only:
            draft = self.lookup(outcome.plan.num_members(outcome.batch_size))
        elif outcome.plan.is_drafting:
            draft = self.draft_seconds(outcome.pair_rows, outcome.level_rows, max(outcome.depth, 1))
        return StepTimes(draft, verify, rest)

    def prefill_seconds(self, outcome: StepOutcome) -> float:
        """Return the seconds that prompt rows add to the step's pass."""
        return self.verify(outcome.num_rows + outcome.num_prefill_rows) - self.verify(
            outcome.num_rows
        )

    def update(
        self, outcome: StepOutcome, predicted: StepTimes, max_overhead: float = math.inf
    ) -> None:
        """Correct the curves by an observed step. Those of drafts change only if the draft's own
        passes read all pending pairs.

        Args:
            predicted: predicted times of the step's parts.
            max_overhead: maximum ratio to the measured overhead that counts as typical. With 0 an
                observation can only lower the curves.
        """
        seconds = outcome.seconds
        self.verify.update(
            outcome.num_rows + outcome.num_prefill_rows, seconds.verify / predicted.verify
        )
        if outcome.plan.lookups_only:
            if outcome.num_catch_up <= outcome.usual_catch_up:
                num_members = outcome.plan.num_members(outcome.batch_size)
                self.lookup.update(num_members, seconds.draft / predicted.draft)
        elif outcome.plan.is_drafting and not outcome.caught_up_before:
            ratio = seconds.draft / predicted.draft
            self.catch_up.update(outcome.pair_rows, ratio)
            if outcome.depth > 1:
                self.expand.update(outcome.level_rows, ratio)
        if outcome.plan.lookups_only and outcome.depth:
            return  # it has less overhead than a step in which a model drafts
        drafts = outcome.depth > 0
        size = outcome.batch_size
        rest = self.draft_overhead if drafts else self.plain_overhead
        measured = self._measured_draft_overhead if drafts else self._measured_overhead
        max_s = max(max_overhead * measured(size), predicted.overhead)
        if seconds.overhead < predicted.overhead or max_s > predicted.overhead:
            rest.update(size, min(seconds.overhead, max_s) / predicted.overhead)


def costs_text(costs: StepCosts) -> str:
    """Return every curve as the planner uses it, monotone, as a table with bars.

    verify: a pass of the target, by rows
       rows        ms   x first
          1     38.20      1.00  ###########
          8     41.07      1.08  ############
    """
    parts = [f"{title}\n{_bars(getattr(costs, name))}" for name, title in TITLES.items()]
    context = (
        f"context: {costs.attention_per_token * 1e6:.3f} us more for each cached token, and "
        f"{costs.attention_per_row * 1e6:.3f} us with each row of its sequence beyond the first"
    )
    each = f"sequences: {costs.per_sequence * 1e6:.1f} us more for each of them"
    worth = f"one sequence: {DraftWorth.of(costs).text}"
    return "\n\n".join([*parts, f"{each}\n{context}", worth])


@dataclass(frozen=True, slots=True)
class DraftWorth:
    """The acceptance from which drafts pay on a machine, for one sequence. Every report of it uses this class.

    Attributes:
        row_passes: seconds that one more row costs, as a share of a pass of one row.
        tau: tokens per pass from which drafts pay, by the number of nodes of the tree.
    """

    row_passes: float
    tau: dict[int, float]

    @classmethod
    def of(cls, costs: StepCosts) -> DraftWorth:
        """Compute the break-even from measured costs."""
        row_passes = costs.verify.slope(WORTH_ROWS) / costs.verify(1)
        return cls(row_passes, {n: costs.break_even(n, depth) for n, depth in WORTH_TREES})

    @property
    def text(self) -> str:
        """Return one line: the cost of a row, the break-even of the smallest tree, and those of
        larger trees in brackets."""
        (_, smallest), *larger = self.tau.items()
        more = ", ".join(f"{tau:.1f} with {n} nodes" for n, tau in larger)
        return (
            f"a row costs {self.row_passes:.2f} passes: drafts pay from tau {smallest:.1f} ({more})"
        )


def _bars(curve: CostCurve) -> str:
    seconds = [curve(rows) for rows in curve.rows]
    lines = [f"{'rows':>8}{'ms':>10}{'x first':>10}"]
    for rows, s in zip(curve.rows, seconds, strict=True):
        bar = "#" * max(round(BAR * s / seconds[-1]), 1)
        lines.append(f"{rows:>8}{s * 1e3:>10.2f}{s / seconds[0]:>10.2f}  {bar}")
    return "\n".join(lines)
