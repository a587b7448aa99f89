"""AcceptanceModel: how many drafts are accepted from a tree of a given width, depth and size, by recent drafts.

CalibratedAcceptance adds how accurate the model has been. AcceptanceByBatchSize keeps one for each octave of batch
sizes.

A tree drafted with width w contains the trees of every smaller width and depth: the first w' parents of each level and
their children. So one wide draft shows what all narrower ones would have proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle_ray.core.device import DeviceToHost, copy_to_device, to_device

# Drafted nodes per sequence, averaged over the batch, at which a curve is kept; in between it is interpolated linearly.
SIZES = (*(n / 8 for n in range(1, 8)), 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7, 8)
SIZES += (10, 12, 14, 16, 20, 24, 32, 48, 64)
EMA_RATE = 0.04  # weight of one sequence's draft in a moving average
MEMORY = 50  # steps that averages reach back, that turning drafts on must pay for itself in, and until the first retry
FADED = 0.1  # of the weight of what was observed before the texts changed
PRIOR_COUNT = 4.0  # observations that a prior counts as: the level above for a level, 1 for the accuracy
TINY = 1e-30  # avoids a division by 0


class AcceptanceModel:
    """Moving averages over recent drafts, for all widths and depths that a planner may choose.

    Every draft contains the shallowest and narrowest tree. A deeper tree is kept as a ratio to the tree one level
    shallower *in the same drafts*, and a wider one as a ratio to the narrowest of its depth. So plans that were drafted
    at different times, for easier and harder texts, can be compared.
    """

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths, self.max_depth = widths, max_depth
        shape = len(widths), max_depth, len(SIZES)
        self._sums, self._base = torch.zeros(shape), torch.zeros(shape)  # decaying sums over drafts
        self._values = np.zeros((*shape[:2], 1 + len(SIZES)))  # the first size is 0 nodes
        self._level_masses: list[list[float]] = []  # by level: the parents' probability, then the children's by rank
        self._num_observations: list[int] = []  # of each level
        self._children: list[list[float]] = []  # by level, recomputed after each observation
        self._counts: list[float] = []  # by level: decaying count of observed sequences
        # the last draft's values, its members, its widths, and the depths at which it would have been the same
        self._pending: tuple[DeviceToHost, int, int, int] | None = None

    def expected(self, sizes: Sequence[float]) -> np.ndarray:
        """Return [widths, depths, sizes]: accepted drafts per sequence by verified nodes per sequence.

        For widths or depths never drafted, the value of the largest one seen is used.
        """
        self.sync()
        known = (0.0, *SIZES)
        place = np.interp(sizes, known, range(len(known)))
        below = np.minimum(place.astype(int), len(SIZES) - 1)
        share = place - below
        return self._values[:, :, below] * (1 - share) + self._values[:, :, below + 1] * share

    def children(self, depth: int) -> list[float]:
        """Return, by rank, the conditional probability of the children at `depth` of the expanded nodes.

        A level with few or old observations is shrunk towards the level above it.
        """
        self.sync()
        if not self._children:
            self._children = [self._ratios(1)]
            for level in range(2, len(self._level_masses) + 1):
                known = self._counts[level - 1]
                own = zip(self._ratios(level), self._children[-1], strict=True)
                self._children.append([(known * x + PRIOR_COUNT * above) / (known + PRIOR_COUNT) for x, above in own])
        return self._children[min(depth, len(self._children)) - 1]

    def _ratios(self, depth: int) -> list[float]:
        parents, *children = self._level_masses[depth - 1]
        return [mass / max(parents, TINY) for mass in children]

    def observe(
        self,
        levels: list[Float[Tensor, "M _ K"]],
        width: int,
        extra_log_values: Sequence[Float[Tensor, "M _"]] = (),
        remaining: Int[Tensor, " M"] | None = None,
        is_stopped: bool = False,
    ) -> None:
        """Observe one draft. Its values are copied to the host and used at the next query.

        Args:
            levels: log values of the candidates, level by level.
            width: width of the draft.
            extra_log_values: log values of candidates that do not depend on the width, by depth.
            remaining: remaining tokens of each sequence; deeper nodes yield nothing.
            is_stopped: it has no more levels because they would not pay. Then a deeper plan's tree is this one, too:
                levels drafted only for easy texts would otherwise promise as much for all.
        """
        self.sync()
        widths = [w for w in self.widths if w <= width]
        curves = _curves(_mask_too_deep(remaining, levels), widths, _mask_too_deep(remaining, extra_log_values))
        copy = DeviceToHost(curves, _level_masses(levels))
        self._pending = copy, len(levels[0]), len(widths), self.max_depth - len(levels) if is_stopped else 0

    def sync(self) -> None:
        """Include the last observed draft. Its copy was started during its step and has arrived by now."""
        if self._pending is None:
            return
        (copy, num_members, num_widths, num_same), self._pending = self._pending, None
        curves, masses = copy.read()
        self._children.clear()
        rate = 1 - (1 - EMA_RATE) ** num_members
        self._counts = [known * (1 - rate) for known in self._counts]
        for level, fresh in enumerate(masses):
            self._update_level_masses(level, fresh, rate)
            self._counts[level] += num_members
        values = torch.tensor(curves).view(num_widths, len(masses), -1)
        self._update_values(torch.cat([values, values[:, -1:].expand(-1, num_same, -1)], 1), rate)

    def fade(self) -> None:
        """Let the next drafts outweigh all earlier ones, which were of other texts."""
        self.sync()
        self._sums *= FADED
        self._base *= FADED
        self._counts = [FADED * count for count in self._counts]
        self._num_observations = [0] * len(self._num_observations)
        self._children.clear()

    def _update_values(self, fresh: Float[Tensor, "w d S"], rate: float) -> None:
        """Add one draft's values, and those of the shallower or narrower trees within it."""
        base = fresh[:1].expand_as(fresh).clone()
        base[0] = torch.cat([torch.ones_like(fresh[0, :1]), fresh[0, :-1]])
        for sums, new in ((self._sums, fresh), (self._base, base)):
            seen = sums[: new.shape[0], : new.shape[1]]
            seen *= 1 - rate
            seen += new
        ratios = torch.where(self._base > TINY, self._sums / self._base.clamp(min=TINY), 1.0)
        narrowest = ratios[:1].cumprod(1)
        self._values[:, :, 1:] = torch.cat([narrowest, narrowest * ratios[1:]]).numpy()

    def _rate_at(self, depth: int, rate: float) -> float:
        """Return the weight of an observation: 1 for a level's first, then at least 1 / their number."""
        return max(rate, 1 / self._num_observations[depth - 1])

    def _update_level_masses(self, depth: int, fresh: list[float], rate: float) -> None:
        if depth == len(self._level_masses):
            self._level_masses.append([0.0] * (1 + max(self.widths)))
            self._num_observations.append(0)
            self._counts.append(0.0)
        self._num_observations[depth] += 1
        old = self._level_masses[depth]
        old[: len(fresh)] = _ema(old[: len(fresh)], fresh, self._rate_at(depth + 1, rate))


