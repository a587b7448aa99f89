"""Which nodes of which sequences are worth a verify row.

A policy looks at the candidate trees of a batch and names the nodes to verify, under a budget of rows:

    uniform        each tree's best, the same number for every sequence: EAGLE-2 as published
    global_        the best of the whole batch, whoever they belong to
    static(paths)  a fixed set of paths by rank: EAGLE-1

Whatever a policy keeps holds the ancestors of everything it keeps: values never rise along a path and ties go to the
earlier node. Does not know costs or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.async_copy import to_device
from eagle_ray.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Budget:
    """What one verify pass may hold.

    num_rows: rows of the whole pass, the B roots included. num_nodes: most rows of one sequence, its root included.
    max_depths: deepest node worth having in each sequence; None where there is no such limit.
    log_weights: added to the log values of each sequence's nodes; 0 is its fair share, None is 0 for all.
    """

    num_rows: int
    num_nodes: int
    max_depths: Int[Tensor, " B"] | None = None
    log_weights: Float[Tensor, " B"] | None = None


Policy = Callable[[DraftTree, Budget], Bool[Tensor, "B N"]]


def uniform(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """Each tree's num_nodes best; fewer only where a tree has fewer. num_rows is taken to be enough for that."""
    return (ranks(tree.log_values) < budget.num_nodes) & tree.valid


def best_of_batch(tree: DraftTree, budget: Budget) -> Bool[Tensor, "B N"]:
    """The num_rows - B most valuable nodes of the whole batch, and every root."""
    return Candidates.of(tree, budget).keep(budget.num_rows)


def static(paths: Iterable[tuple[int, ...]]) -> Policy:
    """The nodes on the given paths from the root, each step named by its rank among its siblings (EAGLE-1).

    Paths are closed under prefixes here, whatever was listed. A path that the candidates lack is left out.
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
    """From a path and a rank to the path that is one step longer, all by their places; len(paths) is nowhere."""
    places = {path: place for place, path in enumerate(paths)}
    steps = torch.full((len(paths) + 1, width + 1), len(paths))
    for path, place in places.items():
        if path:
            steps[places[path[:-1]], path[-1]] = place
    return steps


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of a whole batch, most valuable first, cut to num_nodes - 1 of each tree.

    log_values: of the candidates in that order, -inf past the last. owners, nodes: their tree and index in it.
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
        """Draft tokens that the m best candidates are expected to yield, for each size m; one look at the device."""
        values = self.log_values.exp()
        totals = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return totals[to_device(sizes, values.device)].tolist()

    def keep(self, num_rows: int) -> Bool[Tensor, "B N"]:
        """The roots and as many of the best candidates as num_rows has room for."""
        batch, num_nodes = self.shape
        chosen = slice(max(num_rows - batch, 0))
        real = self.log_values[chosen] > -torch.inf
        cells = torch.where(real, self.owners[chosen] * num_nodes + self.nodes[chosen], 0)  # cell 0 is a root
        kept = torch.zeros(batch * num_nodes, dtype=torch.bool, device=cells.device).index_fill(0, cells, True)
        kept = kept.view(batch, num_nodes)
        kept[:, 0] = True
        return kept


def ranks(values: Float[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Each node's place in its own tree, 0 the most valuable; ties go to the earlier node."""
    order = values.sort(dim=1, descending=True, stable=True).indices
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, place)


def _worth(tree: DraftTree, budget: Budget) -> Float[Tensor, "B N"]:
    """Log values as the budget weighs them; -inf for what it rules out."""
    worth = tree.log_values
    if budget.log_weights is not None:
        worth = worth + budget.log_weights[:, None]
    if budget.max_depths is not None:
        worth = worth.masked_fill(tree.depths > budget.max_depths[:, None], -torch.inf)
    return worth


def _sibling_ranks(tree: DraftTree) -> Int[Tensor, "B N"]:
    """How many siblings stand before each node; siblings stand side by side, most probable first."""
    node = torch.arange(tree.num_nodes, device=tree.tokens.device).expand_as(tree.parents)
    parents = torch.where(tree.parents >= 0, tree.parents, tree.num_nodes)  # the root has no siblings
    first = node.new_full((len(node), tree.num_nodes + 1), tree.num_nodes).scatter_reduce(1, parents, node, "amin")
    return node - first.gather(1, parents)
