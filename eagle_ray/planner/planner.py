"""Planner: the protocol that decides how much each step drafts and verifies. UniformPlanner decides on a constant tree.

A planner never changes the output, only its cost. `plan` runs before anything is drafted,
`allocate` once the candidates' values are known, and `observe` when the step is over. If steps
overlap, the next step is planned and allocated before `observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import StepTimes
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.tree.budget import Budget, uniform
from eagle_ray.tree.expand import DraftPlan, PartialDraft


class DraftKind(Enum):
    """The source of a step's drafts: a model, or lookups alone."""

    MODEL = auto()  # a model, and what the drafter looks up if it looks up at all
    LOOKUPS = auto()  # lookups alone


@dataclass(frozen=True, slots=True)
class Allocation:
    """The candidates that a step verifies: each kept node gets a row of the target's pass.

    Attributes:
        keep: true for a node that is verified.
        num_nodes: upper bound on the kept nodes of one tree, root included.
        num_rows: rows of the verify pass; those past the number of kept nodes are padding.
        expected: number of drafts of the batch that the planner expects to be accepted.
        sizes: number of kept nodes of each tree, if the host knows it.
        expected_each: number of accepted drafts expected of each sequence, if the host knows it.
    """

    keep: Bool[Tensor, "B N"]
    num_nodes: int
    num_rows: int
    expected: float = 0.0
    sizes: list[int] | None = None
    expected_each: Sequence[float] = ()

    @classmethod
    def uniform(cls, draft: Draft, limit: int) -> Allocation:
        """Keep the best `limit` nodes of every tree, root included, or all nodes if a tree has fewer."""
        num_nodes = min(limit, draft.tree.num_nodes)
        num_rows = len(draft.tree.tokens) * num_nodes
        if draft.tree.num_nodes == 1:
            return cls(draft.tree.valid, num_nodes, num_rows)
        return cls(uniform(draft.tree, Budget(num_rows, num_nodes)), num_nodes, num_rows)

    def packed(self) -> tuple[tuple[int, ...], int, int, float, list[int] | None]:
        """Return the allocation's host data, to send it to other ranks."""
        return tuple(self.keep.shape), self.num_nodes, self.num_rows, self.expected, self.sizes

    @classmethod
    def unpacked(
        cls, packed: tuple[tuple[int, ...], int, int, float, list[int] | None], device: torch.device
    ) -> Allocation:
        """Restore an allocation from `packed` on a device. It keeps only the roots until the kept nodes are sent."""
        shape, num_nodes, num_rows, expected, sizes = packed
        keep = torch.zeros(shape, dtype=torch.bool, device=device)
        keep[:, 0] = True
        return cls(keep, num_nodes, num_rows, expected, sizes)

    @classmethod
    def without_padding(cls, draft: Draft, limit: int) -> Allocation:
        """Keep the nodes that `uniform` keeps, with rows for kept nodes only. Waits for the device."""
        keep = uniform(draft.tree, Budget(0, limit))
        sizes = keep.sum(1).tolist()
        return cls(keep, max(sizes), sum(sizes), sizes=sizes)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step, as the planner observes it.

    Attributes:
        plan: the plan that the step ran.
        batch_size: sequences of the batch.
        num_cached: tokens cached before the step, of all sequences.
        depth: levels that were drafted; 0 if nothing was proposed, whatever the plan.
        num_catch_up: tokens that the drafter had not read before and read in this step.
        num_rows: rows of the verify pass, padding included.
        num_accepted: accepted drafts of the batch, not counting tokens past a sequence's end.
        num_prompt_tokens: prompt tokens that were computed during the step.
        seconds: times of the step's parts.
        is_first: whether a kernel or graph was made that later steps reuse, so that the step's
            seconds do not predict theirs.
        num_expected_drafts: accepted drafts that the allocation expected (`Allocation.expected`).
        num_prefill_rows: prompt rows in the same pass of the target.
        num_level_rows: rows of a pass that drafts a further level, padding included, if drafts are
            replayed.
        num_pair_rows: as in Draft.
        caught_up_before: as in Draft.
        sequences: sequences of the batch; empty if results per sequence are not observed.
        accepted_each: accepted drafts of each sequence.
        expected_each: accepted drafts that the allocation expected of each sequence.
    """

    plan: DraftPlan
    batch_size: int
    num_cached: int
    depth: int
    num_catch_up: int
    num_rows: int
    num_accepted: int
    num_prompt_tokens: int
    seconds: StepTimes
    is_first: bool = False
    num_expected_drafts: float = 0.0
    num_prefill_rows: int = 0
    num_level_rows: int | None = None
    num_pair_rows: int | None = None
    caught_up_before: bool = False
    sequences: Sequence[object] = ()
    accepted_each: Sequence[int] = ()
    expected_each: Sequence[float] = ()

    @property
    def level_rows(self) -> int:
        """Return the rows of a pass that drafts a further level: one per expanded node, plus padding."""
        return self.num_level_rows or self.plan.num_members(self.batch_size) * self.plan.width

    @property
    def pair_rows(self) -> int:
        """Return the rows of the pass that read pending pairs: one per pair, plus padding."""
        return self.num_pair_rows or self.num_catch_up

    @property
    def usual_catch_up(self) -> int:
        """Return the maximum tokens that a draft reads first if the previous step drafted as well."""
        return self.plan.num_members(self.batch_size) * (1 + self.plan.max_depth)


@runtime_checkable
class Planner(Protocol):
    @property
    def will_draft(self) -> bool:
        """Return whether the next step will probably draft. If so, the drafter reads new prompts at once."""

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan of the next drafts: depth, width, and the sequences to draft for."""

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """Return which candidates to verify. Even a plain step may have some: tokens that grammars predict."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step's outcome."""


class UniformPlanner:
    """Drafts a tree of one size for every sequence at every step, as EAGLE-2 was published.

    Args:
        should_stop: as in DraftPlan.
    """

    def __init__(
        self, bounds: TreeBounds, should_stop: Callable[[PartialDraft], bool] | None = None
    ):
        self._plan = DraftPlan(bounds.depth, bounds.top_k, should_stop=should_stop)
        self._num_nodes = bounds.num_nodes

    @property
    def will_draft(self) -> bool:
        return self._plan.is_drafting

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._plan

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        if draft.depth and not plan.is_drafting:
            return Allocation.without_padding(draft, self._num_nodes)
        return Allocation.uniform(draft, self._num_nodes)

    def observe(self, outcome: StepOutcome) -> None:
        pass
