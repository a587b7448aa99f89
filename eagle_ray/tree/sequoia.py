"""The static tree that yields most, given how often children have been accepted by depth and rank (Sequoia).

    acceptance = [[0.6, 0.2], [0.5, 0.1]]             # of the first and second child: of roots, of their children
    best_tree(acceptance, num_nodes=2)                # (0,) and (0, 0): 0.6 + 0.6 * 0.5 beats 0.6 + 0.2

A node is worth the product of the rates along its path, and a tree the sum of its nodes (arXiv 2402.12374, section
4.1). The paper finds the best tree of each size by dynamic programming over subtrees. As no rate is above 1, no node
is worth more than its parent: the best tree is that of the most valuable nodes, and a heap yields them in order. The
tests hold it equal to the dynamic programming.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from eagle_ray.tree.static_tree import StaticTree


def best_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The tree of num_nodes nodes, or of all there can be, with the most accepted tokens expected.

    acceptance: [depth][rank], that the target's pick is this child of a node that it reached; it bounds the tree.
    """
    waiting = [(-rate, (rank,)) for rank, rate in enumerate(acceptance[0])]
    heapq.heapify(waiting)
    paths = []
    while waiting and len(paths) < num_nodes:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < len(acceptance):
            for rank, rate in enumerate(acceptance[len(path)]):
                heapq.heappush(waiting, (value * rate, (*path, rank)))
    return StaticTree.of(paths)
