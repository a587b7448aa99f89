"""StaticTree: a fixed set of nodes, each named by the ranks of its path from the root.

    tree = StaticTree.of([(0, 0), (1,)])      # the best child, its best child, and the second best child
    tree.paths                                # ((0,), (1,), (0, 0)), breadth-first
    tree.expanded(1)                          # [(0, 0)]: of level 1 only the best child has children

Which tokens stand there is decided by each step's draft; which nodes there are is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """paths: root to node, each step a rank among siblings; every prefix is one of them; breadth-first, by rank."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> StaticTree:
        """The tree of these paths and of whatever leads to them."""
        closed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        return cls(tuple(sorted(closed, key=lambda path: (len(path), path))))

    def truncate(self, max_nodes: int, max_depth: int, top_k: int) -> StaticTree:
        """What there is room for: ranks below top_k, max_depth levels, of these the first max_nodes nodes."""
        inside = [path for path in self.paths if len(path) <= max_depth and max(path) < top_k]
        return StaticTree(tuple(inside[:max_nodes]))

    @property
    def depth(self) -> int:
        """Its number of levels; 0 where it has no nodes."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """Children that a node must be offered for every path to exist."""
        return 1 + max((max(path) for path in self.paths), default=-1)

    def parents_at(self, level: int) -> list[tuple[int, int]]:
        """The nodes of a level (1 is the root's children) that have children, in their order.

        Each as its parent's place among those of the level before (0 is the root) and its rank among its siblings.
        """
        above = {path: place for place, path in enumerate(self._parents(level - 1))}
        return [(above[path[:-1]], path[-1]) for path in self._parents(level)]

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
