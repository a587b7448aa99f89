"""merge_trees: the trees of several drafters as one, a node that several of them offer only once.

       a        +      a          =        a            log_probs_by_drafter
      / \\             / \\               / | \\               b: -0.2, -inf
     b   c            c   d             b  c   d             c: -1.9, -0.9
                      |                    |                 d: -inf, -1.2
                      e                    e                 e: -inf, -0.1

Two nodes are the same where their paths carry the same tokens; paths are told apart by 64-bit hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.sampling_batch import as_int64
from eagle_ray.sampling.sampler import GOLDEN, mix64_tensor
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan


@dataclass(frozen=True, slots=True)
class Merged:
    """The nodes of A trees as one tree. Its log values are the highest that any of them has for a node.

    log_probs_by_drafter: a node's log-probability given its parent in each drafter's tree; -inf where a tree lacks it.
    """

    tree: DraftTree
    log_probs_by_drafter: Float[Tensor, "B N A"]

    def with_log_probs(self, log_probs: Float[Tensor, "B N"], max_depth: int) -> DraftTree:
        """Return the tree with these conditional log-probabilities; those of roots and padding are not read."""
        tree = self.tree
        given = torch.where(tree.parents >= 0, log_probs, 0.0)
        values, parents = given, tree.parents.clamp(min=0)
        for _ in range(max_depth - 1):
            values = given + values.gather(1, parents)  # the root's is 0
        return replace(tree, log_values=values.masked_fill(~tree.valid, -torch.inf))


def merge_trees(trees: Sequence[DraftTree | None], max_depth: int) -> Merged:
    """Merge trees on the same roots, breadth-first, the first tree's nodes before the others' at each depth.

    max_depth bounds their depths. draft_log_probs are those of the first tree that has a node. None is a drafter
    that did not draft, and lacks every node.
    """
    drafted = [tree for tree in trees if tree is not None]
    codes = torch.cat([path_hashes(tree, max_depth) for tree in drafted], 1)
    valid = torch.cat([tree.valid for tree in drafted], 1)
    place = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
    first = _first_occurrence(codes)
    is_node = valid & (first == place)
    depths = torch.cat([tree.depths for tree in drafted], 1)
    order = torch.where(is_node, depths, max_depth + 1).sort(dim=1, stable=True).indices
    index = torch.empty_like(order).scatter_(1, order, place).gather(1, first)  # of each node in the merged tree
    own = index.split([tree.num_nodes for tree in drafted], 1)
    parents = [
        torch.where(tree.parents >= 0, at.gather(1, tree.parents.clamp(min=0)), -1)
        for tree, at in zip(drafted, own, strict=True)
    ]
    values = [_scatter(tree, tree.log_values, at, order) for tree, at in zip(drafted, own, strict=True)]
    each = iter([_scatter(tree, conditional_log_probs(tree), at, order) for tree, at in zip(drafted, own, strict=True)])
    log_probs = [torch.full_like(values[0], -torch.inf) if tree is None else next(each) for tree in trees]
    is_node = is_node.gather(1, order)

    def placed(tensors: list[Tensor], padding: int | float) -> Tensor:
        return torch.where(is_node, torch.cat(tensors, 1).gather(1, order), padding)

    merged = DraftTree(
        tokens=placed([tree.tokens for tree in drafted], 0),
        parents=placed(parents, -1),
        depths=placed([tree.depths for tree in drafted], 0),
        log_values=torch.stack(values, 2).amax(2),
        draft_log_probs=placed([tree.draft_log_probs for tree in drafted], -torch.inf),
        valid=is_node,
    )
    return Merged(merged, torch.stack(log_probs, 2))


def extra_log_values(
    first_log_probs: Float[Tensor, "B N"], tree: DraftTree, depth: int, plan: DraftPlan
) -> list[Float[Tensor, "M N"]]:
    """Return, by depth, the log values of nodes that the first drafter does not propose."""
    values = tree.log_values.masked_fill(first_log_probs > -torch.inf, -torch.inf)
    depths = tree.depths
    if plan.members is not None:
        members = to_device(plan.members, values.device)
        values, depths = values[members], depths[members]
    return [values.masked_fill(depths != d, -torch.inf) for d in range(1, depth + 1)]


def path_hashes(tree: DraftTree, max_depth: int) -> Int[Tensor, "B N"]:
    """Return a hash of the tokens from the root (excluded) to each node; padding has a hash of its own."""
    parents, drafted = tree.parents.clamp(min=0), tree.parents >= 0
    tokens, begin = mix64_tensor(tree.tokens + 1), (~tree.valid).long()
    codes = begin
    for _ in range(max_depth):
        codes = torch.where(drafted, codes.gather(1, parents) * as_int64(GOLDEN) + tokens, begin)
    return codes


def _first_occurrence(codes: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return the first index in its row at which each code occurs."""
    ranked, order = codes.sort(dim=1, stable=True)
    begins = torch.ones_like(ranked, dtype=torch.bool)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    place = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
    run = torch.where(begins, place, 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, run))


def conditional_log_probs(tree: DraftTree) -> Float[Tensor, "B N"]:
    """Log-probability of each node given its parent; 0 for roots."""
    above = tree.log_values.gather(1, tree.parents.clamp(min=0))
    return torch.where(tree.parents >= 0, tree.log_values - above, 0.0)


def _scatter(
    tree: DraftTree, values: Float[Tensor, "B M"], index: Int[Tensor, "B M"], merged: Int[Tensor, "B N"]
) -> Float[Tensor, "B N"]:
    """Values of the tree's nodes at their indices in the merged tree, -inf elsewhere."""
    num_nodes = merged.shape[1]
    at = torch.where(tree.valid, index, num_nodes)
    return values.new_full((len(values), num_nodes + 1), -torch.inf).scatter_(1, at, values)[:, :num_nodes]
