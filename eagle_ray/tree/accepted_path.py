"""Find the accepted path of each draft tree: the drafts that equal the tokens which the target sampled.

The target samples a token at every node. From the root, the accepted path follows the child that
has the sampled token. If no child has it, the sampled token is the bonus token. So every emitted
token is the target's own, greedy or sampled.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle_ray.kernels import tree_ops
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows


def accept_path(
    tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int
) -> VerifyResult:
    """Return the longest path of each tree on which every node has the token that the target sampled at its parent.

    Args:
        picks: token that the target sampled after each row.
        max_depth: upper bound on the depths, D1 - 1.
    """
    if tree_ops.available(picks.device):
        nodes, num_accepted, tokens = tree_ops.walk_paths(
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.valid,
            rows.row_of,
            picks,
            max_depth + 1,
        )
        return VerifyResult(nodes, num_accepted, tokens)
    return accept_path_portably(tree, rows, picks, max_depth)


def accept_path_portably(
    tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int
) -> VerifyResult:
    """Compute `accept_path` with torch operations, on any device."""
    picks_at = picks[rows.row_of]
    if max_depth == 0:
        roots = torch.zeros_like(picks_at)
        no_drafts = torch.zeros_like(picks_at[:, 0])
        return VerifyResult(roots, no_drafts, picks_at)
    accepted = accepted_mask(tree, picks_at, max_depth)

    # Write each accepted node at its depth, and the others to a last column, which is cut off.
    batch = len(tree.tokens)
    last = max_depth + 1
    nodes = torch.full((batch, last + 1), -1, dtype=torch.int64, device=picks.device)
    index = torch.arange(tree.num_nodes, device=picks.device)
    depth_or_last = torch.where(accepted, tree.depths, last)
    nodes = nodes.scatter(1, depth_or_last, index.expand_as(tree.tokens))
    nodes = nodes[:, :last]

    # The token after each node of the path: a draft that was accepted, and at last the bonus token.
    tokens = picks_at.gather(1, nodes.clamp(min=0))
    num_accepted = accepted.sum(1) - 1
    return VerifyResult(nodes, num_accepted, tokens)


def accepted_mask(
    tree: DraftTree, picks_at: Int[Tensor, "B N"], max_depth: int
) -> Bool[Tensor, "B N"]:
    """Return a mask of the nodes on the accepted paths, roots included."""
    # Nodes with the token that the target sampled at their parent.
    parents = tree.parents.clamp(min=0)
    picked_above = picks_at.gather(1, parents)
    picked = (tree.tokens == picked_above) & tree.valid
    picked[:, 0] = tree.valid[:, 0]

    # A node is accepted if its ancestors are, too: each turn decides one more level.
    accepted = picked
    for _ in range(max_depth - 1):
        above = accepted.gather(1, parents)
        accepted = picked & above
    return accepted
