"""AcceptanceModel: predict from recent drafts how many tokens of a tree of a given width, depth and size are accepted.

A tree drafted with width w contains the trees of every smaller width and depth: the first w'
parents of each level and their children. So one wide draft shows what all narrower ones would have
proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle_ray.core.device import DeviceToHost, copy_to_device, to_device

# Drafted nodes per sequence, averaged over the batch, at which a curve is kept; in between it is
# interpolated linearly.
GRID_SIZES = tuple(n / 8 for n in range(1, 8))
GRID_SIZES += (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7, 8)
GRID_SIZES += (10, 12, 14, 16, 20, 24, 32, 48, 64)
EMA_RATE = 0.04  # weight of one sequence's draft in a moving average
MEMORY = 50  # steps that averages reach back, that turning drafts on must pay for itself in, and until the first retry
FADED = 0.1  # share of its weight that an observation keeps when the texts change
# Observations that a prior counts as: the level above for a level, 1 for the accuracy.
PRIOR_COUNT = 4.0
MAX_SUM = 1e6  # the largest decaying sum or count of drafts
MIN_DIVISOR = 1e-30  # avoids a division by 0


class AcceptanceModel:
    """Moving averages of expected accepted tokens over recent drafts, for all widths and depths
    that a planner may choose.

    Every draft contains the shallowest and narrowest tree. A deeper tree is stored as a ratio to
    the tree one level shallower *in the same drafts*, and a wider one as a ratio to the narrowest
    of its depth. So plans that were drafted at different times, for easier and harder texts, can be
    compared.
    """

    def __init__(self, widths: tuple[int, ...], max_depth: int):
        self.widths = widths
        self.max_depth = max_depth
        num_widths = len(widths)
        num_sizes = len(GRID_SIZES)
        # Decaying sums over drafts.
        self._sums = torch.zeros(num_widths, max_depth, num_sizes)
        self._base = torch.zeros(num_widths, max_depth, num_sizes)
        # The first size is 0 nodes.
        self._values = np.zeros((num_widths, max_depth, 1 + num_sizes))
        # By level: the parents' probability, then the children's by rank.
        self._level_masses: list[list[float]] = []
        # By level: the number of drafts that had it.
        self._num_observations: list[int] = []
        # By level, recomputed after each observation.
        self._children: list[list[float]] = []
        # By level: decaying count of observed sequences.
        self._counts: list[float] = []
        # The last draft's values, its members, its widths, and the depths at which it would have
        # been the same.
        self._pending: tuple[DeviceToHost, int, int, int] | None = None

    def expected(self, sizes: Sequence[float]) -> np.ndarray:
        """Return expected accepted tokens per sequence, [widths, depths, sizes], for given numbers of verified nodes.

        Widths and depths that were never drafted get the value of the largest one that was.
        """
        self.sync()
        known_sizes = (0.0, *GRID_SIZES)
        indices = range(len(known_sizes))
        place = np.interp(sizes, known_sizes, indices)

        # Interpolate between the known sizes below and above each size.
        last_pair = len(GRID_SIZES) - 1
        below = place.astype(int)
        below = np.minimum(below, last_pair)
        above = below + 1
        share = place - below
        lower = self._values[:, :, below]
        upper = self._values[:, :, above]
        return lower * (1 - share) + upper * share

    def children(self, depth: int) -> list[float]:
        """Return the mean conditional probability of expanded nodes' children at `depth`, by the children's rank."""
        by_depth = self.children_by_depth
        known_depth = min(depth, len(by_depth))
        return by_depth[known_depth - 1]

    @property
    def children_by_depth(self) -> list[list[float]]:
        """Return `children` for each depth that has been drafted; deeper levels resemble the last one.

        A level with few or old observations is shrunk towards the level above it.
        """
        self.sync()
        if self._children:
            return self._children

        children = self._ratios(1)
        self._children = [children]
        num_levels = len(self._level_masses)
        for depth in range(2, num_levels + 1):
            children = self._shrunk(depth, children)
            self._children.append(children)
        return self._children

    def _shrunk(self, depth: int, above: list[float]) -> list[float]:
        """Return a level's children, shrunk towards those of the level above."""
        known = self._counts[depth - 1]
        total = known + PRIOR_COUNT
        ratios = self._ratios(depth)
        shrunk = []
        for own, prior in zip(ratios, above, strict=True):
            weighted = known * own + PRIOR_COUNT * prior
            shrunk.append(weighted / total)
        return shrunk

    def _ratios(self, depth: int) -> list[float]:
        """Return, by rank, the conditional probability of a level's children."""
        parents, *children = self._level_masses[depth - 1]
        divisor = max(parents, MIN_DIVISOR)
        return [mass / divisor for mass in children]

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
            extra_log_values: log values, by depth, of candidates that a narrower draft would also
                have.
            remaining: remaining tokens of each sequence; nodes deeper than that yield nothing.
            is_stopped: whether drafting stopped early because a further level would not pay. Then
                this tree also counts for deeper plans; otherwise deep levels would be observed on
                easy texts only.
        """
        self.sync()
        widths = [w for w in self.widths if w <= width]
        inside = _mask_too_deep(remaining, levels)
        extra_inside = _mask_too_deep(remaining, extra_log_values)
        curves = _curves(inside, widths, extra_inside)
        masses = _level_masses(levels)
        copy = DeviceToHost(curves, masses)

        num_members = len(levels[0])
        num_same = 0
        if is_stopped:
            num_same = self.max_depth - len(levels)
        self._pending = (copy, num_members, len(widths), num_same)

    def sync(self) -> None:
        """Include the last observed draft, whose copy to the host was started during its step."""
        if self._pending is None:
            return
        copy, num_members, num_widths, num_same = self._pending
        self._pending = None
        curves, masses = copy.read()
        self._children.clear()

        # A draft of many sequences counts as that many observations.
        rate = 1 - (1 - EMA_RATE) ** num_members
        self._counts = [known * (1 - rate) for known in self._counts]
        for level, fresh in enumerate(masses):
            self._update_level_masses(level, fresh, rate)
            self._counts[level] += num_members

        # A draft that was stopped has the values of its last level at all deeper ones.
        num_levels = len(masses)
        values = torch.tensor(curves)
        values = values.view(num_widths, num_levels, -1)
        last = values[:, -1:]
        deeper = last.expand(-1, num_same, -1)
        values = torch.cat([values, deeper], 1)
        self._update_values(values, rate)

    def fade(self) -> None:
        """Reduce the weight of all earlier drafts, because the texts have changed."""
        self.sync()
        self._sums *= FADED
        self._base *= FADED
        self._counts = [FADED * count for count in self._counts]
        self._num_observations = [0] * len(self._num_observations)
        self._children.clear()

    def state(self) -> dict[str, Tensor]:
        """Return the observations, which `load_state` accepts."""
        self.sync()
        return {
            "widths": torch.tensor(self.widths),
            "sums": self._sums.clone(),
            "base": self._base.clone(),
            "masses": torch.tensor(self._level_masses),
            "num_observations": torch.tensor(self._num_observations),
            "counts": torch.tensor(self._counts),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a model with these widths and depths, or with more of them.

        Raises ValueError if some are missing, or if a value is impossible.
        """
        _check_state(state)
        widths = state["widths"].tolist()
        index_of = {width: i for i, width in enumerate(widths)}
        lacking = [width for width in self.widths if width not in index_of]
        max_depth = state["sums"].shape[1]
        if lacking or max_depth < self.max_depth:
            raise ValueError(f"it has no widths {lacking}, or fewer levels than {self.max_depth}")
        self.sync()

        # Other widths and depths are left out.
        own = [index_of[width] for width in self.widths]
        sums = state["sums"][own, : self.max_depth]
        sums = sums.float()
        base = state["base"][own, : self.max_depth]
        base = base.float()
        values = _values_of(sums, base)
        is_finite = values.isfinite().all()
        max_accepted = self.max_depth + 1
        if not is_finite or values.max() > max_accepted:
            raise ValueError(f"it promises more accepted tokens than {self.max_depth} levels have")
        self._sums.copy_(sums)
        self._base.copy_(base)

        # The parents' probability and those of as many children as the widest draft has.
        num_masses = 1 + max(self.widths)
        masses = state["masses"][: self.max_depth, :num_masses]
        self._level_masses = masses.tolist()

        num_levels = len(masses)
        num_observations = state["num_observations"][:num_levels]
        counts = state["counts"][:num_levels]
        self._num_observations = num_observations.long().tolist()
        self._counts = counts.tolist()
        self._children.clear()
        self._values[:, :, 1:] = values.numpy()

    def _update_values(self, fresh: Float[Tensor, "w d S"], rate: float) -> None:
        """Add one draft's values, and those of the shallower or narrower trees within it."""
        num_widths, num_depths, _ = fresh.shape

        # A wider tree's base is the narrowest one; that one's is the tree a level shallower.
        narrowest = fresh[:1]
        base = narrowest.expand_as(fresh)
        base = base.clone()
        base[0, 0] = 1.0
        base[0, 1:] = fresh[0, :-1]

        sums = self._sums[:num_widths, :num_depths]
        sums *= 1 - rate
        sums += fresh
        bases = self._base[:num_widths, :num_depths]
        bases *= 1 - rate
        bases += base

        values = _values_of(self._sums, self._base)
        self._values[:, :, 1:] = values.numpy()

    def _rate_at(self, depth: int, rate: float) -> float:
        """Return the weight of a new observation: 1 for a level's first, 1 / n for its n-th, but at least `rate`."""
        num_observations = self._num_observations[depth - 1]
        return max(rate, 1 / num_observations)

    def _update_level_masses(self, depth: int, fresh: list[float], rate: float) -> None:
        """Add one draft's masses of the level below `depth`."""
        if depth == len(self._level_masses):
            num_masses = 1 + max(self.widths)
            self._level_masses.append([0.0] * num_masses)
            self._num_observations.append(0)
            self._counts.append(0.0)
        self._num_observations[depth] += 1

        # A narrow draft shows only the first children.
        num_shown = len(fresh)
        masses = self._level_masses[depth]
        known = masses[:num_shown]
        rate = self._rate_at(depth + 1, rate)
        masses[:num_shown] = _ema(known, fresh, rate)


