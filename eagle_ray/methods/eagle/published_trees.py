"""Methods over an EAGLE head that decide their trees: static ones (EAGLE-1, Sequoia), and by rules (DDD, OPT-Tree).

    StaticPlanner(MC_SIM_7B_63)                              # EAGLE-1's 25 nodes
    SequoiaPlanner(acceptance, max_nodes=60)                 # recomputed now and then from the acceptance so far
    RulePlanner(TreeBounds(max_nodes=60, max_depth=11, top_k=10), ddd_stops)

A static tree has the same nodes by rank for every sequence at every step, so it is best on average.
A dynamic tree also uses what the drafter knows in this step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import corrections
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.eagle.draft_vocab import offered_tokens
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import DraftHead
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import Allocation, StepOutcome, UniformPlanner
from eagle_ray.tree.best_tree import best_tree
from eagle_ray.tree.budget import Budget, static
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan, PartialDraft
from eagle_ray.tree.static_tree import MC_SIM_7B_63, StaticTree

FIRST_REVIEW = 8  # steps; after it the time to the next review doubles, up to
MAX_PUBLISHED_NODES = 256
SAMPLE_MEMORY = 2000  # picks of a level after which a pick counts 1/e
PRIOR = 4.0  # picks that a guess is worth
# Rate of a root's first child; each further child is picked GUESS_RATIO times as often.
FIRST_GUESS = 0.5
GUESS_RATIO = 0.4
MIN_BEAM_PROBABILITY = 0.3  # DDD: of all paths of the beam together
MIN_GAIN = 0.2  # OPT-Tree: expected accepted drafts that a level adds

StopRule = Callable[[PartialDraft], Bool[Tensor, " B"]]


class StaticPlanner:
    """Drafts and verifies one fixed tree.

    Args:
        width: number of children drafted for each node that has any; at least tree.width, the
            default.
    """

    def __init__(self, tree: StaticTree, width: int | None = None):
        self.tree = tree
        self._plan = (
            DraftPlan(tree.depth, width or tree.width, static_tree=tree)
            if tree.paths
            else PLAIN_PLAN
        )
        self._policy = static(tree.paths)

    @property
    def will_draft(self) -> bool:
        return self._plan.is_drafting

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._plan

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        num_nodes = min(1 + len(self.tree.paths), draft.tree.num_nodes)
        num_rows = len(batch) * num_nodes
        return Allocation(
            self._policy(draft.tree, Budget(num_rows, num_nodes)), num_nodes, num_rows
        )

    def observe(self, outcome: StepOutcome) -> None:
        pass


class RankAcceptance(Calibration):
    """A calibration that also counts how often the target samples a child, by depth and rank.

        measured = RankAcceptance(levels=6, width=10)
        ...                                               # a drafter calibrates with it and reports the samples
        measured.rates()[0][2]                            # rate of the third child of a root

    A sample after a node that was reached tells about all its drafted children, verified or not.
    Counted on the device and read now and then.

    Args:
        width: number of ranks that are counted; children of a higher rank are ignored.
    """

    def __init__(self, levels: int, width: int, device: torch.device | str = "cpu"):
        super().__init__(levels, device)
        # By rank; then nodes that were reached.
        self._picked = torch.zeros(levels, width + 1, device=device)
        self._width = width

    def update(
        self,
        kinds: Int[Tensor, " B"],
        log_probs: Float[Tensor, "L B K"],
        picked: Bool[Tensor, "L B K"],
        reached: Bool[Tensor, "L B"],
        confidence: Float[Tensor, "L B"] | None = None,
    ) -> None:
        super().update(kinds, log_probs, picked, reached, confidence)
        counts = self._picked[: len(picked)]
        news = (picked & reached[:, :, None]).sum(1)[:, : self._width]
        counts *= (1 - reached.sum(1) / SAMPLE_MEMORY).clamp(min=0)[:, None]
        counts[:, : news.shape[1]] += news
        counts[:, -1] += reached.sum(1)

    def rates(self) -> list[list[float]]:
        """Return acceptance rates by [depth][rank]. Syncs with the device once.

        A level that was seldom reached is shrunk towards the one above it, and the first level
        towards an initial guess that weighs as much as PRIOR samples.
        """
        rates = []
        guess = [FIRST_GUESS * GUESS_RATIO**rank for rank in range(self._width)]
        for *picked, reached in self._picked.tolist():
            total = reached + PRIOR
            pairs = zip(picked, guess, strict=True)
            guess = [(n + PRIOR * before) / total for n, before in pairs]
            rates.append(guess)
        return rates


class SequoiaPlanner:
    """Plans the best fixed tree by measured acceptance.

    Args:
        measured: acceptance rates, which the drafter measures.
        max_nodes: drafted nodes, root excluded.
    """

    will_draft = True

    def __init__(self, measured: RankAcceptance, max_nodes: int):
        self._measured = measured
        self._max_nodes = max_nodes
        self._num_steps = 0
        self._next_review = FIRST_REVIEW
        self._static = self._planned()

    @property
    def tree(self) -> StaticTree:
        return self._static.tree

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self._num_steps >= self._next_review:
            self._next_review += min(self._num_steps, MAX_PUBLISHED_NODES)
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


class RulePlanner(UniformPlanner):
    """Drafts level by level until a published rule (DDD, OPT-Tree) stops it, within bounds.

    The rule reads EAGLE-2's draft between two levels. It knows no measured costs: a threshold
    stands for them. A batch is drafted together, so drafting ends when the rule says stop for every
    sequence. The host reads the rule's result after every level. The papers tune both thresholds
    per target; the ones here are our own choice.

    Args:
        rule: returns which sequences need no further level.
    """

    def __init__(self, bounds: TreeBounds, rule: StopRule):
        super().__init__(bounds, should_stop=lambda builder: bool(rule(builder).all()))


def ddd_stops(builder: PartialDraft) -> Bool[Tensor, " B"]:
    """Return which trees' beams have a total probability below MIN_BEAM_PROBABILITY (DDD, arXiv 2409.00142)."""
    return builder.frontier().log_values.exp().sum(1) < MIN_BEAM_PROBABILITY


