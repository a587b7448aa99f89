"""RankAcceptance: a calibration that also counts how often the target samples a child, by depth and rank.

    measured = RankAcceptance(levels=6, width=10)
    ...                                               # a drafter calibrates with it and reports the samples
    measured.rates()[0][2]                            # of the third child of a root

A sample after a node that was reached tells about all its drafted children, verified or not. Counted on the device
and read now and then.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.methods.calibration import Calibration

MEMORY = 2000  # picks of a level after which a pick counts 1/e
PRIOR = 4.0  # picks that a guess is worth
FIRST_GUESS = 0.5  # of the first child of a root; each further child is picked GUESS_RATIO times as often
GUESS_RATIO = 0.4


class RankAcceptance(Calibration):
    """width: ranks that are counted; children past it are not."""

    def __init__(self, levels: int, width: int, device: torch.device | str = "cpu"):
        super().__init__(levels, device)
        self._picked = torch.zeros(levels, width + 1, device=device)  # by rank; then nodes that were reached
        self._width = width

    def update(
        self,
        kinds: Int[Tensor, " B"],
        log_probs: Float[Tensor, "L B K"],
        picked: Bool[Tensor, "L B K"],
        reached: Bool[Tensor, "L B"],
    ) -> None:
        super().update(kinds, log_probs, picked, reached)
        counts, news = self._picked[: len(picked)], (picked & reached[:, :, None]).sum(1)[:, : self._width]
        counts *= (1 - reached.sum(1) / MEMORY).clamp(min=0)[:, None]
        counts[:, : news.shape[1]] += news
        counts[:, -1] += reached.sum(1)

    def rates(self) -> list[list[float]]:
        """Return rates by [depth][rank]; a level that was seldom reached is shrunk towards the one above it. Syncs
        once.

        The initial guess counts as PRIOR samples, on the first level only.
        """
        rates, guess = [], [FIRST_GUESS * GUESS_RATIO**rank for rank in range(self._width)]
        for *picked, reached in self._picked.tolist():
            guess = [(n + PRIOR * before) / (reached + PRIOR) for n, before in zip(picked, guess, strict=True)]
            rates.append(guess)
        return rates
