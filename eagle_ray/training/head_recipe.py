"""HeadRecipe: how a training method makes, trains and saves a head.

A recipe has two calls per shard: `counts`, from the masks alone, and `losses`, which divides by the
counts of the whole step. So the sum of the shards' losses is the mean of the step, however it is
split over threads and workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.training.frozen_target import FeatureBatch, FrozenTarget


@dataclass(frozen=True, slots=True)
class Losses:
    """One shard's loss and sums.

    Attributes:
        total: contribution of the shard to the step's mean loss, already divided by the counts of
            all shards.
        sums: sums to report, over the shard's positions.
    """

    total: Tensor
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class StartHead:
    """A published head to train further, in fp32, for example for a fine-tuned target.

    Its config.json, its draft vocabulary and the layers that it reads stay. It reads the target's
    embedding, of which published heads hold a copy.

    Attributes:
        raw_config: config.json of the head.
        token_ids: draft vocabulary of the head, in the order of its own logits if it has an
            lm_head; None is every token.
    """

    head: Any
    raw_config: dict[str, Any]
    token_ids: list[int] | None


class HeadRecipe(Protocol):
    """Protocol of a training method: how a configuration names a head, and how the head is trained.

    Attributes:
        scales_features: whether its features come before any norm, so that their elements differ
            much in size and `make` takes a factor for each.
        trains_further: whether `start_from` can read published heads.
        head: the module that is trained, in fp32.
        num_counts: number of terms that `counts` returns.
        names: names of the sums that `losses` reports.
    """

    scales_features: ClassVar[bool] = False
    trains_further: ClassVar[bool] = False
    head: nn.Module
    num_counts: int
    names: tuple[str, ...]

    @classmethod
    def draft_vocab_size(cls, config: TrainConfig, vocab_size: int) -> int:
        """Return the size of the draft vocabulary; vocab_size is every token. Raises ConfigError."""
        return min(config.head.draft_vocab_size or vocab_size, vocab_size)

    @classmethod
    def feature_layers(cls, config: TrainConfig, num_layers: int) -> tuple[int, ...] | None:
        """Return the target's layers whose inputs a new head reads; None is the last hidden state.
        Raises ConfigError."""
        return None

    @classmethod
    def start_from(cls, path: Path, target: Any) -> StartHead:
        """Read the published head in a directory, to train it further. Raises ConfigError, EngineError.

        Args:
            target: the target's config.
        """
        raise ConfigError(f"{path}: {cls.__name__} starts from no published head")

    @classmethod
    def make(
        cls,
        config: TrainConfig,
        target_config: Any,
        target: FrozenTarget,
        feature_scale: Float[Tensor, " F"] | None,
        dtype: torch.dtype,
        start: StartHead | None,
    ) -> HeadRecipe:
        """Return the recipe with a new head, or with the one to start from.

        Args:
            target_config: the target's config.
            feature_scale: factor of the features, if they are scaled.
            dtype: dtype in which matrix products are computed.
        """
        raise NotImplementedError

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " C"]:
        """Return the positions of each loss term of a shard, in fp64 on the host."""

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " C"], seed: int) -> Losses:
        """Return a shard's losses.

        Args:
            counts: counts of the whole step.
            seed: seed of the shard's noise.
        """

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters that Muon updates: all matrices except an lm_head, whose rows are classes.

        AdamW updates the others.
        """
        matrices = []
        for name, parameter in self.head.named_parameters():
            if parameter.dim() == 2 and not name.startswith("lm_head"):
                matrices.append(parameter)
        return matrices

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
    """Return the names under which the agreement with the target is reported, by depth from 1."""
    return tuple(f"agreement_{level}" for level in range(1, num_levels + 1))


def mean_over(total: Tensor, count: float | Tensor) -> Tensor:
    """Return total / count, or 0 if nothing was counted."""
    return total / max(float(count), 1.0)
