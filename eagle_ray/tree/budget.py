"""Budget: choose the nodes of a batch's candidate trees that get a row in the verify pass.

    uniform          the best nodes of each tree, the same number for every sequence: EAGLE-2 as published
    best_of_batch    the best nodes of the whole batch, whichever tree they are in
    static(paths)    a fixed set of paths by rank: EAGLE-1

If a policy keeps a node, it keeps its ancestors: values never rise along a path, and ties go to the
earlier node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.kernels import tree_ops
from eagle_ray.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one verify pass.

    Attributes:
        num_rows: rows of the pass, the B roots included.
        num_nodes: maximum rows of one sequence, its root included.
        max_depths: maximum depth in each sequence; None is no limit.
        log_weights: number added to the log values of each sequence's nodes; None is 0 for all.
    """

    num_rows: int
    num_nodes: int
    max_depths: Int[Tensor, " B"] | None = None
    log_weights: Float[Tensor, " B"] | None = None


Policy = Callable[[DraftTree, Budget], Bool[Tensor, "B N"]]


def uniform(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """Keep the num_nodes best nodes of each tree, or all if it has fewer. budget.num_rows must be
    large enough for that."""
    is_best = ranks(tree.log_values) < budget.num_nodes
    return is_best & tree.valid


def best_of_batch(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """Keep every root and the num_rows - B most valuable nodes of the whole batch."""
    return Candidates.of(tree, budget).keep(budget.num_rows)


def static(paths: Iterable[tuple[int, ...]]) -> Policy:
    """Return a policy that keeps the given paths from the root (EAGLE-1).

    Args:
        paths: ranks among siblings, one per level. Prefixes are added. Paths that the candidates
            lack are left out.
    """
    # A node has a row only if its ancestors have, so prefixes are paths too. The root's is ().
    prefixes: set[tuple[int, ...]] = {()}
    for path in paths:
        for length in range(1, len(path) + 1):
            prefix = path[:length]
            prefixes.add(prefix)
    wanted = sorted(prefixes)

    # Ranks from `width` on are in no path, and share the last column of the table.
    longest = 0
    width = 0
    for path in wanted:
        longest = max(longest, len(path))
        for rank in path:
            width = max(width, rank + 1)
    steps = _steps(wanted, width)

    def keep(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
        device = tree.tokens.device
        table = steps.to(device)
        parents = tree.parents.clamp(min=0)
        rank = _sibling_ranks(tree)
        rank = rank.clamp(max=width)

        # The path index of each node follows from its parent's, so one more level is right after each turn.
        at = torch.zeros_like(tree.tokens)
        for _ in range(longest):
            at_parent = at.gather(1, parents)
            at = table[at_parent, rank]
            at[:, 0] = 0

        # Deeper nodes have only the index that an ancestor had some turns ago.
        is_path = at < len(wanted)
        is_known = tree.depths <= longest
        return is_path & is_known & tree.valid

    return keep


def _steps(paths: list[tuple[int, ...]], width: int) -> Int[Tensor, "P1 W1"]:
    """Return a table from (path index, rank) to the index of the longer path; len(paths) is no path."""
    no_path = len(paths)
    num_ranks = width + 1
    steps = torch.full((no_path + 1, num_ranks), no_path)

    index_of = {path: index for index, path in enumerate(paths)}
    for path, index in index_of.items():
        if not path:
            continue
        rank = path[-1]
        parent = index_of[path[:-1]]
        steps[parent, rank] = index
    return steps


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft nodes of a whole batch, most valuable first, at most num_nodes - 1 of each tree.

    Attributes:
        log_values: log values of the candidates in that order; -inf past the last.
        owners: index of each candidate's tree.
        nodes: index of each candidate in its tree.
        shape: shape (B, N) of the trees.
        totals: expected accepted drafts of the first 0, 1, ... candidates; None if not summed yet.
    """

    log_values: Float[Tensor, " C"]
    owners: Int[Tensor, " C"]
    nodes: Int[Tensor, " C"]
    shape: torch.Size
    totals: Float[Tensor, " C1"] | None = None

    @classmethod
    def of(cls, tree: DraftTree, budget: Budget) -> Candidates:
        """Return the candidates of these trees within a budget, roots excluded."""
        device = tree.tokens.device
        if not tree_ops.available(device):
            return cls.of_portably(tree, budget)

        worth = _worth(tree, budget)
        values = worth[:, 1:]
        max_candidates = budget.num_nodes - 1
        best, owners, nodes, totals = tree_ops.best_candidates(values, max_candidates)
        shape = tree.tokens.shape
        return cls(best, owners, nodes, shape, totals)

    @classmethod
    def of_portably(cls, tree: DraftTree, budget: Budget) -> Candidates:
        """Compute `of` with torch operations, on any device."""
        worth = _worth(tree, budget)
        values = worth[:, 1:]
        batch, num_candidates = values.shape

        # The best candidates of each tree, if it has more than may be kept.
        order = torch.arange(num_candidates, device=values.device)
        order = order.expand(batch, -1)
        max_candidates = budget.num_nodes - 1
        if max_candidates < num_candidates:
            values, order = values.sort(dim=1, descending=True, stable=True)
            values = values[:, :max_candidates]
            order = order[:, :max_candidates]

        # The best of the whole batch first. Node 0 of a tree is its root, which is no candidate.
        best, index = values.flatten().sort(descending=True, stable=True)
        num_each = max(values.shape[1], 1)
        owners = index // num_each
        order = order.flatten()
        nodes = order[index] + 1
        shape = tree.tokens.shape
        return cls(best, owners, nodes, shape)

    def expected(self, sizes: list[int]) -> list[float]:
        """Return the expected accepted drafts of the m best candidates, for each m. Syncs once."""
        if self.totals is not None:
            known = self.totals.tolist()
            return [known[size] for size in sizes]

        values = self.log_values.exp()
        none = values.new_zeros(1)
        sums = values.cumsum(0)
        totals = torch.cat([none, sums])
        index = to_device(sizes, values.device)
        expected = totals[index]
        return expected.tolist()

    def keep_and_count(self, num_rows: int) -> tuple[Bool[Tensor, "B N"], list[int]]:
        """Return the mask of `keep` and the number of kept nodes per tree. Waits for the device."""
        if tree_ops.available(self.nodes.device):
            num_candidates = num_rows - self.shape[0]
            return tree_ops.keep_candidates(
                self.log_values,
                self.owners,
                self.nodes,
                num_candidates,
                self.shape,
            )
        keep = self.keep(num_rows)
        sizes = keep.sum(1)
        return keep, sizes.tolist()

    def keep(self, num_rows: int) -> Bool[Tensor, "B N"]:
        """Return a mask of the nodes to verify: the roots and the best num_rows - B candidates."""
        batch, num_nodes = self.shape
        num_chosen = max(num_rows - batch, 0)
        owners = self.owners[:num_chosen]
        nodes = self.nodes[:num_chosen]

        # There may be fewer candidates than rows. Index 0 is a root, which is kept anyway.
        log_values = self.log_values[:num_chosen]
        is_real = log_values > -torch.inf
        index = owners * num_nodes + nodes
        index = torch.where(is_real, index, 0)

        keep = torch.zeros(batch * num_nodes, dtype=torch.bool, device=index.device)
        keep = keep.index_fill(0, index, True)
        keep = keep.view(batch, num_nodes)
        keep[:, 0] = True
        return keep


def ranks(values: Float[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return each node's rank in its own tree, 0 for the most valuable. Ties go to the earlier node."""
    order = values.sort(dim=1, descending=True, stable=True).indices

    # The inverse of the order: the node at a place of it gets that place as its rank.
    rank = torch.arange(values.shape[1], device=values.device)
    rank = rank.expand_as(order)
    inverse = torch.empty_like(order)
    return inverse.scatter_(1, order, rank)


def _worth(tree: DraftTree, budget: Budget) -> Float[Tensor, "B N"]:
    """Return log values with the budget's weights; -inf for nodes past its depths."""
    worth = tree.log_values
    if budget.log_weights is not None:
        log_weights = budget.log_weights[:, None]
        worth = worth + log_weights
    if budget.max_depths is not None:
        max_depths = budget.max_depths[:, None]
        is_too_deep = tree.depths > max_depths
        worth = worth.masked_fill(is_too_deep, -torch.inf)
    return worth


def _sibling_ranks(tree: DraftTree) -> Int[Tensor, "B N"]:
    """Return the number of siblings before each node; siblings are adjacent, most probable first."""
    num_nodes = tree.num_nodes
    node = torch.arange(num_nodes, device=tree.tokens.device)
    node = node.expand_as(tree.parents)

    # The root has no siblings, so its parent is a node past the last one.
    has_parent = tree.parents >= 0
    parents = torch.where(has_parent, tree.parents, num_nodes)

    # The first child of each parent, and how far each of them is behind it.
    batch = len(node)
    first = node.new_full((batch, num_nodes + 1), num_nodes)
    first = first.scatter_reduce(1, parents, node, "amin")
    first_sibling = first.gather(1, parents)
    return node - first_sibling
