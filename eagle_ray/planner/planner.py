"""Planner: what each step drafts and how much of it is verified; UniformPlanner, which always says the same.

A planner never changes what is produced, only what it costs. `plan` decides before anything is drafted, `allocate`
once the candidates' values are known, `learn` hears what came of it; on a GPU only after the next step is planned and
allocated too. Does not know models or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.step_timer import StepTimes
from eagle_ray.drafters.drafter import Draft
from eagle_ray.tree.budget import Budget, uniform
from eagle_ray.tree.draft_plan import DraftPlan


@dataclass(frozen=True, slots=True)
class Allocation:
    """The candidates that will be verified.

    keep: which nodes. num_nodes: at least the most of one tree, root included. num_rows: rows of the pass, at least
    the number of nodes kept; what is more is padding. expected: drafts of the batch that will be accepted, by whoever
    chose them. sizes: nodes kept of each tree, where the host knows.
    """

    keep: Bool[Tensor, "B N"]
    num_nodes: int
    num_rows: int
    expected: float = 0.0
    sizes: list[int] | None = None

    @classmethod
    def uniform(cls, draft: Draft, most_nodes: int) -> Allocation:
        """The best most_nodes of every tree, roots included; fewer only where a tree has fewer."""
        num_nodes = min(most_nodes, draft.tree.num_nodes)
        num_rows = len(draft.tree.tokens) * num_nodes
        return cls(uniform(draft.tree, Budget(num_rows, num_nodes)), num_nodes, num_rows)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of one step.

    num_cached: tokens cached before it. depth: levels that were grown, 0 where nothing was offered, whatever the plan.
    num_accepted: drafts, of the whole batch, those past a sequence's end left out; num_expected: as allocated.
    num_prompt_tokens: of the prompts that were computed along with it.
    num_prefill_rows: rows of those prompts that went through the target in the same pass.
    is_first: something was made that later steps of this kind only use: its seconds say nothing of theirs.
    """

    plan: DraftPlan
    batch_size: int
    num_cached: int
    depth: int
    num_caught_up: int
    num_rows: int
    num_accepted: int
    num_prompt_tokens: int
    seconds: StepTimes
    is_first: bool = False
    num_expected: float = 0.0
    num_prefill_rows: int = 0


@runtime_checkable
class Planner(Protocol):
    @property
    def will_draft(self) -> bool:
        """Whether the next step will draft, as far as can be known now: new prompts are then read by the drafter."""

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        """What to draft for the running sequences."""

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        """Which of the candidates to verify."""

    def observe(self, outcome: StepOutcome) -> None:
        """The step is over."""


class UniformPlanner:
    """The same tree for every sequence at every step, as EAGLE-2 was published.

    max_nodes: drafted nodes per sequence, root excluded. max_depth: longest draft path. top_k: beam width.
    All 0 is plain decoding. No path is longer than the number of nodes, so levels past max_nodes are not drafted.
    """

    def __init__(self, max_nodes: int, max_depth: int, top_k: int):
        self._plan = DraftPlan(min(max_depth, max_nodes), top_k)
        self._num_nodes = 1 + max_nodes

    @property
    def will_draft(self) -> bool:
        return self._plan.is_drafting

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._plan

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return Allocation.uniform(draft, self._num_nodes)

    def observe(self, outcome: StepOutcome) -> None:
        pass
