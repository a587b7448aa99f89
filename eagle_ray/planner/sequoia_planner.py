"""SequoiaPlanner: a static tree for all sequences, made anew now and then from the acceptance measured so far.

    planner = SequoiaPlanner(measured, max_nodes=60)
    planner.tree                                      # of the rates it began with; later of those it has seen

The tree is best on average over all sequences and steps, and knows nothing of what this step's draft is sure of: that
is what a dynamic tree adds.
"""

from __future__ import annotations

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.drafters.drafter import Draft
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.planner.static_planner import StaticPlanner
from eagle_ray.sampling.rank_acceptance import RankAcceptance
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.sequoia import best_tree
from eagle_ray.tree.static_tree import StaticTree

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
        """Every rank is drawn, in the tree or not: the target's picks tell of all of them."""
        rates = self._measured.rates()
        return StaticPlanner(best_tree(rates, self._max_nodes), width=len(rates[0]))