def _ema(old: list[float], fresh: list[float], rate: float) -> list[float]:
    return [x + rate * (y - x) for x, y in zip(old, fresh, strict=True)]


def _mask_too_deep(
    remaining: Int[Tensor, " M"] | None, levels: Sequence[Float[Tensor, "M ..."]]
) -> list[Float[Tensor, "M ..."]]:
    """Return log values without nodes too deep: a node needs a remaining token, and so does the target's after it."""
    if remaining is None:
        return list(levels)
    too_deep = [(remaining <= depth).view(-1, *[1] * (level.dim() - 1)) for depth, level in enumerate(levels, 1)]
    return [level.masked_fill(deep, -torch.inf) for level, deep in zip(levels, too_deep, strict=True)]


def _curves(
    levels: list[Float[Tensor, "M _ K"]], widths: list[int], extra_log_values: Sequence[Float[Tensor, "M _"]]
) -> Float[Tensor, "C S"]:
    """Return accepted drafts per sequence at each of SIZES, the batch's best nodes first, for every width and depth.

    All nodes are sorted once; nodes outside a width and depth are neither added nor counted there.
    """
    num_members, device = len(levels[0]), levels[0].device
    nodes = [*levels, *(x[:, None] for x in extra_log_values[: len(levels)])]
    values, order = torch.cat([x.flatten() for x in nodes]).sort(descending=True, stable=True)
    has = _membership(levels, nodes, widths)[:, order]
    counts, totals = has.cumsum(1, dtype=torch.int32), pad((has * values.exp()).cumsum(1), (1, 0)) / num_members
    positions = to_device([size * num_members for size in SIZES], device, torch.float32)
    below = positions.floor()

    def total(number: Float[Tensor, " S"]) -> Float[Tensor, "C S"]:
        wanted = torch.minimum(number.int(), counts[:, -1:])
        return totals.gather(1, torch.where(wanted > 0, torch.searchsorted(counts, wanted) + 1, 0))

    lower = total(below)
    return lower + (positions - below) * (total(below + 1) - lower)


