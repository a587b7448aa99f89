"""Offers: the children proposed in one step, level by level, and the calibration that learns which were accepted.

    offers.begin(kinds)
    log_probs = offers.add(None, tokens, scores)         # level 1, calibrated
    log_probs = offers.add(frontier, tokens, scores)     # each further level
    offers.update(picks, num_accepted)                   # learn from the target's tokens

A step's proposals are kept until its verify pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.methods.calibration import Calibration
from eagle_ray.tree.expand import Frontier

WARMUP_STEPS = 30  # steps that all update the calibration
UPDATE_INTERVAL = 4  # steps between later updates, or as many as levels: an update takes 1 to 5 ms
GPU_UPDATE_INTERVAL = 16  # likewise on a GPU, where its 50 small launches take about a tenth of a step


@dataclass(frozen=True, slots=True)
class OfferedLevel:
    """frontier: the expanded nodes; None for the roots. scores: log-probabilities, uncalibrated; -inf is padding."""

    frontier: Frontier | None
    tokens: Int[Tensor, "B F K"]
    scores: Float[Tensor, "B F K"]


@dataclass(frozen=True, slots=True)
class Offered:
    """One step's proposals, level by level. kinds: of each row, see Calibration."""

    kinds: Int[Tensor, " B"]
    levels: list[OfferedLevel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TargetPath:
    """The nodes of L levels on the path of the target's tokens.

    Attributes:
        nodes: indices in each level's frontier.
        reached: the path contains a node of this level, and the target's token after it is known.
    """

    nodes: Int[Tensor, "L B"]
    reached: Bool[Tensor, "L B"]


class Offers:
    """Proposals of the current step.

    Args:
        calibration: corrects scores and learns from the target's tokens; None leaves scores as they are.

    Attributes:
        offered: what `update` learns from. A caller may keep it and set it again.
    """

    offered: Offered

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration
        self._num_taught = 0

    def begin(self, kinds: Int[Tensor, " B"]) -> None:
        """Start a new step. kinds: of each row, see Calibration."""
        self.offered = Offered(kinds)

    def reset(self) -> None:
        """Discard everything learned."""
        self._num_taught = 0
        if self.calibration is not None:
            self.calibration.fit.reset()

    def add(
        self, frontier: Frontier | None, tokens: Int[Tensor, "B F K"], scores: Float[Tensor, "B F K"]
    ) -> Float[Tensor, "B F K"]:
        """Add a level. Return the children's calibrated log-probabilities given their parents."""
        level = len(self.offered.levels)
        self.offered.levels.append(OfferedLevel(frontier, tokens, scores))
        return scores if self.calibration is None else self.calibration.apply(level, self.offered.kinds, scores)

    def update(self, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]) -> TargetPath | None:
        """Update the calibration of all levels if an update is due. Return the target's path, or None if it is not due.

        Args:
            picks: the target's tokens, of which the first num_accepted + 1 are known.
        """
        self._num_taught += 1
        levels = self.offered.levels[: picks.shape[1]]
        if not is_due(self._num_taught, len(levels), update_interval(picks.device)):
            return None
        path = _path(levels, picks, num_accepted)
        if self.calibration is not None:
            row = torch.arange(len(picks), device=picks.device)
            on_path = list(zip(levels, path.nodes, strict=True))
            scores = torch.stack([level.scores[row, node] for level, node in on_path])
            tokens = torch.stack([level.tokens[row, node] for level, node in on_path])
            picked = tokens == picks.T[: len(levels), :, None]
            self.calibration.update(self.offered.kinds, scores, picked, path.reached)
        return path


def _path(levels: list[OfferedLevel], picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]) -> TargetPath:
    nodes, on_path = [torch.zeros_like(num_accepted)], [num_accepted >= 0]
    for depth, level in enumerate(levels[1:]):
        frontier = level.frontier
        assert frontier is not None, "only the first level's parents are the roots"
        found = (frontier.parent_rows == nodes[-1][:, None]) & (frontier.tokens == picks[:, depth, None])
        nodes.append(found.long().argmax(1))
        on_path.append(on_path[-1] & found.any(1))
    depths = torch.arange(len(levels), device=picks.device)
    return TargetPath(torch.stack(nodes), torch.stack(on_path) & (num_accepted >= depths[:, None]))


def update_interval(device: torch.device) -> int:
    """Return the steps between updates after the warm-up."""
    return GPU_UPDATE_INTERVAL if device.type == "cuda" else UPDATE_INTERVAL


def is_due(step: int, num_levels: int, interval: int = UPDATE_INTERVAL) -> bool:
    """Return whether the calibration is updated in this step."""
    return num_levels > 0 and (step <= WARMUP_STEPS or step % max(num_levels, interval) == 0)


def levels_in_turn(step: int, num_levels: int) -> range:
    """Return the levels to update in this step if they are updated one by one: first all, later one in turn."""
    if step <= WARMUP_STEPS or not num_levels:
        return range(num_levels)
    return range(step % num_levels, step % num_levels + 1)
