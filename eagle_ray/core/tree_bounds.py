"""TreeBounds: the maximum size of a sequence's draft tree.

>>> bounds = TreeBounds(max_nodes=60, max_depth=6, top_k=10)
>>> bounds.num_nodes, bounds.num_candidates
(61, 511)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeBounds:
    """Upper bounds of each sequence's draft tree.

    Attributes:
        max_nodes: drafted nodes that are verified, root excluded; 0 is plain decoding.
        max_depth: tokens of the longest draft path.
        top_k: nodes of a level that are expanded, and children of each.
    """

    max_nodes: int
    max_depth: int
    top_k: int

    @property
    def num_nodes(self) -> int:
        """Return the nodes of the largest verified tree, root included."""
        return 1 + self.max_nodes

    @property
    def depth(self) -> int:
        """Return the number of levels that are drafted: at most max_depth, and at most max_nodes."""
        return min(self.max_depth, self.max_nodes)

    @property
    def num_candidates(self) -> int:
        """Return the nodes of the largest drafted tree, root included."""
        return 1 + self.top_k + (self.depth - 1) * self.top_k**2 if self.depth else 1

    @property
    def num_positions(self) -> int:
        """Return how many positions past its cached tokens a step may write, for the target's nodes
        or the drafter's levels.

        A method that drafts several levels in one pass needs one position more, for a second row of
        the root.
        """
        return max(self.num_nodes, self.max_depth + 2, 1 + max(self.max_depth - 1, 0) * self.top_k)


NO_TREE = TreeBounds(0, 0, 0)
"""Plain decoding."""
