"""StaticTree: a fixed set of nodes, each named by the ranks of its path from the root.

    tree = StaticTree.of([(0, 0), (1,)])      # the best child, its best child, and the second best child
    tree.paths                                # ((0,), (1,), (0, 0)), breadth-first
    tree.parents_at(1)                        # [(0, 0)]: at level 1 only the best child has children

The nodes are fixed; each step's draft gives them tokens. `best_tree.py` chooses them by acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.tree_bounds import TreeBounds

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A fixed set of nodes.

    Attributes:
        paths: path of each node from the root, as ranks among siblings, in breadth-first order by
            rank. Every prefix of a path is one of them.
        device_indices: cached results of `expanded_at`.
    """

    paths: tuple[Path, ...]
    device_indices: dict[tuple, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> StaticTree:
        """Build the tree of these paths and all their prefixes."""
        closed: set[Path] = set()
        for path in paths:
            closed.update(path[:end] for end in range(1, len(path) + 1))

        # Breadth-first, and by rank within a level.
        in_order = sorted(closed, key=lambda path: (len(path), path))
        return cls(tuple(in_order))

    def truncate(self, bounds: TreeBounds) -> StaticTree:
        """Return the tree within bounds: ranks below top_k, max_depth levels, the first max_nodes nodes."""
        inside = []
        for path in self.paths:
            if len(path) <= bounds.max_depth and max(path) < bounds.top_k:
                inside.append(path)
        first_nodes = inside[: bounds.max_nodes]
        return StaticTree(tuple(first_nodes))

    @property
    def depth(self) -> int:
        """Return the number of levels, 0 without nodes."""
        if not self.paths:
            return 0
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """Return the number of children that a node must have so that every path exists."""
        largest_rank = max((max(path) for path in self.paths), default=-1)
        return 1 + largest_rank

    def parents_at(self, level: int) -> list[tuple[int, int]]:
        """Return the nodes of a level that have children, in order. Level 1 has the root's children.

        Each node is given as its parent's index in this list for the previous level (0 is the
        root), and its rank among its siblings.
        """
        above = self._parents(level - 1)
        place_of = {path: place for place, path in enumerate(above)}
        nodes = []
        for path in self._parents(level):
            parent = place_of[path[:-1]]
            rank = path[-1]
            nodes.append((parent, rank))
        return nodes

    def expanded_at(
        self, level: int, children_each: int, device: torch.device
    ) -> Int[Tensor, " F"]:
        """Return the indices, among a level's proposed nodes, of those that have children.

        They are copied to the device once and stored in this tree, so a CUDA graph that reads them
        only has to keep the tree alive.
        """
        key = level, children_each, device
        if key not in self.device_indices:
            # Offered nodes are ordered by their parent and then by their rank.
            indices = []
            for parent, rank in self.parents_at(level):
                indices.append(parent * children_each + rank)
            self.device_indices[key] = to_device(indices, device)
        return self.device_indices[key]

    def _parents(self, level: int) -> list[Path]:
        parents = {path[:-1] for path in self.paths if len(path) == level + 1}
        return sorted(parents)


# EAGLE-1's tree for 7B targets: 25 nodes, 5 levels (arXiv 2401.15077, its published
# `mc_sim_7b_63`).
MC_SIM_7B_63 = StaticTree.of(
    [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1),
        (0, 0, 0, 2),
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 0),
        (0, 1, 1),
        (0, 2, 0),
        (0, 2, 1),
        (1, 0, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 0),
    ]
)
