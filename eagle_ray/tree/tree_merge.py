"""merge_trees: merge the draft trees of several drafters; a node that several propose appears once.

       a        +      a          =        a            log_probs_by_drafter
      / \\             / \\               / | \\               b: -0.2, -inf
     b   c            c   d             b  c   d             c: -1.9, -0.9
                      |                    |                 d: -inf, -1.2
                      e                    e                 e: -inf, -0.1

Two nodes are equal if their paths have equal tokens; paths are compared by 64-bit hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.seeds import as_int64
from eagle_ray.sampling.noise import GOLDEN, mix64_tensor
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan


@dataclass(frozen=True, slots=True)
class Merged:
    """The nodes of A trees as one tree. A node's log value is the highest that any of them has.

    Attributes:
        log_probs_by_drafter: log-probability of each node given its parent, in each drafter's tree;
            -inf if a tree lacks the node.
    """

    tree: DraftTree
    log_probs_by_drafter: Float[Tensor, "B N A"]

    def with_log_probs(self, log_probs: Float[Tensor, "B N"], max_depth: int) -> DraftTree:
        """Return the tree with values from these conditional log-probabilities; entries of roots
        and padding are ignored."""
        tree = self.tree
        parents = tree.parents.clamp(min=0)
        has_parent = tree.parents >= 0
        given = torch.where(has_parent, log_probs, 0.0)

        # After each turn the sums along one more level are right. The root's is 0.
        values = given
        for _ in range(max_depth - 1):
            above = values.gather(1, parents)
            values = given + above
        values = values.masked_fill(~tree.valid, -torch.inf)
        return replace(tree, log_values=values)


def merge_trees(trees: Sequence[DraftTree | None], max_depth: int) -> Merged:
    """Merge trees on equal roots, breadth-first; at each depth the first tree's nodes come before the others'.

    draft_log_probs of a node come from the first tree that has it.

    Args:
        trees: trees of each drafter; None for a drafter that did not draft and so lacks every node.
        max_depth: upper bound on the trees' depths.
    """
    drafted = [tree for tree in trees if tree is not None]

    # A node of the merged tree is the first one with its path, in the order of depth and drafter.
    codes = torch.cat([path_hashes(tree, max_depth) for tree in drafted], 1)
    valid = torch.cat([tree.valid for tree in drafted], 1)
    depths = torch.cat([tree.depths for tree in drafted], 1)
    place = torch.arange(codes.shape[1], device=codes.device)
    place = place.expand_as(codes)
    first = _first_occurrence(codes)
    is_first = valid & (first == place)

    # Breadth-first, since the sort is stable; what is no node comes last.
    level = torch.where(is_first, depths, max_depth + 1)
    order = level.sort(dim=1, stable=True).indices
    is_node = is_first.gather(1, order)

    # The index in the merged tree of each tree's nodes.
    inverse = torch.empty_like(order)
    inverse = inverse.scatter_(1, order, place)
    index = inverse.gather(1, first)
    index_of = index.split([tree.num_nodes for tree in drafted], 1)

    # What each tree says of the merged tree's nodes, -inf where it lacks them.
    parents = []
    values = []
    drafted_log_probs = []
    for tree, at in zip(drafted, index_of, strict=True):
        parent = at.gather(1, tree.parents.clamp(min=0))
        has_parent = tree.parents >= 0
        parents.append(torch.where(has_parent, parent, -1))
        values.append(_scatter(tree, tree.log_values, at, order))
        given_parent = conditional_log_probs(tree)
        drafted_log_probs.append(_scatter(tree, given_parent, at, order))

    # A drafter that did not draft lacks every node.
    nothing = torch.full_like(values[0], -torch.inf)
    each = iter(drafted_log_probs)
    log_probs = []
    for offered in trees:
        log_probs.append(nothing if offered is None else next(each))

    def placed(tensors: list[Tensor], padding: int | float) -> Tensor:
        """Return a field of the merged tree's nodes from that field of the drafters' nodes; padding past the last."""
        together = torch.cat(tensors, 1)
        return torch.where(is_node, together.gather(1, order), padding)

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
    is_proposed = first_log_probs > -torch.inf
    values = tree.log_values.masked_fill(is_proposed, -torch.inf)
    depths = tree.depths
    if plan.members is not None:
        members = to_device(plan.members, values.device)
        values = values[members]
        depths = depths[members]

    by_depth = []
    for level in range(1, depth + 1):
        is_elsewhere = depths != level
        by_depth.append(values.masked_fill(is_elsewhere, -torch.inf))
    return by_depth


def path_hashes(tree: DraftTree, max_depth: int) -> Int[Tensor, "B N"]:
    """Return a hash of the tokens on the path from the root (excluded) to each node; padding has a hash of its own."""
    parents = tree.parents.clamp(min=0)
    is_drafted = tree.parents >= 0
    tokens = mix64_tensor(tree.tokens + 1)
    factor = as_int64(GOLDEN)

    # A root's hash is 0 and that of padding 1. After each turn those of one more level are right.
    is_padding = ~tree.valid
    begin = is_padding.long()
    codes = begin
    for _ in range(max_depth):
        above = codes.gather(1, parents)
        extended = above * factor + tokens
        codes = torch.where(is_drafted, extended, begin)
    return codes


def _first_occurrence(codes: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return the first index in its row at which each code occurs."""
    ranked, order = codes.sort(dim=1, stable=True)

    # Equal codes are a run, which begins with the first of them, since the sort is stable.
    begins = torch.ones_like(ranked, dtype=torch.bool)
    begins[:, 1:] = ranked[:, 1:] != ranked[:, :-1]

    # The place at which the run of each place begins.
    place = torch.arange(codes.shape[1], device=codes.device)
    place = place.expand_as(codes)
    run = torch.where(begins, place, 0)
    run = run.cummax(1).values

    # Back from the order of the codes to that of the nodes.
    first = order.gather(1, run)
    by_node = torch.empty_like(order)
    return by_node.scatter_(1, order, first)


def conditional_log_probs(tree: DraftTree) -> Float[Tensor, "B N"]:
    """Return the log-probability of each node given its parent; 0 for roots."""
    parents = tree.parents.clamp(min=0)
    above = tree.log_values.gather(1, parents)
    given_parent = tree.log_values - above
    has_parent = tree.parents >= 0
    return torch.where(has_parent, given_parent, 0.0)


def _scatter(
    tree: DraftTree,
    values: Float[Tensor, "B M"],
    index: Int[Tensor, "B M"],
    merged: Int[Tensor, "B N"],
) -> Float[Tensor, "B N"]:
    """Return the values of the tree's nodes at their indices in the merged tree, -inf elsewhere."""
    num_nodes = merged.shape[1]

    # Padding goes to a last column, which is cut off.
    at = torch.where(tree.valid, index, num_nodes)
    scattered = values.new_full((len(values), num_nodes + 1), -torch.inf)
    scattered.scatter_(1, at, values)
    return scattered[:, :num_nodes]
