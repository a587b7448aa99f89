"""Calibration: map a drafter's probability of a child to the rate at which the target samples it.

A logistic map per level, ``sigmoid(a * logit(p) + b)``, on *conditional* probabilities (of a child,
given that its parent is accepted), plus c for the first child of a node: targets sample the
drafter's first choice more often than a second choice with equal p (measured: rates of 0.35 and
0.13 for p = 0.16). The result is at most 1, rises in p, and c is at least 0. So siblings keep their
order, and products along paths never rise. Sampled rows have maps of their own, since p means
something else there. A head that estimates acceptance itself (DSpark) gives one estimate for all
children of a node. Its log-odds are added with a further weight d, which starts at 0.

The budget does not bias the labels: once a node is reached, the target's sample tells for *all* its
drafted children which one it was, whether they were verified or not. Only children of nodes that
were never reached stay unobserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from eagle_ray.kernels import calibration_ops
from eagle_ray.tree.expand import Frontier

LARGEST_LOGIT = 16.0
NUM_ROW_KINDS = 2  # 0: greedy rows, 1: sampled rows


class Calibration:
    """Logistic calibration of a drafter's probabilities: slope, offset and first-child term per level and kind of row.

    It starts as the identity.

    Args:
        num_signals: 1 if `apply` and `update` are given the drafter's own estimate of acceptance.
    """

    def __init__(self, levels: int, device: torch.device | str = "cpu", num_signals: int = 0):
        self.fit = OnlineFit(
            [1.0, 0.0, 0.0, *[0.0] * num_signals],
            [0.1, -12.0, 0.0, *[0.0] * num_signals],
            [6.0, 12.0, 6.0, *[6.0] * num_signals],
            levels=levels,
            sets=NUM_ROW_KINDS,
            precision=10.0,
            device=device,
        )

    def apply(
        self,
        level: int | Int[Tensor, " 1"],
        kinds: Int[Tensor, " B"],
        log_probs: Float[Tensor, "B F K"],
        confidence: Float[Tensor, "B F"] | None = None,
    ) -> Float[Tensor, "B F K"]:
        """Return the calibrated log-probabilities of children given their parents; padding (-inf) stays -inf.

        Args:
            kinds: 1 for sampled rows, else 0.
            confidence: log-odds that a child of each node is accepted.
        """
        slope, offset, first, *signals = self.fit.at(level)[kinds][:, :, None, None].unbind(1)
        mapped = slope * logit(log_probs) + offset
        mapped[..., :1] += first
        if confidence is not None:
            mapped += signals[0] * bounded(confidence)[:, :, None]
        return logsigmoid(mapped).masked_fill(log_probs == -torch.inf, -torch.inf)

    def update(
        self,
        kinds: Int[Tensor, " B"],
        log_probs: Float[Tensor, "L B K"],
        picked: Bool[Tensor, "L B K"],
        reached: Bool[Tensor, "L B"],
        confidence: Float[Tensor, "L B"] | None = None,
    ) -> None:
        """Fit to what the target sampled after one node per row on each of the first L levels.

        Args:
            log_probs, confidence: as passed to `apply`.
            picked: true for the child that has the target's token.
            reached: whether the target's path contains the node; other rows are ignored.
        """
        levels = slice(len(log_probs))
        one = torch.ones_like(log_probs)
        first = torch.zeros_like(log_probs)
        first[..., :1] = 1.0
        signals = [] if confidence is None else [bounded(confidence)[:, :, None].expand_as(one)]
        x = torch.stack([logit(log_probs), one, first, *signals], 3)
        predicted = torch.sigmoid((x * self.fit.parameters[levels, kinds][:, :, None]).sum(3))
        of_kind = torch.stack(
            [reached & (kinds == kind) for kind in range(NUM_ROW_KINDS)], 1
        ).float()
        real = (log_probs > -torch.inf).float()
        gradient = torch.einsum("lbk,lbkp->lbp", real * (picked.float() - predicted), x)
        fisher = torch.einsum("lbk,lbkp,lbkq->lbpq", real * predicted * (1 - predicted), x, x)
        self.fit.update(
            of_kind @ gradient, torch.einsum("lsb,lbpq->lspq", of_kind, fisher), of_kind.sum(2)
        )

    def observe(
        self, offered: Proposals, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]
    ) -> None:
        """Fit to one step: which of the proposed children the target sampled, along the accepted path.

        Args:
            offered: the step's proposals, on no more levels than there are picks.
            picks: the target's tokens, of which the first num_accepted + 1 are known.
        """
        self.update_on_path(offered, target_path(offered.levels, picks, num_accepted), picks)

    def update_on_path(
        self, offered: Proposals, path: TargetPath, picks: Int[Tensor, "B D"]
    ) -> None:
        """Fit to one step like `observe`, if the target's path through the proposals is already known.

        Args:
            picks: the target's tokens.
        """
        row = torch.arange(len(picks), device=picks.device)
        on_path = list(zip(offered.levels, path.nodes, strict=False))
        scores = torch.stack([level.scores[row, node] for level, node in on_path])
        tokens = torch.stack([level.tokens[row, node] for level, node in on_path])
        picked = tokens == picks.T[: len(on_path), :, None]
        estimates = [
            level.confidence[row, node] for level, node in on_path if level.confidence is not None
        ]
        signals = [torch.stack(estimates)] if estimates else []
        self.update(offered.kinds, scores, picked, path.reached, *signals)


class HostCalibration(Calibration):
    """Calibration for a CPU whose update is one compiled call. Made by `calibration_for`."""

    def observe(
        self, offered: Proposals, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]
    ) -> None:
        fit = self.fit
        tensors = calibration_ops.FitTensors(
            fit.parameters,
            fit.information,
            fit.prior,
            fit.low,
            fit.high,
            fit.memory,
            fit.largest_step,
        )
        children = []
        for level in offered.levels:
            frontier = level.frontier
            nodes = (None, None) if frontier is None else (frontier.tokens, frontier.parent_rows)
            children.append(calibration_ops.OfferedChildren(level.tokens, level.scores, *nodes))
        calibration_ops.update(tensors, children, offered.kinds, picks, num_accepted)


def calibration_for(levels: int, device: torch.device | str, num_signals: int = 0) -> Calibration:
    """Return the implementation of Calibration that updates fastest on a device. Arguments as for Calibration."""
    if calibration_ops.available(torch.device(device)) and not num_signals:
        return HostCalibration(levels, device)
    return Calibration(levels, device, num_signals)


def logit(log_probs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return log(p / (1 - p)) from log p, clamped to +-LARGEST_LOGIT."""
    log_probs = log_probs.clamp(max=-1e-7)
    return (log_probs - torch.log(-torch.expm1(log_probs))).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def bounded(log_odds: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return log-odds of a drafter in fp32, clamped to +-LARGEST_LOGIT; 0 where a head overflows."""
    return log_odds.float().nan_to_num(nan=0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


WARMUP_STEPS = 30  # steps that all update the calibration
STEPS_PER_UPDATE = 4  # steps between later updates, or as many as levels: an update takes 1 to 5 ms
GPU_UPDATE_INTERVAL = 16  # likewise on a GPU, where its 50 small launches take about a tenth of a step, unless recorded


@dataclass(frozen=True, slots=True)
class ProposalLevel:
    """One level of a draft.

    Attributes:
        frontier: the nodes whose children were proposed; None for the roots.
        scores: uncalibrated log-probabilities; -inf is padding.
        confidence: the drafter's own log-odds that a child of each node is accepted, if it has any.
    """

    frontier: Frontier | None
    tokens: Int[Tensor, "B F K"]
    scores: Float[Tensor, "B F K"]
    confidence: Float[Tensor, "B F"] | None = None


@dataclass(frozen=True, slots=True)
class Proposals:
    """One step's proposals, level by level.

    Attributes:
        kinds: 1 for sampled rows, 0 for greedy ones.
    """

    kinds: Int[Tensor, " B"]
    levels: list[ProposalLevel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TargetPath:
    """The nodes of L levels on the path of the target's tokens.

    Attributes:
        nodes: indices in each level's frontier.
        reached: the path contains a node of this level, and the target's token after it is known.
    """

    nodes: Int[Tensor, "L B"]
    reached: Bool[Tensor, "L B"]


class ProposalRecorder:
    """The children proposed in one step, level by level, and the calibration that learns which were accepted.

        offers.begin(kinds)
        log_probs = offers.add(None, tokens, scores)         # level 1, calibrated
        log_probs = offers.add(frontier, tokens, scores)     # each further level
        offers.update(picks, num_accepted)                   # learn from the target's tokens

    A step's proposals are kept until its verify pass.

    Args:
        calibration: corrects scores and learns from the target's tokens; None leaves scores as they
            are.

    Attributes:
        offered: what `update` learns from. A caller may keep it and set it again.
        interval: steps between updates after the warm-up; None is the device's.
    """

    offered: Proposals

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration
        self.interval: int | None = None
        self._num_taught = 0

    def begin(self, kinds: Int[Tensor, " B"]) -> None:
        """Start a new step.

        Args:
            kinds: 1 for sampled rows, 0 for greedy ones.
        """
        self.offered = Proposals(kinds)

    def reset(self) -> None:
        """Discard everything learned."""
        self._num_taught = 0
        if self.calibration is not None:
            self.calibration.fit.reset()

    def skip_warm_up(self) -> None:
        """Leave out the steps in which every verify pass updates the calibration: it was loaded and
        needs no warm-up."""
        self._num_taught = max(self._num_taught, WARMUP_STEPS)

    def add(
        self,
        frontier: Frontier | None,
        tokens: Int[Tensor, "B F K"],
        scores: Float[Tensor, "B F K"],
        confidence: Float[Tensor, "B F"] | None = None,
    ) -> Float[Tensor, "B F K"]:
        """Record the children proposed on the next level. Return their calibrated log-probabilities
        given their parents.

        Args:
            frontier: the nodes whose children they are; None for the roots.
            confidence: the drafter's own log-odds that a child of each node is accepted, for a
                calibration with a signal.
        """
        level = len(self.offered.levels)
        self.offered.levels.append(ProposalLevel(frontier, tokens, scores, confidence))
        if self.calibration is None:
            return scores
        signals = [] if confidence is None else [confidence]
        return self.calibration.apply(level, self.offered.kinds, scores, *signals)

    def update(
        self,
        picks: Int[Tensor, "B D"],
        num_accepted: Int[Tensor, " B"],
        is_learned: bool = False,
        needs_path: bool = True,
    ) -> TargetPath | None:
        """Count a verified step, and update the calibration of all levels if an update is due.

        Return the target's path, or None if no update is due.

        Args:
            picks: the target's tokens, of which the first num_accepted + 1 are known.
            is_learned: the verify pass itself has updated the calibration.
            needs_path: False returns no path.
        """
        self._num_taught += 1
        levels = self.offered.levels[: picks.shape[1]]
        if not is_due(
            self._num_taught, len(levels), self.interval or update_interval(picks.device)
        ):
            return None
        if self.calibration is not None and not is_learned:
            offered = Proposals(self.offered.kinds, levels)
            self.calibration.observe(offered, picks, num_accepted)
        return target_path(levels, picks, num_accepted) if needs_path else None


def target_path(
    levels: list[ProposalLevel],
    picks: Int[Tensor, "B D"],
    num_accepted: Int[Tensor, " B"],
    num_offered: Int[Tensor, " L"] | None = None,
) -> TargetPath:
    """Return, for each level, the drafted node on the target's path: the node whose child the target sampled next.

    Args:
        num_offered: number of nodes per level that were expanded, on the device; these are the
            first nodes of the level. None is all.
    """
    nodes = [torch.zeros_like(num_accepted)]
    on_path = [num_accepted >= 0]
    for depth, level in enumerate(levels[1:]):
        frontier = level.frontier
        assert frontier is not None, "only the first level's parents are the roots"
        matches = (frontier.parent_rows == nodes[-1][:, None]) & (
            frontier.tokens == picks[:, depth, None]
        )
        if num_offered is not None:
            matches = matches & (
                torch.arange(matches.shape[1], device=picks.device) < num_offered[depth + 1]
            )
        nodes.append(matches.long().argmax(1))
        on_path.append(on_path[-1] & matches.any(1))
    depths = torch.arange(len(levels), device=picks.device)
    reached = torch.stack(on_path) & (num_accepted >= depths[:, None])
    if num_offered is not None:
        reached = reached & (num_offered[: len(levels), None] > 0)
    return TargetPath(torch.stack(nodes), reached)


def update_interval(device: torch.device) -> int:
    """Return how many steps lie between two updates of the calibration on a device, once the warm-up is over."""
    return GPU_UPDATE_INTERVAL if device.type == "cuda" else STEPS_PER_UPDATE


def is_due(step: int, num_levels: int, interval: int = STEPS_PER_UPDATE) -> bool:
    """Return whether the calibration is updated in this step: in each step of the warm-up, then every `interval` steps.

    Args:
        step: number of the step, from 1.
        num_levels: levels that were drafted; more levels than `interval` are updated every
            num_levels steps.
    """
    if step <= WARMUP_STEPS or interval == 1:
        return num_levels > 0
    return num_levels > 0 and step % max(num_levels, interval) == 0


CALIBRATION_MEMORY = 2000  # picks after which a pick counts 1/e
LARGEST_STEP = 0.5
# Information of CALIBRATION_MEMORY picks of some children each, with features up to
# LARGEST_LOGIT.
MAX_INFORMATION = 1e7
SMALL_INFORMATION = 1.0  # by which rounding may make a sum of information negative


class OnlineFit:
    """Fit S sets of P parameters for each of L levels to a stream of samples, by Newton steps on the device.

    Every update adds the gradient of the new samples' log-likelihood and its Fisher information to
    decaying sums, so the fit follows the text. The host reads nothing.

    The prior of a level is the fit of the level above it, with the weight `precision`. So a level
    without samples moves with the one above. The more samples it has, the less it follows.

    Args:
        start: prior of the first level's parameters.
        low, high: bounds of each parameter.
        precision: weight of the prior, as Fisher information; it keeps the first steps small and
            their equations solvable.

    Attributes:
        parameters, information: by level and set.
        prior: the prior's part of the equations of a Newton step.
        memory, largest_step: CALIBRATION_MEMORY and LARGEST_STEP, which kernels read from here.
    """

    def __init__(
        self,
        start: list[float],
        low: list[float],
        high: list[float],
        *,
        levels: int,
        sets: int,
        precision: float,
        device: torch.device | str,
    ):
        self._start = torch.tensor(start, device=device)
        self.low = torch.tensor(low, device=device)
        self.high = torch.tensor(high, device=device)
        self.precision = precision
        self.memory = float(CALIBRATION_MEMORY)
        self.largest_step = LARGEST_STEP
        self.prior = _prior(levels, sets, precision * torch.eye(len(start), device=device))
        self.parameters = self._start.repeat(levels, sets, 1)
        self.information = torch.zeros(levels, sets, len(start), len(start), device=device)

    def at(self, level: int | Int[Tensor, " 1"]) -> Float[Tensor, "S P"]:
        """Return one level's parameters, without a sync if the level is a tensor on the device."""
        return (
            self.parameters[level]
            if isinstance(level, int)
            else self.parameters.index_select(0, level)[0]
        )

    def state(self) -> dict[str, Tensor]:
        """Return the learned state, which `load_state` of a fit of equal shape accepts."""
        return {name: own.cpu().clone() for name, own in self._parts()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state. Raises ValueError if its shapes differ, or if its numbers are not finite
        or no Fisher information."""
        parts = dict(self._parts())
        for name, own in parts.items():
            if (
                name not in state
                or state[name].shape != own.shape
                or not state[name].isfinite().all()
            ):
                raise ValueError(f"{name} is not a finite tensor of shape {list(own.shape)}")
        information = state["information"].double()
        if (
            information.abs().max() > MAX_INFORMATION
            or torch.linalg.eigvalsh(information).min() < -SMALL_INFORMATION
        ):
            raise ValueError("information is no sum of Fisher information of samples")
        for name, own in parts.items():
            own.copy_(state[name])
        self.parameters.clamp_(self.low, self.high)

    def _parts(self) -> list[tuple[str, Tensor]]:
        return [("parameters", self.parameters), ("information", self.information)]

    def reset(self) -> None:
        """Set all parameters to their start and forget the samples."""
        self.parameters[:] = self._start
        self.information.zero_()

    def update(
        self,
        gradient: Float[Tensor, "l S P"],
        fisher: Float[Tensor, "l S P P"],
        picks: Float[Tensor, "l S"],
    ) -> None:
        """Take one bounded Newton step on new samples of the first l levels; deeper levels move by their priors.

        Args:
            gradient, fisher: sums over the new samples.
            picks: number of the new samples.
        """
        known = self.information[: len(picks)]
        known *= (1 - picks / self.memory).clamp(min=0)[..., None, None]
        known += fisher
        system = self.prior.clone()
        system.diagonal(dim1=1, dim2=3).add_(self.information.permute(1, 2, 3, 0))
        num_levels, num_sets, num_parameters = self.parameters.shape
        size = num_levels * num_parameters
        given = pad(gradient, (0, 0, 0, 0, 0, num_levels - len(gradient))).transpose(0, 1)
        step = torch.linalg.solve_ex(
            system.view(num_sets, size, size), given.reshape(num_sets, size)
        ).result
        step = step.nan_to_num(0.0).clamp(-self.largest_step, self.largest_step)
        moved = self.parameters + step.view_as(given).transpose(0, 1)
        self.parameters.copy_(torch.minimum(torch.maximum(moved, self.low), self.high))


def state_of_part(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the entries of a state dict whose keys begin with a part's prefix, without the prefix."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def _prior(levels: int, sets: int, precision: Float[Tensor, "P P"]) -> Float[Tensor, "S L P L P"]:
    """Return the equations of steps that keep every level where the one above is: a level's less the one above's."""
    following = torch.eye(levels) - torch.ones(levels, levels).tril(-1).triu(-1)
    return torch.einsum("lm,pq->lpmq", following.to(precision.device), precision).repeat(
        sets, 1, 1, 1, 1
    )
