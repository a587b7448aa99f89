"""Methods over an EAGLE head that decide their trees alone: EAGLE-1's static tree, Sequoia, DDD and OPT-Tree."""

from __future__ import annotations

from eagle_ray.config import SpeculativeConfig
from eagle_ray.methods.candidate_ranker import corrections
from eagle_ray.methods.eagle.draft_vocab import offered_tokens
from eagle_ray.methods.eagle.drafter import EagleDrafter, make_drafter
from eagle_ray.methods.eagle.heads import DraftHead
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.published_planners import (
    RankAcceptance,
    RulePlanner,
    SequoiaPlanner,
    StaticPlanner,
    ddd_stops,
    opt_tree_stops,
)
from eagle_ray.tree.static_tree import MC_SIM_7B_63


def make_published_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: DraftHead) -> EagleDrafter:
    """Return a drafter for rules that are published over the head's own probabilities."""
    return make_drafter(speculative.model_copy(update={"ranking": "published"}), target, weights)


def make_sequoia_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: DraftHead) -> EagleDrafter:
    """Return a drafter that measures the acceptance of each rank, from which `sequoia_planner` makes its trees."""
    width = min(speculative.top_k, target.vocab_size)
    acceptance = RankAcceptance(speculative.max_depth, width, target.device)
    _, coupling = corrections(speculative, target.device)
    token_ids = offered_tokens(speculative, target, weights)
    return EagleDrafter(weights, target, calibration=acceptance, coupling=coupling, token_ids=token_ids)


def eagle1_planner(speculative: SpeculativeConfig, drafter: EagleDrafter) -> StaticPlanner:
    """Return the planner of EAGLE-1's published tree within the limits."""
    return StaticPlanner(MC_SIM_7B_63.truncate(speculative.tree_bounds))


def sequoia_planner(speculative: SpeculativeConfig, drafter: EagleDrafter) -> SequoiaPlanner:
    """Return the planner of the best tree for what the drafter measures."""
    acceptance = drafter.ranking.calibration
    assert isinstance(acceptance, RankAcceptance), "`make_sequoia_drafter` gives the drafter one"
    return SequoiaPlanner(acceptance, speculative.max_nodes)


def ddd_planner(speculative: SpeculativeConfig, drafter: EagleDrafter) -> RulePlanner:
    """Return the planner of Dynamic Depth Decoding."""
    return RulePlanner(speculative.tree_bounds, ddd_stops)


def opt_tree_planner(speculative: SpeculativeConfig, drafter: EagleDrafter) -> RulePlanner:
    """Return the planner of OPT-Tree."""
    return RulePlanner(speculative.tree_bounds, opt_tree_stops(speculative.max_nodes))
