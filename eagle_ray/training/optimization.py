"""One optimizer step: gradients of a recipe's shards, summed over threads and workers, clipped, and applied.

A recipe has two calls per shard: `counts`, from the masks alone, and `losses`, which divides by the counts of the whole
step. So the sum of the shards' losses is the mean of the step, however it is split over threads and workers.

On a CPU a small model is trained fastest by Python threads with one torch thread each: kernels of this size gain
nothing from splitting. Sums are taken in a fixed order, so a run with equal seed and thread count repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.training.frozen_target import FeatureBatch, FrozenTarget

Shard = TypeVar("Shard")
MUON_MOMENTUM = 0.95
OTHER_RATE = 0.5  # learning rate of what Muon does not step, relative to its own
CONSTANT_SHARE = 0.4  # of a plateau schedule
LAST_RATE = 0.02  # of a plateau schedule, relative to the peak


@dataclass(frozen=True, slots=True)
class Losses:
    """One shard's loss and sums.

    Attributes:
        total: the shard's part of the step's mean loss: divided by the counts of all shards.
        sums: sums to report, over the shard's positions.
    """

    total: Tensor
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over a run, relative to its peak.

    kind: linear (warm-up, then down to 0), constant (warm-up only), or plateau (warm-up, constant for 40 % of the
        run, then down to 2 %).
    """

    kind: str
    num_steps: int
    warmup_steps: int

    def factor(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.kind == "plateau":
            progress = step / self.num_steps
            return 1.0 if progress < CONSTANT_SHARE else max(LAST_RATE, (1 - progress) / (1 - CONSTANT_SHARE))
        return max(0.0, (self.num_steps - step) / max(1, self.num_steps - self.warmup_steps))


@dataclass(frozen=True, slots=True)
class Clipping:
    """Limits of a step's gradient. A limit of None is off.

    value: value of each number.
    norm: norm of the whole gradient.
    """

    value: float | None = None
    norm: float | None = None


class TrainingWorkers(Protocol):
    """Protocol of data parallelism."""

    @property
    def rank(self) -> int:
        """Return this worker's number, from 0."""

    @property
    def size(self) -> int:
        """Return how many workers there are."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers."""

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by worker 0's."""


@dataclass(frozen=True, slots=True)
class OneWorker:
    """Fulfils TrainingWorkers without communication."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        pass

    def share(self, tensors: Sequence[Tensor]) -> None:
        pass


def muon(matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], rate: float, decay: float) -> list[Any]:
    """Return Muon for matrices and AdamW for other parameters."""
    first = torch.optim.Muon(
        matrices, lr=rate, weight_decay=decay, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return [first, torch.optim.AdamW(others, lr=OTHER_RATE * rate, betas=(0.9, 0.98), weight_decay=0.0)]


def adamw(parameters: Sequence[nn.Parameter], rate: float, betas: tuple[float, float], decay: float) -> list[Any]:
    """Return AdamW for all parameters."""
    return [torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay)]


@dataclass
class GradientDescent:
    """Steps the parameters of the optimizers.

    Attributes:
        optimizers: each with one group of parameters, and its peak learning rate.
        threads: CPU threads that compute one shard each; 1 is the calling thread.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    schedule: Schedule
    clipping: Clipping = Clipping()
    threads: int = 1
    workers: TrainingWorkers = OneWorker()
    parameters: list[nn.Parameter] = field(init=False)
    _peaks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        groups = [optimizer.param_groups[0] for optimizer in self.optimizers]
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self._peaks = [group["lr"] for group in groups]

    def step(self, step: int, shards: Sequence[Shard], losses_of: Callable[[Shard], Losses]) -> tuple[dict, float]:
        """Update the parameters from the shards' losses. Return their summed sums and the gradient's norm.

        losses_of: called in a thread of its own if there are several.
        """
        gradients, sums = self._accumulate(shards, losses_of)
        self.workers.sum(gradients)
        norm = float(reduce(torch.add, (gradient.float().square().sum() for gradient in gradients)).sqrt())
        self._clip(gradients, norm)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * self.schedule.factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return sums, norm

    def _accumulate(
        self, shards: Sequence[Shard], losses_of: Callable[[Shard], Losses]
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Return the summed gradients and sums, added in the order of the shards."""
        gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        sums: dict[str, float] = {}
        for start in range(0, len(shards), self.threads):
            for losses, parts in self._gradients(shards[start : start + self.threads], losses_of):
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient += part
                for name, value in losses.sums.items():
                    sums[name] = sums.get(name, 0.0) + value
        return gradients, sums

    def _gradients(
        self, shards: Sequence[Shard], losses_of: Callable[[Shard], Losses]
    ) -> list[tuple[Losses, tuple[Tensor, ...]]]:
        def run(shard: Shard) -> tuple[Losses, tuple[Tensor, ...]]:
            losses = losses_of(shard)
            return losses, torch.autograd.grad(losses.total, self.parameters, allow_unused=False)

        def run_in_thread(shard: Shard) -> tuple[Losses, tuple[Tensor, ...]]:
            torch.set_num_threads(1)
            return run(shard)

        if self.threads == 1:
            return [run(shard) for shard in shards]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(run_in_thread, shards))

    def _clip(self, gradients: list[Tensor], norm: float) -> None:
        if self.clipping.norm is not None and norm > self.clipping.norm:
            for gradient in gradients:
                gradient *= self.clipping.norm / (norm + 1e-6)
        if self.clipping.value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.clipping.value, self.clipping.value)


@dataclass(frozen=True, slots=True)
class StartHead:
    """A published head to train further, in fp32, for example for a fine-tuned target.

    Its config.json, its draft vocabulary and the layers that it reads stay. It reads the target's embedding, of which
    published heads hold a copy.

    Attributes:
        raw_config: its config.json.
        token_ids: its draft vocabulary, in the order of the head's own logits if it has some; None is every token.
    """

    head: Any
    raw_config: dict[str, Any]
    token_ids: list[int] | None


class HeadRecipe(Protocol):
    """Protocol of a training method: how a configuration names a head, and how the head is trained.

    Attributes:
        scales_features: its features come before any norm, so their numbers differ much in size: `make` takes a factor
            for each.
        trains_further: `start_from` reads published heads.
        head: the module that is trained, in fp32.
        num_counts: terms that `counts` returns.
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
        """Return the target's layers that a new head reads; None is what the lm_head reads. Raises ConfigError."""
        return None

    @classmethod
    def start_from(cls, path: Path, target: Any) -> StartHead:
        """Return the published head in a directory. target: the target's config. Raises ConfigError, EngineError."""
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
            dtype: dtype of matrix products.
        """
        raise NotImplementedError

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " C"]:
        """Return the positions of each loss term of a shard, in fp64 on the host."""

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " C"], seed: int) -> Losses:
        """Return a shard's losses. counts: of the whole step. seed: of the shard's noise."""

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters that Muon steps, all matrices but an lm_head, whose rows are classes.

        AdamW steps the others.
        """
        return [p for name, p in self.head.named_parameters() if p.dim() == 2 and not name.startswith("lm_head")]

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