def opt_tree_stops(max_nodes: int) -> StopRule:
    """Return OPT-Tree's rule (arXiv 2406.17276) for trees of max_nodes nodes, root excluded.

    Its δ, MIN_GAIN, should exceed the ratio of a draft pass's time to a target pass's.
    """
    return partial(_gains_too_little, max_nodes)


def _gains_too_little(max_nodes: int, builder: PartialDraft) -> Bool[Tensor, " B"]:
    """Return for which trees the last level added less than MIN_GAIN; the first level adds all there is."""
    levels = [level.flatten(1).exp() for level in builder.levels]
    return _expected(levels, max_nodes) - _expected(levels[:-1], max_nodes) < MIN_GAIN


def _expected(levels: list[Float[Tensor, "B _"]], max_nodes: int) -> Float[Tensor, " B"]:
    """Return the expected accepted drafts: the sum of the best max_nodes nodes' path probabilities."""
    if not levels:
        return torch.zeros(())  # the root's alone
    values = torch.cat(levels, 1)
    best = values.topk(min(max_nodes, values.shape[1]), dim=1).values
    return best.sum(1)


def make_published_drafter(
    speculative: DraftSettings, target: TargetModel, weights: DraftHead
) -> EagleDrafter:
    """Return a drafter whose trees follow a published rule and use the head's uncalibrated probabilities."""
    return EagleDrafter(weights, target, token_ids=offered_tokens(speculative, target, weights))


def make_sequoia_drafter(
    speculative: DraftSettings, target: TargetModel, weights: DraftHead
) -> EagleDrafter:
    """Return a drafter that measures the acceptance of each rank, from which `sequoia_planner` makes its trees."""
    width = min(speculative.top_k, target.vocab_size)
    acceptance = RankAcceptance(speculative.max_depth, width, target.device)
    _, coupling = corrections(speculative, target.device)
    token_ids = offered_tokens(speculative, target, weights)
    return EagleDrafter(
        weights, target, calibration=acceptance, coupling=coupling, token_ids=token_ids
    )


def eagle1_planner(speculative: DraftSettings, drafter: EagleDrafter) -> StaticPlanner:
    """Return the planner of EAGLE-1's published tree within the limits."""
    return StaticPlanner(MC_SIM_7B_63.truncate(speculative.tree_bounds))


def sequoia_planner(speculative: DraftSettings, drafter: EagleDrafter) -> SequoiaPlanner:
    """Return the planner of the best tree for what the drafter measures."""
    acceptance = drafter.ranking.calibration
    assert isinstance(acceptance, RankAcceptance), "`make_sequoia_drafter` gives the drafter one"
    return SequoiaPlanner(acceptance, speculative.max_nodes)


def ddd_planner(speculative: DraftSettings, drafter: EagleDrafter) -> RulePlanner:
    """Return the planner of Dynamic Depth Decoding."""
    return RulePlanner(speculative.tree_bounds, ddd_stops)


def opt_tree_planner(speculative: DraftSettings, drafter: EagleDrafter) -> RulePlanner:
    """Return the planner of OPT-Tree."""
    return RulePlanner(speculative.tree_bounds, opt_tree_stops(speculative.max_nodes))
