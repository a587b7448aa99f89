"""Published rules that end a draft early, as planners to compare with: DDD's depth rule and OPT-Tree's size rule.

    RulePlanner(TreeBounds(max_nodes=60, max_depth=11, top_k=10), ddd_stops)

Both look at EAGLE-2's draft between two levels and know nothing of costs: their thresholds stand for them. A batch is
drafted together, so it ends when every sequence's rule says so. The host reads the answer after every level.

DDD (arXiv 2409.00142) stops when the beam holds too little probability. OPT-Tree (arXiv 2406.17276) stops when another
level adds too little to the expected accepted drafts of the best max_nodes nodes; its δ should exceed the ratio of a
draft pass's time to a target pass's. The papers tune both thresholds by target; the ones here are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.tree.expand import TreeBuilder

MIN_BEAM_PROBABILITY = 0.3  # DDD: of all paths of the beam together
MIN_GAIN = 0.2  # OPT-Tree: expected accepted drafts that a level adds

StopRule = Callable[[TreeBuilder], Bool[Tensor, " B"]]


class RulePlanner(UniformPlanner):
    """Drafts trees within bounds; rule: which sequences need no further level."""

    def __init__(self, bounds: TreeBounds, rule: StopRule):
        super().__init__(bounds, should_stop=lambda builder: bool(rule(builder).all()))


def ddd_stops(builder: TreeBuilder) -> Bool[Tensor, " B"]:
    """Return which trees' beams have a total probability below MIN_BEAM_PROBABILITY."""
    return builder.frontier().log_values.exp().sum(1) < MIN_BEAM_PROBABILITY


def opt_tree_stops(max_nodes: int) -> StopRule:
    """Return the rule for trees of max_nodes nodes, root excluded."""
    return partial(_gains_too_little, max_nodes)


def _gains_too_little(max_nodes: int, builder: TreeBuilder) -> Bool[Tensor, " B"]:
    """Return for which trees the last level added less than MIN_GAIN; the first level adds all there is."""
    levels = [level.flatten(1).exp() for level in builder.levels]
    return _expected(levels, max_nodes) - _expected(levels[:-1], max_nodes) < MIN_GAIN


def _expected(levels: list[Float[Tensor, "B _"]], max_nodes: int) -> Float[Tensor, " B"]:
    """Return the expected accepted drafts: the sum of the best max_nodes nodes' path probabilities."""
    if not levels:
        return torch.zeros(())  # of the root alone
    values = torch.cat(levels, 1)
    return values.topk(min(max_nodes, values.shape[1]), dim=1).values.sum(1)
