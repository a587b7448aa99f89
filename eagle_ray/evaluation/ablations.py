"""The EAGLE-2 paper's ablations (section 5.4): drafting without the value of a path, verifying without reranking.

Both keep a node's ancestors with it, so outputs still equal plain decoding's.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import Allocation, UniformPlanner
from eagle_ray.tree.budget import ranks
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, TreeBuilder


class OwnConfidence(TreeBuilder):
    """The ablation without path values: nodes are expanded by their own probability, and valued by
    the lowest on their path.

    Choosing by the lowest probability is equal to choosing by a node's own confidence among nodes
    whose parents are chosen: a path whose nodes are all above a threshold comes before all others.
    """

    def grow(
        self,
        log_probs: Float[Tensor, "B F K"],
        tokens: Int[Tensor, "B F K"],
        draft_log_probs: Float[Tensor, "B F K"] | None = None,
    ) -> None:
        above = self._frontier_values[:, :, None]
        own = log_probs if draft_log_probs is None else draft_log_probs
        lowest_on_path = torch.minimum(above, log_probs)
        super().grow(lowest_on_path - above, tokens, own)
        self._own = log_probs.flatten(1)

    def best_nodes(self, values: Float[Tensor, "B C"]) -> Int[Tensor, "B F"]:
        return super().best_nodes(self._own)


class ExpandedPlanner(UniformPlanner):
    """The ablation without reranking: verifies the expanded nodes, top_k of each level except the
    last, which is not drafted."""

    def __init__(self, max_depth: int, top_k: int):
        depth = max(max_depth - 1, 1)
        num_nodes = num_expanded(max_depth, top_k)
        super().__init__(TreeBounds(num_nodes, depth, top_k))

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        keep = expanded(draft.tree, plan.width)
        max_nodes = 1 + draft.depth * plan.width
        num_nodes = min(max_nodes, draft.tree.num_nodes)
        num_rows = len(keep) * num_nodes
        return Allocation(keep, num_nodes, num_rows)


def num_expanded(max_depth: int, top_k: int) -> int:
    """Return the number of expanded nodes, roots excluded."""
    return max(max_depth - 1, 1) * top_k


def expanded(tree: DraftTree, width: int) -> Bool[Tensor, "B N"]:
    """Return the root and the `width` most valuable nodes of each level, ties to the earlier one."""
    keep = tree.depths == 0
    for depth in range(1, int(tree.depths.max()) + 1):
        here: Bool[Tensor, "B N"] = (tree.depths == depth) & tree.valid
        values = tree.log_values.masked_fill(~here, -torch.inf)
        order: Int[Tensor, "B N"] = ranks(values)
        best = here & (order < width)
        keep = keep | best
    return keep & tree.valid
