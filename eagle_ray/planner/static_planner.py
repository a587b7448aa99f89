"""StaticPlanner: the same nodes by rank for every sequence at every step, as EAGLE-1 and Sequoia draft.

    StaticPlanner(MC_SIM_7B_63)          # EAGLE-1's 25 nodes

What a node is worth plays no part: that is EAGLE-2's step beyond it.
"""

from __future__ import annotations

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.drafters.drafter import Draft
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.tree.budget import Budget, static
from eagle_ray.tree.draft_plan import PLAIN, DraftPlan
from eagle_ray.tree.static_tree import StaticTree


class StaticPlanner:
    """width: children drawn of every node that has any; at least tree.width, which is the default."""

    def __init__(self, tree: StaticTree, width: int | None = None):
        self.tree = tree
        self._plan = DraftPlan(tree.depth, width or tree.width, static_tree=tree) if tree.paths else PLAIN
        self._policy = static(tree.paths)

    @property
    def will_draft(self) -> bool:
        return self._plan.is_drafting

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._plan

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        num_nodes = min(1 + len(self.tree.paths), draft.tree.num_nodes)
        num_rows = len(batch) * num_nodes
        return Allocation(self._policy(draft.tree, Budget(num_rows, num_nodes)), num_nodes, num_rows)

    def observe(self, outcome: StepOutcome) -> None:
        pass
