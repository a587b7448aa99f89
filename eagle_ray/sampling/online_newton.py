"""OnlineFit: a few parameters per level, fitted to a stream by Newton steps on the device, unseen by the host.

Every update adds what the new picks say (the gradient of their log-likelihood, and its Fisher information) to what is
known; old picks fade as new ones come, so the fit follows the text and a level that sees nothing keeps what it has.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

MEMORY = 2000  # picks after which a pick counts 1/e
LARGEST_STEP = 0.5


class OnlineFit:
    """S sets of P parameters for each of L levels.

    start: where every set begins. low, high: bounds of each parameter. precision: how many units of Fisher information
    the start is worth; it keeps the first steps small and every step solvable.
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
        self._low, self._high = torch.tensor(low, device=device), torch.tensor(high, device=device)
        self._prior = precision * torch.eye(len(start), device=device)
        self.parameters = self._start.repeat(levels, sets, 1)
        self._information = torch.zeros(levels, sets, len(start), len(start), device=device)

    def reset(self) -> None:
        """Back to the start."""
        self.parameters[:] = self._start
        self._information.zero_()

    def update(
        self,
        level: int | slice,
        gradient: Float[Tensor, "*L S P"],
        fisher: Float[Tensor, "*L S P P"],
        picks: Float[Tensor, "*L S"],
    ) -> None:
        """One bounded Newton step of a level, or of each of several.

        gradient, fisher: sums over the new picks; picks: how many those were.
        """
        known = self._information[level]
        known *= (1 - picks / MEMORY).clamp(min=0)[..., None, None]
        known += fisher
        step = torch.linalg.solve_ex(known + self._prior, gradient[..., None]).result[..., 0]
        moved = self.parameters[level] + step.clamp(-LARGEST_STEP, LARGEST_STEP)
        self.parameters[level] = torch.minimum(torch.maximum(moved, self._low), self._high)
