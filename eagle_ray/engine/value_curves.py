"""ValueCurves: how many draft tokens a tree of a given width, depth and size has lately been worth.

A tree drafted with width w holds those of every smaller width and depth: the first w' parents of each level and their
children. So one wide draft tells what all narrower ones would have offered. Does not know costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.speculative.upload import upload

# Drafted nodes per sequence, on average over the batch, at which a curve is kept.
SIZES = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RATE = 0.2  # how far one observation of many sequences moves what is known; of fewer, by the root of their number
ENOUGH = 8  # sequences that make a full observation
ALIKE = 4.0  # sequences that the likeness of two levels is worth
SMALLEST = 1e-30


class ValueCurves:
    """Means over recent drafts; widths and depths are the kinds of draft that a planner may ask for.

    Every draft tells of the shallowest and narrowest one. Of deeper ones it is known how many times more they were
    worth than those a level shallower *in the same drafts*, and of wider ones than the narrowest of their depth: so
    kinds that were drafted at different times, of easier and harder texts, can be compared.
    """

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        shape = len(widths), max_depth, len(SIZES)
        self._own, self._beside = torch.zeros(shape), torch.zeros(shape)  # sums over drafts, the old ones fading
        self._values = torch.zeros(shape).tolist()
        self._masses: list[list[float]] = []  # of each level: its parents' values, then its children's by rank
        self._times_seen: list[int] = []  # of each level
        self._known: list[float] = []  # of each level: sequences from which its masses are known, the old ones fading

    def expected(self, width: int, depth: int, size: float) -> float:
        """Draft tokens of one sequence when its batch verifies `size` nodes a sequence of such a draft.

        Of a draft wider or deeper than any yet: as much as of the widest and deepest of those.
        """
        curve = self._values[self.widths.index(width)][depth - 1]
        right = bisect_right(SIZES, size)
        if right == len(SIZES):
            return curve[-1]
        a, x = (SIZES[right - 1], curve[right - 1]) if right else (0.0, 0.0)
        return x + (curve[right] - x) * (size - a) / (SIZES[right] - a)

    def children(self, depth: int) -> list[float]:
        """By rank: conditional probability of the children, at `depth`, of the nodes that are worth any.

        A level of which little is known, or has been for long, is taken to be like the one above it.
        """
        children = self._ratios(1)
        for level in range(2, min(depth, len(self._masses)) + 1):
            known = self._known[level - 1]
            own = zip(self._ratios(level), children, strict=True)
            children = [(known * x + ALIKE * above) / (known + ALIKE) for x, above in own]
        return children

    def _ratios(self, depth: int) -> list[float]:
        parents, *children = self._masses[depth - 1]
        return [mass / max(parents, SMALLEST) for mass in children]

    def observe(
        self, levels: list[Float[Tensor, "M _ K"]], width: int, beside: Sequence[Float[Tensor, "M _"]] = ()
    ) -> None:
        """The log values of one draft's candidates, level by level; one look at the device.

        beside: those of candidates that would have been there whatever the width, by depth.
        """
        widths, depth = [w for w in self.widths if w <= width], len(levels)
        grown = [[*(x[:, :w] for x in levels[:d]), *beside[:d]] for w in widths for d in range(1, depth + 1)]
        curves = torch.stack([_curve(values) for values in grown])
        masses = _masses(levels)
        flat = torch.cat([curves.flatten(), masses.flatten()]).tolist()
        rate = RATE * min(len(levels[0]) / ENOUGH, 1) ** 0.5
        self._known = [known * (1 - rate) for known in self._known]
        for level, place in enumerate(range(curves.numel(), len(flat), masses.shape[1])):
            self._move_masses(level, flat[place : place + masses.shape[1]], rate)
            self._known[level] += len(levels[0])
        self._move(torch.tensor(flat[: curves.numel()]).view(len(widths), depth, -1), rate)

    def _move(self, fresh: Float[Tensor, "w d S"], rate: float) -> None:
        """Add what one draft was worth, and beside it what the shallower or narrower ones within it were."""
        beside = fresh[:1].expand_as(fresh).clone()
        beside[0] = torch.cat([torch.ones_like(fresh[0, :1]), fresh[0, :-1]])
        for sums, new in ((self._own, fresh), (self._beside, beside)):
            seen = sums[: new.shape[0], : new.shape[1]]
            seen *= 1 - rate
            seen += new
        ratios = torch.where(self._beside > SMALLEST, self._own / self._beside.clamp(min=SMALLEST), 1.0)
        narrowest = ratios[:1].cumprod(1)
        self._values = torch.cat([narrowest, narrowest * ratios[1:]]).tolist()

    def _rate_at(self, depth: int, rate: float) -> float:
        """The first observation of a level is taken whole, the next ones by their number."""
        return max(rate, 1 / self._times_seen[depth - 1])

    def _move_masses(self, depth: int, fresh: list[float], rate: float) -> None:
        if depth == len(self._masses):
            self._masses.append([0.0] * (1 + max(self.widths)))
            self._times_seen.append(0)
            self._known.append(0.0)
        self._times_seen[depth] += 1
        old = self._masses[depth]
        old[: len(fresh)] = _moved(old[: len(fresh)], fresh, self._rate_at(depth + 1, rate))


def _moved(old: list[float], fresh: list[float], rate: float) -> list[float]:
    return [x + rate * (y - x) for x, y in zip(old, fresh, strict=True)]


def _curve(levels: list[Float[Tensor, "M ..."]]) -> Float[Tensor, " S"]:
    """Expected draft tokens per sequence at each of SIZES, the batch's best nodes taken first."""
    num_members = len(levels[0])
    values = torch.cat([level.flatten() for level in levels])
    most = min(values.numel(), int(SIZES[-1] * num_members))
    total = values.topk(most).values.exp().cumsum(0) / num_members
    total = torch.cat([total.new_zeros(1), total])
    places = upload([size * num_members for size in SIZES], total.device, torch.float32).clamp(max=most)
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
