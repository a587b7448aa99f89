"""Offers: the children that one step's trees were offered, level by level, and what the target's picks say of them.

    offers.begin(kinds)
    log_probs = offers.add(None, tokens, scores)             # level 1, calibrated; then, level by level,
    log_probs = offers.add(frontier, tokens, scores)
    for level in offers.to_learn(picks.shape[1]):            # once the target has picked
        offers.learn(level, picks, num_accepted)

Does not know where children come from, or which of them were verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.speculative.calibration import Calibration
from eagle_ray.speculative.expand import Frontier

EAGER_STEPS = 30  # steps that teach every level; from then on each teaches one, which costs little


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


class Offers:
    """calibration: what corrects the scores and learns from the picks; None leaves them as they are.

    offered: what there is to learn from. Who has kept it may set it again.
    """

    offered: Offered

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration
        self._num_taught = 0

    def begin(self, kinds: Int[Tensor, " B"]) -> None:
        """A new step's trees. kinds: of each row, as Calibration has them."""
        self.offered = Offered(kinds)

    def forget(self) -> None:
        """Back to the start, as if no pick had been seen."""
        self._num_taught = 0
        if self.calibration is not None:
            self.calibration.fit.forget()

    def add(
        self, frontier: Frontier | None, tokens: Int[Tensor, "B F K"], scores: Float[Tensor, "B F K"]
    ) -> Float[Tensor, "B F K"]:
        """One level more; the children's log-probabilities given their parents, calibrated."""
        level = len(self.offered.levels)
        self.offered.levels.append(_Level(frontier, tokens, scores))
        return scores if self.calibration is None else self.calibration.apply(level, self.offered.kinds, scores)

    def to_learn(self, num_picks: int) -> Iterable[int]:
        """Which levels this step teaches: at first every one that has picks, then one in turn."""
        self._num_taught += 1
        return levels_in_turn(self._num_taught, min(len(self.offered.levels), num_picks))

    def learn(self, level: int, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]) -> None:
        """Calibrate a level. picks: the target's, of which the first num_accepted + 1 are known."""
        if self.calibration is None:
            return
        seen = self.offered.levels[level]
        node, reached = self.node_on_path(level, picks, num_accepted)
        row = torch.arange(len(node), device=node.device)
        picked = seen.tokens[row, node] == picks[:, level, None]
        self.calibration.learn(level, self.offered.kinds, seen.scores[row, node], picked, reached)

    def node_on_path(
        self, level: int, picks: Int[Tensor, "B D"], num_accepted: Int[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
        """Which node of this level's frontier the target's picks lead to; whether they do, and its pick is known."""
        node = torch.zeros_like(num_accepted)
        reached = num_accepted >= level
        for depth in range(level):
            frontier = self.offered.levels[depth + 1].frontier
            found = (frontier.parent_rows == node[:, None]) & (frontier.tokens == picks[:, depth, None])
            node, reached = found.long().argmax(1), reached & found.any(1)
        return node, reached


def levels_in_turn(step: int, num_levels: int) -> Iterable[int]:
    """The levels that the step-th step teaches, of those that have picks."""
    return range(num_levels) if step <= EAGER_STEPS or not num_levels else [step % num_levels]
