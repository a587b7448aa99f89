"""Trainer: the loop over steps.

What one step makes, in this order:

    documents   of the step, by the order (`batch_order.py`)      the same on every worker
    shards      of this worker                                    split evenly by tokens
    features    of each shard                                     from the target, or from a cache
    counts      of the whole step                                 summed over workers
    gradients   of each shard's part of the mean                  summed over threads and workers

Between two steps `train_state.py` writes checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_ray.training.frozen_target import FeatureBatch, FeatureSource
from eagle_ray.training.head_recipe import HeadRecipe, Losses
from eagle_ray.training.job.batch_order import BatchOrder, split_evenly
from eagle_ray.training.optimization import GradientDescent
from eagle_ray.training.packing import Document, PackedBatch

SEED_STRIDE = 4096  # more shards than a step ever has


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of a finished step.

    Attributes:
        step: number of finished steps, including this one.
        means: means over the step of the loss, its parts, and the agreement by depth.
        num_tokens: number of tokens in the step, over all workers.
        seconds: seconds of the step.
        feature_seconds: part of the seconds spent on features.
    """

    step: int
    means: dict[str, float]
    gradient_norm: float
    num_tokens: int
    seconds: float
    feature_seconds: float


@dataclass
class Trainer:
    """Trains a recipe's head on documents.

    Attributes:
        shard_tokens: maximum tokens of one forward pass.
        seed: seed of noise.
        device: device of the head.
    """

    recipe: HeadRecipe
    source: FeatureSource
    documents: Sequence[Document]
    order: BatchOrder
    descent: GradientDescent
    batch_tokens: int
    shard_tokens: int
    seed: int
    device: torch.device
    _lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._lengths = [len(document) for document in self.documents]

    def run(self, begin: int, end: int, on_step: Callable[[StepReport], None]) -> None:
        """Run the steps begin .. end - 1.

        Args:
            on_step: callback after each step.
        """
        for step in range(begin, end):
            on_step(self.step(step))

    def step(self, step: int) -> StepReport:
        """Run one step, counted from 0."""
        started = time.perf_counter()
        indices = self.order.batch(step)
        shards = [self.source.read(packed) for packed in self._shards(indices)]
        features_done = time.perf_counter()
        counts = self._counts(shards)
        seeds = {id(shard): self._seed_of(step, number) for number, shard in enumerate(shards)}

        def losses_of(shard: FeatureBatch) -> Losses:
            return self.recipe.losses(shard, counts, seeds[id(shard)])

        sums, norm = self.descent.step(step, shards, losses_of)
        return StepReport(
            step=step + 1,
            means=self._over_workers(sums),
            gradient_norm=norm,
            num_tokens=sum(self._lengths[i] for i in indices),
            seconds=time.perf_counter() - started,
            feature_seconds=features_done - started,
        )

    def _shards(self, indices: list[int]) -> list[PackedBatch]:
        """Return this worker's shards of a step."""
        workers = self.descent.workers
        threads = self.descent.threads
        passes = math.ceil(self.batch_tokens / (workers.size * self.shard_tokens))
        per_worker = math.ceil(passes / threads) * threads
        shards = split_evenly(indices, self._lengths, workers.size * per_worker)
        mine = [shard for shard in shards[workers.rank :: workers.size] if shard]
        return [PackedBatch.of(self.documents, shard, self.device) for shard in mine]

    def _counts(self, shards: Sequence[FeatureBatch]) -> torch.Tensor:
        """Return the counts of the whole step."""
        counts = torch.zeros(self.recipe.num_counts, dtype=torch.float64)
        for shard in shards:
            counts += self.recipe.counts(shard)
        self.descent.workers.sum([counts])
        return counts

    def _seed_of(self, step: int, shard: int) -> int:
        workers = self.descent.workers
        number = shard * workers.size + workers.rank
        return ((self.seed % 2**31) * 1_000_003 + step) * SEED_STRIDE % 2**62 + number

    def _over_workers(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return the means of the whole step; a worker without shards adds nothing."""
        names = self.recipe.names
        values = torch.tensor([sums.get(name, 0.0) for name in names], dtype=torch.float64)
        self.descent.workers.sum([values])
        return dict(zip(names, values.tolist(), strict=True))
