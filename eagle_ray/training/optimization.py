"""What the target's and the head's training share: gradients from several threads, two optimizers, one schedule.

On a CPU a small model is trained fastest by Python threads with one torch thread each: kernels this size gain nothing
from splitting. Sums are taken in a fixed order, so a run with the same seed and thread count repeats exactly.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARMUP_STEPS = 40
CONSTANT_SHARE = 0.4
LAST_RATE = 0.02


@dataclass(frozen=True, slots=True)
class Losses:
    """One shard's loss, summed over its positions, and the sums one wants to see. `count` is their denominator."""

    total: Tensor
    count: float
    shown: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a finished step says of itself; `means` are the shown sums over the counted positions."""

    step: int
    num_steps: int
    means: dict[str, float]
    gradient_norm: float


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Warm-up, a plateau of 40 % of the run, then a straight line down to 2 %."""
    progress = step / num_steps
    if progress < CONSTANT_SHARE:
        return min(1.0, (step + 1) / WARMUP_STEPS)
    return max(LAST_RATE, 1.0 - (progress - CONSTANT_SHARE) / (1.0 - CONSTANT_SHARE))


class GradientDescent:
    """Steps the parameters of one model: Muon for the matrices named, AdamW for the rest, clipped by global norm."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        num_steps: int,
        matrix_rate: float,
        other_rate: float,
        max_norm: float,
        weight_decay: float = 0.0,
    ):
        self.parameters = [*matrices, *others]
        self.optimizers = [
            torch.optim.Muon(
                matrices, lr=matrix_rate, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_rates = [matrix_rate, other_rate]
        self.num_steps = num_steps
        self.max_norm = max_norm

    def step(self, step: int, shards: Sequence, losses_of: Callable[..., Losses]) -> StepReport:
        """One update from the shards' mean loss. `losses_of(shard)` runs in a thread of its own."""
        with ThreadPoolExecutor(len(shards)) as threads:
            results = list(threads.map(lambda shard: self.shard_gradients(shard, losses_of), shards))
        count = sum(losses.count for losses, _ in results)
        gradients = [sum(parts) / count for parts in zip(*(gradients for _, gradients in results), strict=True)]
        norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients)).item()
        self.update(step, gradients, norm)
        shown = {name: sum(losses.shown[name] for losses, _ in results) / count for name in results[0][0].shown}
        return StepReport(step + 1, self.num_steps, shown, norm)

    def shard_gradients(self, shard, losses_of: Callable[..., Losses]) -> tuple[Losses, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        losses = losses_of(shard)
        return losses, torch.autograd.grad(losses.total, self.parameters)

    def update(self, step: int, gradients: Sequence[Tensor], norm: float) -> None:
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * scale
        for optimizer, base_rate in zip(self.optimizers, self.base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = base_rate * learning_rate_factor(step, self.num_steps)
            optimizer.step()
