"""Budget: choose the nodes of a batch's candidate trees that get a row in the verify pass.

    uniform          the best nodes of each tree, the same number for every sequence: EAGLE-2 as published
    best_of_batch    the best nodes of the whole batch, whichever tree they are in
    static(paths)    a fixed set of paths by rank: EAGLE-1

If a policy keeps a node, it keeps its ancestors: values never rise along a path, and ties go to the earlier node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one verify pass.

    Attributes:
        num_rows: rows of the pass, the B roots included.
        num_nodes: maximum rows of one sequence, its root included.
        max_depths: maximum depth in each sequence; None is no limit.
        log_weights: added to the log values of each sequence's nodes; None is 0 for all.
    """

    num_rows: int
    num_nodes: int
    max_depths: Int[Tensor, " B"] | None = None
    log_weights: Float[Tensor, " B"] | None = None


Policy = Callable[[DraftTree, Budget], Bool[Tensor, "B N"]]


def uniform(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """Keep the num_nodes best nodes of each tree, or all if it has fewer. budget.num_rows must allow that."""
    return (ranks(tree.log_values) < budget.num_nodes) & tree.valid


def best_of_batch(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """Keep every root and the num_rows - B most valuable nodes of the whole batch."""
    return Candidates.of(tree, budget).keep(budget.num_rows)


def static(paths: Iterable[tuple[int, ...]]) -> Policy:
    """Return a policy that keeps the given paths from the root (EAGLE-1).

    Args:
        paths: ranks among siblings, one per level. Prefixes are added. Paths that the candidates lack are left out.
    """
    wanted = sorted({path[:end] for path in paths for end in range(len(path) + 1)} | {()})
    longest, width = max(map(len, wanted)), 1 + max((max(path) for path in wanted if path), default=-1)
    steps = _steps(wanted, width)

    def keep(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
        table, parents = steps.to(tree.tokens.device), tree.parents.clamp(min=0)
        rank, at = _sibling_ranks(tree).clamp(max=width), torch.zeros_like(tree.tokens)
        for _ in range(longest):
            at = table[at.gather(1, parents), rank]
            at[:, 0] = 0
        return (at < len(wanted)) & (tree.depths <= longest) & tree.valid

    return keep


def _steps(paths: list[tuple[int, ...]], width: int) -> Int[Tensor, "P1 W1"]:
    """Return a table from (path index, rank) to the index of the longer path; len(paths) is no path."""
    index_of = {path: place for place, path in enumerate(paths)}
    steps = torch.full((len(paths) + 1, width + 1), len(paths))
    for path, place in index_of.items():
        if path:
            steps[index_of[path[:-1]], path[-1]] = place
    return steps


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of a whole batch, most valuable first, at most num_nodes - 1 of each tree.

    Attributes:
        log_values: log values of the candidates in that order; -inf past the last.
        owners: the tree of each candidate.
        nodes: its index in that tree.
        shape: (B, N) of the trees.
    """

    log_values: Float[Tensor, " C"]
    owners: Int[Tensor, " C"]
    nodes: Int[Tensor, " C"]
    shape: torch.Size

    @classmethod
    def of(cls, tree: DraftTree, budget: Budget) -> Candidates:
        values = _worth(tree, budget)[:, 1:]
        batch, num_candidates = values.shape
        order = torch.arange(num_candidates, device=values.device).expand(batch, -1)
        if budget.num_nodes - 1 < num_candidates:
            values, order = values.sort(dim=1, descending=True, stable=True)
            values, order = values[:, : budget.num_nodes - 1], order[:, : budget.num_nodes - 1]
        best, index = values.flatten().sort(descending=True, stable=True)
        return cls(best, index // max(values.shape[1], 1), order.flatten()[index] + 1, tree.tokens.shape)

    def expected(self, sizes: list[int]) -> list[float]:
        """Return the accepted drafts that the m best candidates are expected to yield, for each m. Syncs once."""
        values = self.log_values.exp()
        totals = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return totals[to_device(sizes, values.device)].tolist()

    def keep(self, num_rows: int) -> Bool[Tensor, "B N"]:
        """Keep the roots and the best num_rows - B candidates."""
        batch, num_nodes = self.shape
        chosen = slice(max(num_rows - batch, 0))
        real = self.log_values[chosen] > -torch.inf
        index = torch.where(real, self.owners[chosen] * num_nodes + self.nodes[chosen], 0)  # index 0 is a root
        keep = torch.zeros(batch * num_nodes, dtype=torch.bool, device=index.device).index_fill(0, index, True)
        keep = keep.view(batch, num_nodes)
        keep[:, 0] = True
        return keep


def ranks(values: Float[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return each node's rank in its own tree, 0 for the most valuable. Ties go to the earlier node."""
    order = values.sort(dim=1, descending=True, stable=True).indices
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, place)


def _worth(tree: DraftTree, budget: Budget) -> Float[Tensor, "B N"]:
    """Return log values with the budget's weights; -inf for nodes past its depths."""
    worth = tree.log_values
    if budget.log_weights is not None:
        worth = worth + budget.log_weights[:, None]
    if budget.max_depths is not None:
        worth = worth.masked_fill(tree.depths > budget.max_depths[:, None], -torch.inf)
    return worth


def _sibling_ranks(tree: DraftTree) -> Int[Tensor, "B N"]:
    """Return the number of siblings before each node; siblings are adjacent, most probable first."""
    node = torch.arange(tree.num_nodes, device=tree.tokens.device).expand_as(tree.parents)
    parents = torch.where(tree.parents >= 0, tree.parents, tree.num_nodes)  # the root has no siblings
    first = node.new_full((len(node), tree.num_nodes + 1), tree.num_nodes).scatter_reduce(1, parents, node, "amin")
    return node - first.gather(1, parents)
