"""OnlineFit: fit a few parameters per level to a stream of samples, by Newton steps on the device.

Every update adds the gradient of the new samples' log-likelihood and its Fisher information to decaying sums, so the
fit follows the text, and a level without new samples keeps its parameters. The host reads nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

MEMORY = 2000  # picks after which a pick counts 1/e
LARGEST_STEP = 0.5


class OnlineFit:
    """S sets of P parameters for each of L levels.

    Args:
        start: initial value of every set.
        low, high: bounds of each parameter.
        precision: Fisher information that the start counts as; it keeps the first steps small and solvable.
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

    def at(self, level: int | Int[Tensor, " 1"]) -> Float[Tensor, "S P"]:
        """Return a level's parameters. The level may be a number on the device."""
        return self.parameters[level] if isinstance(level, int) else self.parameters.index_select(0, level)[0]

    def reset(self) -> None:
        """Return to the start."""
        self.parameters[:] = self._start
        self._information.zero_()

    def update(
        self,
        level: int | slice,
        gradient: Float[Tensor, "*L S P"],
        fisher: Float[Tensor, "*L S P P"],
        picks: Float[Tensor, "*L S"],
    ) -> None:
        """Take one bounded Newton step of a level, or of each of several.

        gradient, fisher: sums over the new samples. picks: their number.
        """
        known = self._information[level]
        known *= (1 - picks / MEMORY).clamp(min=0)[..., None, None]
        known += fisher
        step = torch.linalg.solve_ex(known + self._prior, gradient[..., None]).result[..., 0]
        moved = self.parameters[level] + step.clamp(-LARGEST_STEP, LARGEST_STEP)
        self.parameters[level] = torch.minimum(torch.maximum(moved, self._low), self._high)
