"""AcceptanceModel: how many draft tokens a tree of a given width, depth and size has lately been worth.

A tree drafted with width w holds those of every smaller width and depth: the first w' parents of each level and their
children. So one wide draft tells what all narrower ones would have offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle_ray.async_copy import DeviceToHost, copy_to_device, to_device

# Drafted nodes per sequence, on average over the batch, at which a curve is kept; between them it is taken to be
# straight; it is bent, most where a batch has fewer nodes than sequences, and worth more there than the line says.
SIZES = (*(n / 8 for n in range(1, 8)), 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7, 8)
SIZES += (10, 12, 14, 16, 20, 24, 32, 48, 64)
EMA_RATE = 0.2  # how far one observation of many sequences moves what is known; of fewer, by the root of their number
FULL_SAMPLE = 8  # sequences that make a full observation
PRIOR_COUNT = 4.0  # sequences that the likeness of two levels is worth
SMALLEST = 1e-30


class AcceptanceModel:
    """Means over recent drafts; widths and depths are the kinds of draft that a planner may ask for.

    Every draft tells of the shallowest and narrowest one. Of deeper ones it is known how many times more they were
    worth than those a level shallower *in the same drafts*, and of wider ones than the narrowest of their depth: so
    kinds that were drafted at different times, of easier and harder texts, can be compared.
    """

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        shape = len(widths), max_depth, len(SIZES)
        self._own, self._beside = torch.zeros(shape), torch.zeros(shape)  # sums over drafts, the old ones fading
        self._values = np.zeros((*shape[:2], 1 + len(SIZES)))  # at no nodes too
        self._masses: list[list[float]] = []  # of each level: its parents' values, then its children's by rank
        self._times_seen: list[int] = []  # of each level
        self._children: list[list[float]] = []  # of each level, worked out anew for each draft that is heard of
        self._known: list[float] = []  # of each level: sequences from which its masses are known, the old ones fading
        self._news: tuple[DeviceToHost, int, int] | None = (
            None  # of the last draft, its members and the widths it tells of
        )

    def expected(self, sizes: Sequence[float]) -> np.ndarray:
        """[widths, depths, sizes]: draft tokens of one sequence when its batch verifies so many nodes a sequence.

        Of a draft wider or deeper than any yet: as much as of the widest and deepest of those.
        """
        self.settle()
        known = (0.0, *SIZES)
        place = np.interp(sizes, known, range(len(known)))
        below = np.minimum(place.astype(int), len(SIZES) - 1)
        share = place - below
        return self._values[:, :, below] * (1 - share) + self._values[:, :, below + 1] * share

    def children(self, depth: int) -> list[float]:
        """By rank: conditional probability of the children, at `depth`, of the nodes that are worth any.

        A level of which little is known, or has been for long, is taken to be like the one above it.
        """
        self.settle()
        if not self._children:
            self._children = [self._ratios(1)]
            for level in range(2, len(self._masses) + 1):
                known = self._known[level - 1]
                own = zip(self._ratios(level), self._children[-1], strict=True)
                self._children.append([(known * x + PRIOR_COUNT * above) / (known + PRIOR_COUNT) for x, above in own])
        return self._children[min(depth, len(self._children)) - 1]

    def _ratios(self, depth: int) -> list[float]:
        parents, *children = self._masses[depth - 1]
        return [mass / max(parents, SMALLEST) for mass in children]

    def observe(
        self,
        levels: list[Float[Tensor, "M _ K"]],
        width: int,
        beside: Sequence[Float[Tensor, "M _"]] = (),
        rooms: Int[Tensor, " M"] | None = None,
    ) -> None:
        """The log values of one draft's candidates, level by level; heard of when something is asked next.

        beside: those of candidates that would have been there whatever the width, by depth. rooms: tokens that each
        sequence may still produce: what is deeper brings in nothing, whatever its parents' children are worth.
        """
        self.settle()
        widths = [w for w in self.widths if w <= width]
        curves = _curves(_within(rooms, levels), widths, _within(rooms, beside))
        self._news = DeviceToHost(curves, _masses(levels)), len(levels[0]), len(widths)

    def settle(self) -> None:
        """Hear what the last draft was worth: it was sent during its step, and by the end of that it is here."""
        if self._news is None:
            return
        (copy, num_members, num_widths), self._news = self._news, None
        curves, masses = copy.read()
        self._children.clear()
        rate = EMA_RATE * min(num_members / FULL_SAMPLE, 1) ** 0.5
        self._known = [known * (1 - rate) for known in self._known]
        for level, fresh in enumerate(masses):
            self._move_masses(level, fresh, rate)
            self._known[level] += num_members
        self._move(torch.tensor(curves).view(num_widths, len(masses), -1), rate)

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
        self._values[:, :, 1:] = torch.cat([narrowest, narrowest * ratios[1:]]).numpy()

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


def _within(rooms: Int[Tensor, " M"] | None, levels: Sequence[Float[Tensor, "M ..."]]) -> list[Float[Tensor, "M ..."]]:
    """Log values by depth; a node needs room for itself and the target's own token after it."""
    if rooms is None:
        return list(levels)
    too_deep = [(rooms <= depth).view(-1, *[1] * (level.dim() - 1)) for depth, level in enumerate(levels, 1)]
    return [level.masked_fill(deep, -torch.inf) for level, deep in zip(levels, too_deep, strict=True)]


