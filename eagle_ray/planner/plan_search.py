"""PlanSearch: find the width, depth and number of verified rows with the best expected rate.

    rate = (sequences + drafts expected to be accepted) / (seconds to draft + to verify + overhead)

Expected drafts come from the acceptance model, seconds from the cost model. Both depend on the
batch size, and so do the rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.calibrated_acceptance import CalibratedAcceptance
from eagle_ray.planner.cost_model import BUCKETS, StepCosts

# Steps between decisions, between observations of a draft and between probes; steps of a trial.
REVIEW_EVERY = 8


def _fine_buckets(number: int) -> tuple[int, ...]:
    """Return numbers of rows from 1 on, each an eighth more than the one before."""
    buckets = [1]
    while len(buckets) < number:
        last = buckets[-1]
        buckets.append(last + max(1, last // 8))
    return tuple(buckets)


FINE_BUCKETS = _fine_buckets(65)


@runtime_checkable
class BatchSize(Protocol):
    """The size of a batch, on which the seconds of a step depend: its sequences and their cached tokens."""

    @property
    def num_cached(self) -> int:
        """Return the cached tokens of all sequences together."""

    def __len__(self) -> int:
        """Return the number of sequences."""


@dataclass(frozen=True, slots=True)
class Members:
    """A group of a batch's sequences that a step may draft for, such as the half with the easiest texts.

    Attributes:
        number: number of sequences in the group.
        worth: mean value of their drafts, as a ratio to the average draft (`SequenceWorths`).
        min_worth: lowest value in the group. A sequence belongs to it if its value is at least
            this.
    """

    number: int
    worth: float
    min_worth: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A plan for a step (width and depth of drafts, rows of the verify pass) and what it is expected to yield.

    Attributes:
        rate: expected tokens per second of the batch.
        width: nodes that are expanded on each level of a draft; 0 for a step without drafts.
        depth: levels of a draft; 0 for a step without drafts.
        num_rows: rows of the verify pass over all sequences, roots included.
        tau: expected tokens per sequence, the bonus token included.
        members: group of sequences that are drafted for; None is all of them.
    """

    rate: float
    width: int = 0
    depth: int = 0
    num_rows: int = 0
    tau: float = 1.0
    members: Members | None = None


class PlanSearch:
    """The search for the plan with the best expected tokens per second, at the current costs.

    Args:
        bounds: the largest width, depth and nodes of a tree.
        costs: seconds of the parts of a step; the planner updates them.
        fine: whether to choose among FINE_BUCKETS of rows, as on a CPU, or among BUCKETS, as on a
            GPU.
        sizes: sizes that passes are padded to, such as those of captured graphs.
    """

    def __init__(self, bounds: TreeBounds, costs: StepCosts, fine: bool, sizes: PassSizes):
        self.costs = costs
        self._bounds = bounds
        self._buckets = FINE_BUCKETS if fine else BUCKETS
        self._sizes = sizes

    def plain_seconds(self, size: int, num_cached: int) -> float:
        """Return the seconds of a plain step, in the padded pass that serves it."""
        num_rows = self._sizes.batch(size)
        return self.costs.plain_seconds(size, num_cached, num_rows)

    def plain_rate(self, size: int, num_cached: int) -> float:
        """Return plain decoding's tokens per second."""
        return size / self.plain_seconds(size, num_cached)

    def row_counts(self, size: int, num_candidates: int) -> list[int]:
        """Return the numbers of rows to choose from, from the roots alone to all candidates."""
        some_or_all = self._between(size, num_candidates)
        return self.padded([size, *some_or_all])

    def padded(self, rows: Sequence[int]) -> list[int]:
        """Return the sizes of the passes that serve these numbers of rows."""
        return sorted({self._sizes.rows(n) for n in rows})

    def best(
        self,
        batch: BatchSize,
        acceptance: CalibratedAcceptance,
        num_prompt_tokens: float,
        members: Members | None = None,
    ) -> PlanEstimate:
        """Return the plan (width, depth and number of rows) with the best rate.

        Args:
            num_prompt_tokens: new prompt tokens per step, which a draft head reads, too.
            members: group of sequences that are drafted for; None is all, with average drafts.
        """
        size = len(batch)
        drafted = members or Members(size, 1.0)
        num_members = drafted.number
        costs = self.costs
        widths = acceptance.model.widths

        # The accepted drafts by width, depth and number of rows.
        candidates = self.padded(self._between(size, num_members * self._bounds.max_nodes))
        rows = [n for n in candidates if n > size]
        nodes_each = [(n - size) / num_members for n in rows]
        accepted = acceptance.model.expected(nodes_each)
        gains = acceptance.accuracy * drafted.worth * num_members * accepted
        gains = np.minimum(gains, np.asarray(rows) - size)

        # The seconds to draft: it also reads the tokens of the previous step, and new prompts.
        prompts = num_prompt_tokens * costs.catch_up.per_row
        level_rows = [self._sizes.level_rows(num_members, width) for width in widths]
        levels = costs.level_seconds(level_rows, self._bounds.depth)
        pairs = num_members + gains if self._sizes.pairs is None else self._pair_rows(size, rows)
        draft_s = costs.catch_up.at(pairs) + levels[:, :, None]

        # The seconds of the whole step.
        verified = costs.verify_seconds_by_rows(rows, batch.num_cached, size)
        spent = prompts + costs.draft_overhead(size) + draft_s + verified
        spent += costs.rows_overhead(np.asarray(rows), size)

        # The best rate over all of them.
        rates = (size + gains) / spent
        rates[1:, 0] = 0.0  # a single level has one parent, however wide the draft
        best = np.unravel_index(rates.argmax(), rates.shape)
        width, depth, n = best
        return PlanEstimate(
            rate=float(rates[best]),
            width=widths[width],
            depth=int(depth) + 1,
            num_rows=rows[n],
            tau=1 + float(gains[best]) / size,
            members=members,
        )

    def _between(self, size: int, num_candidates: int) -> list[int]:
        """Return the buckets with room for the roots and some of the candidates, then the number of rows for all."""
        largest = min(size + num_candidates, self._sizes.max_rows(size))
        largest = max(largest, size)
        between = [n for n in self._buckets if size < n < largest]
        return [*between, largest]

    def _pair_rows(self, size: int, rows: Sequence[int]) -> Int[np.ndarray, "depth rows"]:
        """Return the rows of the pass that reads pairs after steps like these, whose results only the device knows.

        A sequence has at most as many new pairs as its tree has levels and one, and as it has rows.
        """
        pairs = self._sizes.pairs or int
        by_depth = []
        for depth in range(1, self._bounds.depth + 1):
            max_pairs = size * (1 + depth)
            by_depth.append([pairs(min(max_pairs, n)) for n in rows])
        return np.array(by_depth)
