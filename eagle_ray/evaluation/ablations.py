"""EAGLE-2 with a part of it taken out: what the paper's ablation compares it with (EAGLE-2, section 5.4).

    without value        a node is judged by its own confidence, in growing and in choosing, not by its path's product
    without reranking    what was expanded is verified, and nothing else: the best of each level, however deep, but for
                         the last level, whose nodes are not expanded and only reranking would choose

Both keep the ancestors of all they keep, so that outputs stay plain decoding's.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.drafters.drafter import Draft
from eagle_ray.planner.planner import Allocation, UniformPlanner
from eagle_ray.tree.budget import ranks
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import TreeBuilder


class OwnConfidence(TreeBuilder):
    """Expands the nodes that are likeliest given their parents, and values a node by the least confidence on its path.

    Choosing by that least one is choosing by the nodes' own confidence, the surest first among those whose parents are
    chosen: all that stand above a threshold, path and all, come before all others.
    """

    def grow(
        self,
        log_probs: Float[Tensor, "B F K"],
        tokens: Int[Tensor, "B F K"],
        draft_log_probs: Float[Tensor, "B F K"] | None = None,
    ) -> None:
        above = self._frontier_values[:, :, None]
        own = log_probs if draft_log_probs is None else draft_log_probs
        super().grow(torch.minimum(above, log_probs) - above, tokens, own)
        self._own = log_probs.flatten(1)

    def _best(self, values: Float[Tensor, "B C"]) -> Int[Tensor, "B F"]:
        return super()._best(self._own)


class ExpandedPlanner(UniformPlanner):
    """Verifies the nodes that EAGLE-2 would have expanded: top_k of each level but the last, which is not drafted."""

    def __init__(self, max_depth: int, top_k: int):
        depth = max(max_depth - 1, 1)
        super().__init__(num_expanded(max_depth, top_k), depth, top_k)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        keep = expanded(draft.tree, plan.width)
        num_nodes = min(1 + draft.depth * plan.width, draft.tree.num_nodes)
        return Allocation(keep, num_nodes, len(keep) * num_nodes)


def num_expanded(max_depth: int, top_k: int) -> int:
    """Nodes, roots not counted."""
    return max(max_depth - 1, 1) * top_k


def expanded(tree: DraftTree, width: int) -> Bool[Tensor, "B N"]:
    """Return the root and the `width` most valuable nodes of each level, ties to the earlier one."""
    keep = tree.depths == 0
    for depth in range(1, int(tree.depths.max()) + 1):
        here: Bool[Tensor, "B N"] = (tree.depths == depth) & tree.valid
        places: Int[Tensor, "B N"] = ranks(tree.log_values.masked_fill(~here, -torch.inf))
        keep = keep | (here & (places < width))
    return keep & tree.valid
