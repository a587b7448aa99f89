"""Planners of static trees: the same nodes by rank for every sequence at every step.

    StaticPlanner(MC_SIM_7B_63)                       # EAGLE-1's 25 nodes
    SequoiaPlanner(acceptance, max_nodes=60)          # recomputed now and then from the acceptance observed so far

A static tree is best on average over sequences and steps. A dynamic tree also uses what the drafter knows in this step.
"""

from __future__ import annotations

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.planner.rank_acceptance import RankAcceptance
from eagle_ray.tree.budget import Budget, static
from eagle_ray.tree.draft_plan import PLAIN, DraftPlan
from eagle_ray.tree.static_tree import StaticTree, best_tree


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


FIRST_REVIEW = 8  # steps; after it the time to the next review doubles, up to
LONGEST = 256


class SequoiaPlanner:
    """measured: what the drafter learns from the target's picks. max_nodes: drafted nodes, root excluded."""

    will_draft = True

    def __init__(self, measured: RankAcceptance, max_nodes: int):
        self._measured, self._max_nodes = measured, max_nodes
        self._num_steps, self._next_review = 0, FIRST_REVIEW
        self._static = self._planned()

    @property
    def tree(self) -> StaticTree:
        return self._static.tree

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._num_steps >= self._next_review:
            self._next_review += min(self._num_steps, LONGEST)
            self._static = self._planned()
        return self._static.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return self._static.allocate(draft, plan, batch)

    def observe(self, outcome: StepOutcome) -> None:
        self._num_steps += 1

    def _planned(self) -> StaticPlanner:
        """Return the plan: every rank is drafted, in the tree or not, since samples tell about all of them."""
        rates = self._measured.rates()
        return StaticPlanner(best_tree(rates, self._max_nodes), width=len(rates[0]))