def _values_of(
    sums: Float[Tensor, "W D S"], base: Float[Tensor, "W D S"]
) -> Float[Tensor, "W D S"]:
    """Return the accepted drafts of each width and depth, from ratios to the next narrower or shallower tree."""
    is_known = base > MIN_DIVISOR
    divisor = base.clamp(min=MIN_DIVISOR)
    ratios = sums / divisor
    ratios = torch.where(is_known, ratios, 1.0)

    # By depth for the narrowest tree, then by width.
    narrowest = ratios[:1]
    narrowest = narrowest.cumprod(1)
    wider = narrowest * ratios[1:]
    return torch.cat([narrowest, wider])


def _check_state(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for tensors that are no AcceptanceModel's state."""
    num_widths = len(state["widths"])
    max_depth = state["sums"].shape[1:2]
    num_levels = len(state["counts"])
    if not num_widths or not num_levels:
        raise ValueError("nothing was observed")
    max_width = int(state["widths"].max())
    num_masses = 1 + max_width
    by_size = (num_widths, *max_depth, len(GRID_SIZES))
    shapes = {
        "sums": by_size,
        "base": by_size,
        "masses": (num_levels, num_masses),
        "num_observations": (num_levels,),
        "counts": (num_levels,),
    }
    for name, shape in shapes.items():
        tensor = state[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)} and not {list(shape)}")
        is_finite = tensor.isfinite().all()
        is_negative = tensor < 0
        if not is_finite or is_negative.any():
            raise ValueError(f"{name} has a number that is negative or not finite")
        if tensor.max() > MAX_SUM:
            raise ValueError(f"{name} has a number that no decaying sum reaches")