def _curves(
    levels: list[Float[Tensor, "M _ K"]], widths: list[int], beside: Sequence[Float[Tensor, "M _"]]
) -> Float[Tensor, "C S"]:
    """Expected draft tokens per sequence at each of SIZES, the batch's best nodes first, of every width and depth.

    All nodes are sorted once; those that a kind of draft lacks are neither added nor counted there.
    """
    num_members, device = len(levels[0]), levels[0].device
    nodes = [*levels, *(x[:, None] for x in beside[: len(levels)])]
    values, order = torch.cat([x.flatten() for x in nodes]).sort(descending=True, stable=True)
    has = _held(levels, nodes, widths)[:, order]
    counts, totals = has.cumsum(1, dtype=torch.int32), pad((has * values.exp()).cumsum(1), (1, 0)) / num_members
    places = to_device([size * num_members for size in SIZES], device, torch.float32)
    below = places.floor()

    def total(number: Float[Tensor, " S"]) -> Float[Tensor, "C S"]:
        wanted = torch.minimum(number.int(), counts[:, -1:])
        return totals.gather(1, torch.where(wanted > 0, torch.searchsorted(counts, wanted) + 1, 0))

    lower = total(below)
    return lower + (places - below) * (total(below + 1) - lower)


def _held(levels: list[Tensor], nodes: list[Tensor], widths: list[int]) -> Bool[Tensor, "C N"]:
    """Which of the nodes, level by level and then beside, a draft of each width and depth would hold."""
    device, held = levels[0].device, []
    width = torch.tensor(widths).repeat_interleave(len(levels))
    depth = torch.arange(len(levels)).repeat(len(widths))
    for i, level in enumerate(nodes):
        ranks = torch.arange(level.shape[1] if i < len(levels) else 1)
        has = (ranks < width[:, None]) & (i % len(levels) <= depth)[:, None]
        held.append(
            copy_to_device(has, device)[:, None, :, None].expand(-1, len(level), -1, level[0, 0].numel()).flatten(1)
        )
    return torch.cat(held, 1)


def _masses(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D K1"]:
    """Of each level and sequence: the values of the nodes that were given children, then of their children by rank."""
    rows = []
    for depth, level in enumerate(levels):
        parents = torch.ones_like(level[:, :1, 0])
        if depth:
            parents = levels[depth - 1].flatten(1).topk(level.shape[1], dim=1).values.exp()
        rows.append(torch.cat([parents.sum()[None], level.exp().sum((0, 1))]) / len(level))
    return torch.stack(rows)
