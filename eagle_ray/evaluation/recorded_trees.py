"""RecordingPlanner: plans as another planner does, and records times and draft trees.

    engine.planner = recorder = RecordingPlanner(engine.planner)
    recorder.best_tree(sequence)      # the tree with the most accepted drafts
    recorder.parts, recorder.num_steps      # seconds of drafts, verify passes and the rest

The evaluation and the demo wrap an engine's planner in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.expand import DraftPlan


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """One sequence's candidates in one step, N nodes, the root first.

    Attributes:
        num_outputs: number of output tokens before the step.
        values: predicted probability that the target accepts the path to each node.
        verified: true for a node that was verified.
    """

    num_outputs: int
    tokens: list[int]
    parents: list[int]
    values: list[float]
    verified: list[bool]

    def accepted(self, output_ids: list[int]) -> list[int]:
        """Return the nodes on the path of the sequence's output, without the root."""
        path = []
        node = 0
        for token in output_ids[self.num_outputs :]:
            child = self._child(node, token)
            if child is None or not self.verified[child]:
                break
            path.append(child)
            node = child
        return path

    def _child(self, node: int, token: int) -> int | None:
        """Return the child of a node that has a token, or None."""
        for i, parent in enumerate(self.parents):
            if parent == node and self.tokens[i] == token:
                return i
        return None


class RecordingPlanner:
    """A planner that passes all calls to another one, and records step times and the draft trees of
    a sequence that runs alone.

    Args:
        keeps_trees: whether to record draft trees, each of which is copied from the device.
        costs: step costs for predictions; None predicts nothing. They learn from the steps unless
            they are the planner's own.

    Attributes:
        draft_s: seconds of drafts, as in StepTimes.
        verify_s: seconds of verify passes.
        rest_s: seconds of the rest of the steps.
        predicted_s: seconds of these steps by the costs.
        predicted_plain_s: seconds of as many plain steps by the costs.
        num_steps: number of steps in the sums. A step in which a graph was recorded is left out.
    """

    def __init__(self, planner: Planner, costs: StepCosts | None = None, keeps_trees: bool = False):
        self._planner = planner
        self.step_costs = costs
        self._keeps_trees = keeps_trees
        self._sequence: Sequence | None = None
        self._trees: list[RecordedTree] = []
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.rest_s = 0.0
        self.predicted_s = 0.0
        self.predicted_plain_s = 0.0
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    @property
    def will_draft(self) -> bool:
        return self._planner.will_draft

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.draft_s, self.verify_s, self.rest_s

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._planner.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        allocation = self._planner.allocate(draft, plan, batch)
        if self._keeps_trees and len(batch) == 1 and draft.depth:
            self._keep(batch.sequences[0], draft, allocation)
        return allocation

    def observe(self, outcome: StepOutcome) -> None:
        if not outcome.is_first:
            self._add(outcome)
        self._planner.observe(outcome)

    def _add(self, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self.draft_s += outcome.seconds.draft
        self.verify_s += outcome.seconds.verify
        self.rest_s += outcome.seconds.overhead
        if self.step_costs is None:
            return
        predicted = self.step_costs.predict(outcome)
        self.predicted_s += predicted.total - self.step_costs.prefill_seconds(outcome)
        self.predicted_plain_s += self.step_costs.plain_seconds(
            outcome.batch_size, outcome.num_cached
        )
        if getattr(self._planner, "costs", None) is not self.step_costs:
            self.step_costs.update(outcome, predicted)

    def best_tree(self, sequence: Sequence) -> RecordedTree | None:
        """Return the tree with the longest accepted path, the earliest of several; None if none was drafted."""
        trees = self._trees if sequence is self._sequence else []
        return max(trees, key=lambda tree: len(tree.accepted(sequence.output_ids)), default=None)

    def _keep(self, sequence: Sequence, draft: Draft, allocation: Allocation) -> None:
        """Keep the draft tree of the sequence, and discard the trees of an earlier one."""
        if sequence is not self._sequence:
            self._sequence = sequence
            self._trees = []
        tree = draft.tree
        count = int(tree.valid[0].sum())
        recorded = RecordedTree(
            num_outputs=len(sequence.output_ids),
            tokens=tree.tokens[0, :count].tolist(),
            parents=tree.parents[0, :count].tolist(),
            values=tree.log_values[0, :count].exp().tolist(),
            verified=allocation.keep[0, :count].tolist(),
        )
        self._trees.append(recorded)