def _ema(old: list[float], fresh: list[float], rate: float) -> list[float]:
    """Return moving averages after one more observation."""
    averages = []
    for average, value in zip(old, fresh, strict=True):
        change = value - average
        averages.append(average + rate * change)
    return averages


def _mask_too_deep(
    remaining: Int[Tensor, " M"] | None, levels: Sequence[Float[Tensor, "M ..."]]
) -> list[Float[Tensor, "M ..."]]:
    """Return log values without nodes too deep: a node needs a remaining token, and so does the target's after it."""
    if remaining is None:
        return list(levels)
    masked = []
    for depth, level in enumerate(levels, 1):
        num_other_dims = level.dim() - 1
        other_dims = [1] * num_other_dims
        is_too_deep = remaining <= depth
        is_too_deep = is_too_deep.view(-1, *other_dims)
        level = level.masked_fill(is_too_deep, -torch.inf)
        masked.append(level)
    return masked


def _curves(
    levels: list[Float[Tensor, "M _ K"]],
    widths: list[int],
    extra_log_values: Sequence[Float[Tensor, "M _"]],
) -> Float[Tensor, "C S"]:
    """Return accepted drafts per sequence for every width and depth, at each of GRID_SIZES, the best nodes first.

    All nodes are sorted once; nodes outside a width and depth are neither added nor counted there.
    """
    num_members = len(levels[0])
    num_levels = len(levels)
    extra = [values[:, None] for values in extra_log_values[:num_levels]]
    nodes = [*levels, *extra]
    all_values = torch.cat([level.flatten() for level in nodes])
    values, order = all_values.sort(descending=True, stable=True)

    # For each width and depth: how many of the first n nodes it contains, and their summed values.
    has = _membership(levels, nodes, widths)
    has = has[:, order]
    counts = has.cumsum(1, dtype=torch.int32)
    yields = has * values.exp()
    sums = yields.cumsum(1)
    sums = pad(sums, (1, 0))
    totals = sums / num_members

    def total(number: Float[Tensor, " S"]) -> Float[Tensor, "C S"]:
        """Return the summed values of the best `number` nodes, or of all if there are fewer."""
        num_all = counts[:, -1:]
        wanted = torch.minimum(number.int(), num_all)
        place = torch.searchsorted(counts, wanted)
        place = place + 1
        place = torch.where(wanted > 0, place, 0)
        return totals.gather(1, place)

    # Interpolate between whole numbers of nodes.
    device = levels[0].device
    wanted_sizes = [size * num_members for size in GRID_SIZES]
    positions = to_device(wanted_sizes, device, torch.float32)
    below = positions.floor()
    lower = total(below)
    upper = total(below + 1)
    share = positions - below
    growth = upper - lower
    return lower + share * growth


