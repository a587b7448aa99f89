"""accept_path: accept the longest path of a draft tree on which the target sampled every token.

The target samples a token at every node. From the root, the path follows the child that has the sampled token. If no
child has it, the sampled token is the bonus token. So every emitted token is the target's own, greedy or sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted path of each tree. D1 is the longest possible draft path plus one.

    Attributes:
        accepted_nodes: nodes of the path; the first is 0, the root; -1 is padding.
        num_accepted: accepted drafts, root and bonus token excluded; -1 for a padding tree without root.
        tokens: the accepted drafts, then the bonus token: the first num_accepted + 1 of each row are valid.
    """

    accepted_nodes: Int[Tensor, "B D1"]
    num_accepted: Int[Tensor, " B"]
    tokens: Int[Tensor, "B D1"]


def accept_path(tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int) -> VerifyResult:
    """Return the longest path of each tree on which every node has the token that the target sampled at its parent.

    Args:
        picks: the token that the target sampled after each row.
        max_depth: a bound on the depths, D1 - 1.
    """
    picks_at = picks[rows.row_of]
    if max_depth == 0:
        return VerifyResult(torch.zeros_like(picks_at), torch.zeros_like(picks_at[:, 0]), picks_at)
    accepted = accepted_mask(tree, picks_at, max_depth)
    nodes = torch.full((tree.tokens.shape[0], max_depth + 2), -1, dtype=torch.int64, device=picks.device)
    index = torch.arange(tree.num_nodes, device=picks.device).expand_as(tree.tokens)
    dump = max_depth + 1  # rejected nodes are written to a last column, which is cut off
    nodes = nodes.scatter(1, torch.where(accepted, tree.depths, dump), index)[:, : max_depth + 1]
    return VerifyResult(
        accepted_nodes=nodes,
        num_accepted=accepted.sum(1) - 1,
        tokens=picks_at.gather(1, nodes.clamp(min=0)),
    )


def accepted_mask(tree: DraftTree, picks_at: Int[Tensor, "B N"], max_depth: int) -> Bool[Tensor, "B N"]:
    """Return the nodes of the accepted paths, roots included."""
    parents = tree.parents.clamp(min=0)
    picked = (tree.tokens == picks_at.gather(1, parents)) & tree.valid
    picked[:, 0] = tree.valid[:, 0]
    accepted = picked
    for _ in range(max_depth - 1):
        accepted = picked & accepted.gather(1, parents)
    return accepted
