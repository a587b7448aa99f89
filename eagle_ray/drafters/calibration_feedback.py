"""Offers: the children that one step's trees were offered, level by level, and what the target's picks say of them.

offers.begin(kinds)
log_probs = offers.add(None, tokens, scores)             # level 1, calibrated; then, level by level,
log_probs = offers.add(frontier, tokens, scores)
offers.learn(picks, num_accepted)                        # once the target has picked
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.sampling.calibration import Calibration
from eagle_ray.tree.expand import Frontier

WARMUP_STEPS = 30  # steps that all teach
UPDATE_INTERVAL = 4  # from then on one in so many does, or in as many as there are levels: a lesson takes 1 to 5 ms


@dataclass(frozen=True, slots=True)
class _Level:
    """frontier: the nodes that were given children; None for the roots. scores: log-probabilities, -inf is padding."""

    frontier: Frontier | None
    tokens: Int[Tensor, "B F K"]
    scores: Float[Tensor, "B F K"]


@dataclass(frozen=True, slots=True)
class Offered:
    """One step's trees, level by level. kinds: of each row, as Calibration has them."""

    kinds: Int[Tensor, " B"]
    levels: list[_Level] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TargetPath:
    """Where the target's picks lead on each of L levels.

    nodes: of the level's frontier. reached: whether they do lead there, and the pick after it is known.
    """

    nodes: Int[Tensor, "L B"]
    reached: Bool[Tensor, "L B"]


class Offers:
    """calibration: what corrects the scores and learns from the picks; None leaves them as they are.

    offered: what there is to learn from. A caller may keep it and set it again.
    """

    offered: Offered

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration
        self._num_taught = 0

    def begin(self, kinds: Int[Tensor, " B"]) -> None:
        """A new step's trees. kinds: of each row, as Calibration has them."""
        self.offered = Offered(kinds)

    def reset(self) -> None:
        """Back to the start, as if no pick had been seen."""
        self._num_taught = 0
        if self.calibration is not None:
            self.calibration.fit.reset()

    def add(
        self, frontier: Frontier | None, tokens: Int[Tensor, "B F K"], scores: Float[Tensor, "B F K"]
    ) -> Float[Tensor, "B F K"]:
        """One level more; the children's log-probabilities given their parents, calibrated."""
        level = len(self.offered.levels)
        self.offered.levels.append(_Level(frontier, tokens, scores))
        return scores if self.calibration is None else self.calibration.apply(level, self.offered.kinds, scores)

    def update(self, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]) -> TargetPath | None:
        """Calibrate all levels that have picks at once, where it is this step's turn: then the path that taught them.

        picks: the target's, of which the first num_accepted + 1 are known.
        """
        self._num_taught += 1
        levels = self.offered.levels[: picks.shape[1]]
        if not is_due(self._num_taught, len(levels)):
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


def _path(levels: list[_Level], picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]) -> TargetPath:
    nodes, on_path = [torch.zeros_like(num_accepted)], [num_accepted >= 0]
    for depth, level in enumerate(levels[1:]):
        frontier = level.frontier
        found = (frontier.parent_rows == nodes[-1][:, None]) & (frontier.tokens == picks[:, depth, None])
        nodes.append(found.long().argmax(1))
        on_path.append(on_path[-1] & found.any(1))
    depths = torch.arange(len(levels), device=picks.device)
    return TargetPath(torch.stack(nodes), torch.stack(on_path) & (num_accepted >= depths[:, None]))


def is_due(step: int, num_levels: int) -> bool:
    """Whether the step-th step teaches."""
    return num_levels > 0 and (step <= WARMUP_STEPS or step % max(num_levels, UPDATE_INTERVAL) == 0)


def levels_in_turn(step: int, num_levels: int) -> range:
    """The levels that the step-th step teaches, where they are taught one by one: at first all, then one in turn."""
    if step <= WARMUP_STEPS or not num_levels:
        return range(num_levels)
    return range(step % num_levels, step % num_levels + 1)
