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
SMALLEST = 1e-30


class ValueCurves:
    """Means over recent drafts; widths and depths are the kinds of draft that a planner may ask for."""

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        self.num_observations = 0
        self._values: dict[tuple[int, int], list[float]] = {}
        self._children: list[list[float]] = []

    def expected(self, width: int, depth: int, size: float) -> float:
        """Draft tokens of one sequence when its batch verifies `size` nodes a sequence of such a draft.

        Of a draft wider or deeper than any yet: at least what the widest and deepest of those yields.
        """
        known = [arm for arm in self._values if arm[0] <= width and arm[1] <= depth]
        if not known:
            return 0.0
        curve = self._values[max(known)]
        right = bisect_right(SIZES, size)
        if right == len(SIZES):
            return curve[-1]
        a, x = (SIZES[right - 1], curve[right - 1]) if right else (0.0, 0.0)
        return x + (curve[right] - x) * (size - a) / (SIZES[right] - a)

    def children(self, depth: int) -> list[float]:
        """By rank: conditional probability of the children, at `depth`, of the nodes that are worth any.

        Deeper than any draft yet: as at the deepest level there was.
        """
        return self._children[min(depth, len(self._children)) - 1]

    def observe(self, levels: list[Float[Tensor, "M _ K"]], width: int) -> None:
        """The log values of one draft's candidates, level by level; one look at the device."""
        seen = [(w, d) for w in self.widths if w <= width for d in range(1, len(levels) + 1)]
        curves = torch.stack([_curve([level[:, :w, :w] for level in levels[:d]]) for w, d in seen])
        children = _child_probabilities(levels)
        flat = torch.cat([curves.flatten(), children.flatten()]).tolist()
        rate = self._rate(len(levels[0]))
        growth = self._move(seen, flat, rate)
        self._carry(seen, growth)
        for depth, place in enumerate(range(curves.numel(), len(flat), children.shape[1])):
            self._move_children(depth, flat[place : place + children.shape[1]], rate)
        self.num_observations += 1

    def _rate(self, num_members: int) -> float:
        """The first observation is taken whole, the next ones by their number, and of few sequences less."""
        return max(RATE * min(num_members / ENOUGH, 1), 1 / (self.num_observations + 1))

    def _move(self, seen: list[tuple[int, int]], flat: list[float], rate: float) -> list[float]:
        """Move the curves that were seen; how many times larger the widest and deepest of them has become."""
        before = self._values.get(seen[-1], [0.0] * len(SIZES))
        for place, arm in enumerate(seen):
            fresh = flat[place * len(SIZES) :][: len(SIZES)]
            self._values[arm] = _moved(self._values.get(arm, fresh), fresh, rate)
        return [y / x if x > 0 else 1.0 for x, y in zip(before, self._values[seen[-1]], strict=True)]

    def _move_children(self, depth: int, fresh: list[float], rate: float) -> None:
        if depth == len(self._children):
            self._children.append([0.0] * max(self.widths))
            rate = 1.0
        old = self._children[depth]
        old[: len(fresh)] = _moved(old[: len(fresh)], fresh, rate)

    def _carry(self, seen: list[tuple[int, int]], growth: list[float]) -> None:
        """Curves that were not seen change as the widest and deepest one that was."""
        for arm in self._values.keys() - set(seen):
            self._values[arm] = [x * g for x, g in zip(self._values[arm], growth, strict=True)]


def _moved(old: list[float], fresh: list[float], rate: float) -> list[float]:
    return [x + rate * (y - x) for x, y in zip(old, fresh, strict=True)]


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


def _child_probabilities(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D K"]:
    """By depth and rank: the mean probability of a child given its parent, parents weighed by their values."""
    rows = [levels[0].exp().mean((0, 1))]
    for above, level in pairwise(levels):
        parents = above.flatten(1).topk(level.shape[1], dim=1).values.exp()
        rows.append(level.exp().sum((0, 1)) / parents.sum().clamp(min=SMALLEST))
    return torch.stack(rows)
