"""StaticTree: a fixed set of nodes, each named by the ranks of its path from the root; and the best one by acceptance.

    tree = StaticTree.of([(0, 0), (1,)])      # the best child, its best child, and the second best child
    tree.paths                                # ((0,), (1,), (0, 0)), breadth-first
    tree.parents_at(1)                        # [(0, 0)]: at level 1 only the best child has children

Each step's draft decides the tokens; the nodes are fixed.

`best_tree` returns the tree with the most accepted drafts, given acceptance rates by depth and rank (Sequoia, arXiv
2402.12374, section 4.1).

    acceptance = [[0.6, 0.2], [0.5, 0.1]]             # of the first and second child: of roots, of their children
    best_tree(acceptance, num_nodes=2)                # (0,) and (0, 0): 0.6 + 0.6 * 0.5 is more than 0.6 + 0.2

A node yields the product of the rates along its path. The paper uses dynamic programming over subtrees. No rate exceeds
1, so no node yields more than its parent: the best tree consists of the best nodes, and a heap gives them in order. A
test compares it with the dynamic programming.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.tree_bounds import TreeBounds

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """paths: root to node, each step a rank among siblings; every prefix is one of them; breadth-first, by rank."""

    paths: tuple[Path, ...]
    device_indices: dict[tuple, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> StaticTree:
        """Return the tree of these paths and all their prefixes."""
        closed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        return cls(tuple(sorted(closed, key=lambda path: (len(path), path))))

    def truncate(self, bounds: TreeBounds) -> StaticTree:
        """Return the nodes within bounds: ranks below top_k, max_depth levels, the first max_nodes nodes."""
        inside = [path for path in self.paths if len(path) <= bounds.max_depth and max(path) < bounds.top_k]
        return StaticTree(tuple(inside[: bounds.max_nodes]))

    @property
    def depth(self) -> int:
        """Return the number of levels, 0 without nodes."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """Children that a node must be offered for every path to exist."""
        return 1 + max((max(path) for path in self.paths), default=-1)

    def parents_at(self, level: int) -> list[tuple[int, int]]:
        """Return the nodes of a level that have children, in order (level 1: the root's children).

        Each is its parent's index among those of the level before (0 is the root) and its rank among its siblings.
        """
        above = {path: place for place, path in enumerate(self._parents(level - 1))}
        return [(above[path[:-1]], path[-1]) for path in self._parents(level)]

    def expanded_at(self, level: int, children_each: int, device: torch.device) -> Int[Tensor, " F"]:
        """Return the indices, among a level's offered nodes, of those that have children.

        Copied to the device once and kept by this tree, so a CUDA graph that reads them keeps them by keeping the tree.
        """
        key = level, children_each, device
        if key not in self.device_indices:
            indices = [parent * children_each + rank for parent, rank in self.parents_at(level)]
            self.device_indices[key] = to_device(indices, device)
        return self.device_indices[key]

    def _parents(self, level: int) -> list[Path]:
        parents = {path[:-1] for path in self.paths if len(path) == level + 1}
        return sorted(parents)


# EAGLE-1's tree for 7B targets: 25 nodes, 5 levels (arXiv 2401.15077, its published `mc_sim_7b_63`).
MC_SIM_7B_63 = StaticTree.of(
    [
        *[(0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 1), (0, 0, 0, 2)],
        *[(0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)],
        *[(1, 0, 0), (1, 1), (2, 0), (2, 1), (3, 0)],
    ]
)


def best_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Return the tree of num_nodes nodes, or fewer if there are no more, with the most expected accepted tokens.

    acceptance: [depth][rank], the rate at which the target samples this child of a reached node; it bounds the tree.
    """
    waiting: list[tuple[float, Path]] = [(-rate, (rank,)) for rank, rate in enumerate(acceptance[0])]
    heapq.heapify(waiting)
    paths: list[Path] = []
    while waiting and len(paths) < num_nodes:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < len(acceptance):
            for rank, rate in enumerate(acceptance[len(path)]):
                heapq.heappush(waiting, (value * rate, (*path, rank)))
    return StaticTree.of(paths)
