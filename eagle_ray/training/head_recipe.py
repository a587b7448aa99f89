"""HeadRecipe: the protocol of a training method, and what all methods share.

A step has two calls per shard: `counts`, from the masks alone, and `losses`, which divides by the counts of the whole
step. So the sum of the shards' losses is the mean of the step, however it is split over threads and workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.training.feature_source import FeatureBatch
from eagle_ray.training.optimization import Losses


class HeadRecipe(Protocol):
    """Protocol of a training method.

    Attributes:
        head: the module that is trained, in fp32.
        num_counts: terms that `counts` returns.
        names: of the sums that `losses` reports.
    """

    @property
    def head(self) -> nn.Module: ...

    num_counts: int
    names: tuple[str, ...]

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " C"]:
        """Return the positions of each loss term of a shard, in fp64 on the host."""

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " C"], seed: int) -> Losses:
        """Return a shard's losses. counts: of the whole step. seed: of the shard's noise."""

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters that Muon steps; AdamW steps the others."""

    def save(self, path: Path) -> None:
        """Write the head in its published layout."""


def initialize_linears(head: nn.Module) -> None:
    """Draw every matrix from a normal distribution, by fan-in."""
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context of a head's forward pass: bf16 products of fp32 weights, or fp32 throughout."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def agreement_names(num_levels: int) -> tuple[str, ...]:
    """Return the names of the agreements by depth, from 1."""
    return tuple(f"agreement_{level}" for level in range(1, num_levels + 1))


def mean_over(total: Tensor, count: float | Tensor) -> Tensor:
    """Return total / count, or 0 if nothing was counted."""
    return total / max(float(count), 1.0)