def _membership(
    levels: list[Tensor], nodes: list[Tensor], widths: list[int]
) -> Bool[Tensor, "C N"]:
    """Return which nodes a draft of each width and depth contains."""
    device = levels[0].device
    num_levels = len(levels)

    # A line for each width and depth.
    width = torch.tensor(widths)
    width = width.repeat_interleave(num_levels)
    depth = torch.arange(num_levels)
    depth = depth.repeat(len(widths))
    retained = []
    for i, level in enumerate(nodes):
        # Nodes past the levels are extra ones, which every width contains.
        num_parents = 1
        if i < num_levels:
            num_parents = level.shape[1]
        parents = torch.arange(num_parents)
        is_wide_enough = parents < width[:, None]
        is_deep_enough = i % num_levels <= depth
        has = is_wide_enough & is_deep_enough[:, None]
        has = copy_to_device(has, device)

        # All sequences and all children of a parent have equal bits.
        num_children = level[0, 0].numel()
        by_node = has[:, None, :, None]
        by_node = by_node.expand(-1, len(level), -1, num_children)
        by_node = by_node.flatten(1)
        retained.append(by_node)
    return torch.cat(retained, 1)


def _level_masses(levels: list[Float[Tensor, "M _ K"]]) -> Float[Tensor, "D K1"]:
    """Return, by level, the mean probability of the expanded nodes, then of their children by rank."""
    rows = []
    for depth, level in enumerate(levels):
        parents = torch.ones_like(level[:, :1, 0])
        if depth:
            # The nodes of the level above with the best values were expanded.
            num_parents = level.shape[1]
            above = levels[depth - 1].flatten(1)
            best = above.topk(num_parents, dim=1)
            parents = best.values.exp()
        children = level.exp()
        children = children.sum((0, 1))
        total = parents.sum()[None]
        row = torch.cat([total, children])
        row = row / len(level)
        rows.append(row)
    return torch.stack(rows)
