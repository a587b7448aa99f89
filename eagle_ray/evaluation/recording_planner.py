"""TreeWatch: a planner that keeps the draft trees of one sequence at a time, to show them.

engine.planner = watch = TreeWatch(engine.planner)
...                                                     # run sequences one by one
watch.best(sequence)                                    # the step of which the most drafts were accepted
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.drafters.drafter import Draft
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.draft_plan import DraftPlan


@dataclass(frozen=True, slots=True)
class WatchedTree:
    """One sequence's candidates in one step, N nodes, the root first.

    Attributes:
        num_outputs: output tokens before the step.
        values: the probability, by the planner, that the target accepts the path to each node.
        verified: true for a node that got a row.
    """

    num_outputs: int
    tokens: list[int]
    parents: list[int]
    values: list[float]
    verified: list[bool]

    def accepted(self, output_ids: list[int]) -> list[int]:
        """Return the nodes on the path of the sequence's output, without the root."""
        path, at = [], 0
        for token in output_ids[self.num_outputs :]:
            found = [i for i, parent in enumerate(self.parents) if parent == at and self.tokens[i] == token]
            if not found or not self.verified[found[0]]:
                break
            at = found[0]
            path.append(at)
        return path


class TreeWatch:
    """Plans as another planner does and keeps the trees of the current sequence."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self._sequence: Sequence | None = None
        self._trees: list[WatchedTree] = []

    @property
    def will_draft(self) -> bool:
        return self._planner.will_draft

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._planner.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        allocation = self._planner.allocate(draft, plan, batch)
        if len(batch) == 1 and draft.depth:
            self._keep(batch.sequences[0], draft, allocation)
        return allocation

    def observe(self, outcome: StepOutcome) -> None:
        self._planner.observe(outcome)

    def best(self, sequence: Sequence) -> WatchedTree | None:
        """Return the tree with the longest accepted path, the earliest of several; None if none was drafted."""
        trees = self._trees if sequence is self._sequence else []
        return max(trees, key=lambda tree: len(tree.accepted(sequence.output_ids)), default=None)

    def _keep(self, sequence: Sequence, draft: Draft, allocation: Allocation) -> None:
        if sequence is not self._sequence:
            self._sequence, self._trees = sequence, []
        tree = draft.tree
        count = int(tree.valid[0].sum())
        columns = (tree.tokens, tree.parents, tree.log_values.exp(), allocation.keep)
        self._trees.append(WatchedTree(len(sequence.output_ids), *(column[0, :count].tolist() for column in columns)))
