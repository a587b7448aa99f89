"""accept_path: the walk from the root along the target's own picks.

At every node the target has chosen its token. The walk goes to the child that carries that choice; where no child
does, the choice is the bonus token. So every emitted token is the target's own, greedy and sampled alike.
Does not know how the picks were made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The accepted path of each tree; D1 is the longest possible draft path plus one.

    accepted_nodes[b, 0] = 0, the root; padding -1. num_accepted: root and bonus excluded; -1 where there is no root.
    tokens[b, :num_accepted[b] + 1] are valid: the accepted drafts, then the bonus token.
    """

    accepted_nodes: Int[Tensor, "B D1"]
    num_accepted: Int[Tensor, " B"]
    tokens: Int[Tensor, "B D1"]


def accept_path(tree: DraftTree, rows: VerifyRows, picks: Int[Tensor, " R"], max_depth: int) -> VerifyResult:
    """The longest path of each tree on which every node is the target's pick at its parent.

    picks: the target's choice after each row. max_depth: bound on the depths, D1 - 1.
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
    """Nodes on the walk, the root included: picked at their parent, and so is every ancestor."""
    parents = tree.parents.clamp(min=0)
    picked = (tree.tokens == picks_at.gather(1, parents)) & tree.valid
    picked[:, 0] = tree.valid[:, 0]
    accepted = picked
    for _ in range(max_depth - 1):
        accepted = picked & accepted.gather(1, parents)
    return accepted
