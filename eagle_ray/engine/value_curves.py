"""ValueCurves: how many draft tokens a tree of a given width, depth and size has lately been worth.

A tree drafted with width w holds those of every smaller width and depth: the first w' parents of each level and their
first w' children. So one wide draft tells what all narrower ones would have offered. Does not know costs.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

# Drafted nodes per sequence, on average over the batch, at which a curve is kept.
SIZES = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RATE = 0.2  # how far one observation of many sequences moves a curve
ENOUGH = 8  # sequences that make a full observation


class ValueCurves:
    """Means over recent drafts; widths and depths are the kinds of draft that a planner may ask for.

    children[d][r]: conditional probability of the child of rank r of a beam node at depth d + 1.
    """

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        self.num_observations = 0
        self._values = {(w, d): [0.0] * len(SIZES) for w in widths for d in range(1, max_depth + 1)}
        self.children = [[0.0] * max(widths) for _ in range(max_depth)]

    def expected(self, width: int, depth: int, size: float) -> float:
        """Draft tokens of one sequence when its batch verifies `size` nodes a sequence of such a draft."""
        curve = self._values[width, depth]
        right = bisect_right(SIZES, size)
        if right == len(SIZES):
            return curve[-1]
        a, x = (SIZES[right - 1], curve[right - 1]) if right else (0.0, 0.0)
        return x + (curve[right] - x) * (size - a) / (SIZES[right] - a)

    def observe(self, levels: list[Float[Tensor, "M _ K"]], width: int) -> None:
        """The log values of one draft's candidates, level by level; one look at the device."""
        seen = [(w, d) for w in self.widths if w <= width for d in range(1, len(levels) + 1)]
        curves = torch.stack([_curve([level[:, :w, :w] for level in levels[:d]]) for w, d in seen])
        children = _child_probabilities(levels)
        flat = torch.cat([curves.flatten(), children.flatten()]).tolist()
        rate = self._rate(len(levels[0]))
        growth = self._move(seen, flat, rate)
        self._carry(seen, growth)
        num_children = levels[0].shape[2]
        for depth in range(children.shape[0]):
            fresh = flat[curves.numel() + depth * num_children :][:num_children]
            for rank, value in enumerate(fresh):
                self.children[depth + 1][rank] += rate * (value - self.children[depth + 1][rank])
        self.num_observations += 1

    def _rate(self, num_members: int) -> float:
        """The first observation is taken whole, the next ones by their number, and of few sequences less."""
        return max(RATE * min(num_members / ENOUGH, 1), 1 / (self.num_observations + 1))

    def _move(self, seen: list[tuple[int, int]], flat: list[float], rate: float) -> list[float]:
        """Move the curves that were seen; how many times larger the widest and deepest of them has become."""
        before = self._values[seen[-1]]
        for place, arm in enumerate(seen):
            fresh = flat[place * len(SIZES) :][: len(SIZES)]
            self._values[arm] = [x + rate * (y - x) for x, y in zip(self._values[arm], fresh, strict=True)]
        return [y / x if x > 0 else 1.0 for x, y in zip(before, self._values[seen[-1]], strict=True)]

    def _carry(self, seen: list[tuple[int, int]], growth: list[float]) -> None:
        """Curves that were not seen change as the widest and deepest one that was."""
        for arm in self._values.keys() - set(seen):
            self._values[arm] = [x * g for x, g in zip(self._values[arm], growth, strict=True)]


def _curve(levels: list[Float[Tensor, "M _ _"]]) -> Float[Tensor, " S"]:
    """Expected draft tokens per sequence at each of SIZES, the batch's best nodes taken first."""
    num_members = len(levels[0])
    values = torch.cat([level.flatten() for level in levels])
    most = min(values.numel(), int(SIZES[-1] * num_members))
    total = values.topk(most).values.exp().cumsum(0) / num_members
    total = torch.cat([total.new_zeros(1), total])
    places = torch.tensor([size * num_members for size in SIZES], device=total.device).clamp(max=most)
    below = places.floor().long()
    above = (below + 1).clamp(max=most)
    return total[below] + (places - below) * (total[above] - total[below])


def _child_probabilities(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D1 K"]:
    """By depth from 2 and rank: the mean probability of a child given its parent, parents weighed by their values."""
    rows = []
    for above, level in pairwise(levels):
        parents = above.flatten(1).topk(level.shape[1], dim=1).values.exp()
        rows.append(level.exp().sum((0, 1)) / parents.sum())
    return torch.stack(rows) if rows else levels[0].new_zeros(0, levels[0].shape[2])
