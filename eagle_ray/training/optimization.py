"""One optimizer step: gradients of a recipe's shards, summed over threads and workers, clipped, and applied.

On a CPU a small model is trained fastest by Python threads with one torch thread each, since
kernels of this size gain nothing from several threads. Sums are taken in a fixed order, so runs
with equal seed and thread count are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from eagle_ray.training.head_recipe import Losses

Shard = TypeVar("Shard")
MUON_MOMENTUM = 0.95
OTHER_RATE = 0.5  # learning rate of what Muon does not step, relative to its own
CONSTANT_SHARE = 0.4  # share of a plateau schedule at the peak
LAST_RATE = 0.02  # last rate of a plateau schedule, relative to the peak


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over a run, relative to its peak.

    Attributes:
        kind: shape of the schedule: linear (warm-up, then down to 0), constant (warm-up only), or
            plateau (warm-up, constant for 40 % of the run, then down to 2 %).
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
            if progress < CONSTANT_SHARE:
                return 1.0
            return max(LAST_RATE, (1 - progress) / (1 - CONSTANT_SHARE))
        num_decaying = max(1, self.num_steps - self.warmup_steps)
        return max(0.0, (self.num_steps - step) / num_decaying)


@dataclass(frozen=True, slots=True)
class Clipping:
    """Limits of a step's gradient. A limit of None is off.

    Attributes:
        value: maximum absolute value of each element.
        norm: maximum norm of the whole gradient.
    """

    value: float | None = None
    norm: float | None = None


class TrainingWorkers(Protocol):
    """Protocol of the workers of a data-parallel run."""

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
    """TrainingWorkers for a run with a single worker: no communication."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        pass

    def share(self, tensors: Sequence[Tensor]) -> None:
        pass


def muon(
    matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], rate: float, decay: float
) -> list[Any]:
    """Return Muon for matrices and AdamW for other parameters."""
    first = torch.optim.Muon(
        matrices,
        lr=rate,
        weight_decay=decay,
        momentum=MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    second = torch.optim.AdamW(others, lr=OTHER_RATE * rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [first, second]


def adamw(
    parameters: Sequence[nn.Parameter], rate: float, betas: tuple[float, float], decay: float
) -> list[Any]:
    """Return AdamW for all parameters."""
    return [torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay)]


@dataclass
class GradientDescent:
    """Computes a step's gradient over all shards and updates the parameters.

    Attributes:
        optimizers: optimizers with one group of parameters each, and their peak learning rates.
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

    def step(
        self, step: int, shards: Sequence[Shard], losses_of: Callable[[Shard], Losses]
    ) -> tuple[dict, float]:
        """Update the parameters from the shards' losses. Return their summed sums and the gradient's norm.

        Args:
            losses_of: called in a thread of its own if there are several.
        """
        gradients, sums = self._accumulate(shards, losses_of)
        self.workers.sum(gradients)
        squares = [gradient.float().square().sum() for gradient in gradients]
        norm = float(reduce(torch.add, squares).sqrt())
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
            at_once = shards[start : start + self.threads]
            for losses, parts in self._gradients(at_once, losses_of):
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
