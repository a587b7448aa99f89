"""ValueCurves: how many draft tokens a tree of a given width, depth and size has lately been worth.

A tree drafted with width w holds those of every smaller width and depth: the first w' parents of each level and their
first w' children. So one wide draft tells what all narrower ones would have offered. Does not know costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# Drafted nodes per sequence, on average over the batch, at which a curve is kept.
SIZES = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RATE = 0.2  # how far one observation of many sequences moves a curve; of fewer, by the root of their number
ENOUGH = 8  # sequences that make a full observation
SMALLEST = 1e-30


class ValueCurves:
    """Means over recent drafts; widths and depths are the kinds of draft that a planner may ask for."""

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        self._values: dict[tuple[int, int], list[float]] = {}
        self._masses: list[list[float]] = []  # of each level: its parents' values, then its children's by rank
        self._times_seen: list[int] = []  # of each level

    def expected(self, width: int, depth: int, size: float) -> float:
        """Draft tokens of one sequence when its batch verifies `size` nodes a sequence of such a draft.

        Of a draft wider or deeper than any yet: at least what the widest and deepest of those yields.
        """
        curve = self._values.get((width, depth)) or self._nearest(width, depth)
        right = bisect_right(SIZES, size)
        if right == len(SIZES):
            return curve[-1]
        a, x = (SIZES[right - 1], curve[right - 1]) if right else (0.0, 0.0)
        return x + (curve[right] - x) * (size - a) / (SIZES[right] - a)

    def _nearest(self, width: int, depth: int) -> list[float]:
        known = [arm for arm in self._values if arm[0] <= width and arm[1] <= depth]
        return self._values[max(known)] if known else [0.0] * len(SIZES)

    def children(self, depth: int) -> list[float]:
        """By rank: conditional probability of the children, at `depth`, of the nodes that are worth any.

        Deeper than any draft yet: as at the deepest level there was.
        """
        parents, *children = self._masses[min(depth, len(self._masses)) - 1]
        return [mass / max(parents, SMALLEST) for mass in children]

    def observe(
        self, levels: list[Float[Tensor, "M _ K"]], width: int, beside: Sequence[Float[Tensor, "M _"]] = ()
    ) -> None:
        """The log values of one draft's candidates, level by level; one look at the device.

        beside: those of candidates that would have been there whatever the width, by depth.
        """
        seen = [(w, d) for w in self.widths if w <= width for d in range(1, len(levels) + 1)]
        curves = torch.stack([_curve([*(x[:, :w, :w] for x in levels[:d]), *beside[:d]]) for w, d in seen])
        masses = _masses(levels)
        flat = torch.cat([curves.flatten(), masses.flatten()]).tolist()
        rate = RATE * min(len(levels[0]) / ENOUGH, 1) ** 0.5
        for depth, place in enumerate(range(curves.numel(), len(flat), masses.shape[1])):
            self._move_masses(depth, flat[place : place + masses.shape[1]], rate)
        self._carry(seen, self._move(seen, flat, rate))

    def _rate_at(self, depth: int, rate: float) -> float:
        """The first observation of a level is taken whole, the next ones by their number."""
        return max(rate, 1 / self._times_seen[depth - 1])

    def _move(self, seen: list[tuple[int, int]], flat: list[float], rate: float) -> list[float]:
        """Move the curves that were seen; how many times larger the widest and deepest of them has become."""
        before = self._values.get(seen[-1], [0.0] * len(SIZES))
        for place, arm in enumerate(seen):
            fresh = flat[place * len(SIZES) :][: len(SIZES)]
            self._values[arm] = _moved(self._values.get(arm, fresh), fresh, self._rate_at(arm[1], rate))
        return [y / x if x > 0 else 1.0 for x, y in zip(before, self._values[seen[-1]], strict=True)]

    def _move_masses(self, depth: int, fresh: list[float], rate: float) -> None:
        if depth == len(self._masses):
            self._masses.append([0.0] * (1 + max(self.widths)))
            self._times_seen.append(0)
        self._times_seen[depth] += 1
        old = self._masses[depth]
        old[: len(fresh)] = _moved(old[: len(fresh)], fresh, self._rate_at(depth + 1, rate))

    def _carry(self, seen: list[tuple[int, int]], growth: list[float]) -> None:
        """Curves that were not seen change as the widest and deepest one that was."""
        for arm in self._values.keys() - set(seen):
            self._values[arm] = [x * g for x, g in zip(self._values[arm], growth, strict=True)]


def _moved(old: list[float], fresh: list[float], rate: float) -> list[float]:
    return [x + rate * (y - x) for x, y in zip(old, fresh, strict=True)]


def _curve(levels: list[Float[Tensor, "M ..."]]) -> Float[Tensor, " S"]:
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


def _masses(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D K1"]:
    """Of each level and sequence: the values of the nodes that were given children, then of their children by rank."""
    rows = []
    for depth, level in enumerate(levels):
        parents = torch.ones_like(level[:, :1, 0])
        if depth:
            parents = levels[depth - 1].flatten(1).topk(level.shape[1], dim=1).values.exp()
        rows.append(torch.cat([parents.sum()[None], level.exp().sum((0, 1))]) / len(level))
    return torch.stack(rows)
