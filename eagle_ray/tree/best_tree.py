"""best_tree: the static tree with the most accepted drafts, given acceptance rates by depth and rank.

    acceptance = [[0.6, 0.2], [0.5, 0.1]]             # rates of two children: of roots, then of their children
    best_tree(acceptance, num_nodes=2)                # (0,) and (0, 0): 0.6 + 0.6 * 0.5 is more than 0.6 + 0.2

A node yields the product of the rates along its path. Sequoia (arXiv 2402.12374, section 4.1) uses
dynamic programming over subtrees. No rate exceeds 1, so no node yields more than its parent: the
best tree consists of the best nodes, and a heap gives them in order. A test compares it with the
dynamic programming.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from eagle_ray.tree.static_tree import Path, StaticTree


def best_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Return the tree of num_nodes nodes, or fewer if there are no more, with the most expected accepted tokens.

    Args:
        acceptance: [depth][rank], the rate at which the target samples this child of a reached
            node; it bounds the tree.
    """
    # A heap of nodes whose parents are in the tree, by what they yield, the most first.
    waiting: list[tuple[float, Path]] = []
    for rank, rate in enumerate(acceptance[0]):
        waiting.append((-rate, (rank,)))
    heapq.heapify(waiting)

    # The best of them joins the tree, and its children wait.
    paths: list[Path] = []
    while waiting and len(paths) < num_nodes:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        depth = len(path)
        if depth == len(acceptance):
            continue
        for rank, rate in enumerate(acceptance[depth]):
            child = (*path, rank)
            heapq.heappush(waiting, (value * rate, child))
    return StaticTree.of(paths)