def _membership(levels: list[Tensor], nodes: list[Tensor], widths: list[int]) -> Bool[Tensor, "C N"]:
    """Return which nodes a draft of each width and depth contains."""
    device, retained = levels[0].device, []
    width = torch.tensor(widths).repeat_interleave(len(levels))
    depth = torch.arange(len(levels)).repeat(len(widths))
    for i, level in enumerate(nodes):
        ranks = torch.arange(level.shape[1] if i < len(levels) else 1)
        has = (ranks < width[:, None]) & (i % len(levels) <= depth)[:, None]
        retained.append(
            copy_to_device(has, device)[:, None, :, None].expand(-1, len(level), -1, level[0, 0].numel()).flatten(1)
        )
    return torch.cat(retained, 1)


def _level_masses(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D K1"]:
    """Return, by level, the mean probability of the expanded nodes, then of their children by rank."""
    rows = []
    for depth, level in enumerate(levels):
        parents = torch.ones_like(level[:, :1, 0])
        if depth:
            parents = levels[depth - 1].flatten(1).topk(level.shape[1], dim=1).values.exp()
        rows.append(torch.cat([parents.sum()[None], level.exp().sum((0, 1))]) / len(level))
    return torch.stack(rows)


class CalibratedAcceptance:
    """An acceptance model, and how accurate it has been: accepted over expected drafts, averaged over MEMORY steps."""

    def __init__(self, model: AcceptanceModel):
        self.model = model
        self._accepted = self._expected = PRIOR_COUNT

    @property
    def accuracy(self) -> float:
        return (self._accepted + PRIOR_COUNT) / (self._expected + PRIOR_COUNT)

    def update(self, num_accepted: float, num_expected: float) -> None:
        """Observe the drafts of one step. One without drafts says nothing of them."""
        if not num_expected:
            return
        decay = 1 - 1 / MEMORY
        self._accepted = decay * self._accepted + num_accepted
        self._expected = decay * self._expected + num_expected

    def fade(self) -> None:
        """Let the next drafts outweigh all earlier ones, which were of other texts."""
        self.model.fade()
        self._accepted = FADED * self._accepted + PRIOR_COUNT
        self._expected = FADED * self._expected + PRIOR_COUNT

    def copy(self) -> CalibratedAcceptance:
        """Return a copy that is updated separately."""
        self.model.sync()
        return deepcopy(self)


def octave(size: int) -> int:
    """Return the number of the octave of a batch size: 1, 2, 3 to 4, 5 to 8, ... sequences."""
    return (size - 1).bit_length()


class AcceptanceByBatchSize:
    """One CalibratedAcceptance for 1, 2, 3 to 4, 5 to 8, ... sequences.

    The last sequences of a job differ from its first ones: long answers, hard texts and high temperatures are left.
    Their acceptance says little about the full batch of the next job. A new octave starts with a copy of the last one.

    Attributes:
        last: the one used last; at first one that belongs to no size.
    """

    def __init__(self, model: AcceptanceModel):
        self.last = CalibratedAcceptance(model)
        self._by_octave: dict[int, CalibratedAcceptance] = {}

    def of(self, size: int) -> CalibratedAcceptance:
        """Return the one for a batch size, the same object every time."""
        key = octave(size)
        if key not in self._by_octave:
            self._by_octave[key] = self.last.copy()
        self.last = self._by_octave[key]
        return self.last
