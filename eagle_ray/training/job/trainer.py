"""Trainer: the loop over steps, their order and the checkpoints between them. One step is

documents   of the step, by the order            the same on every worker
shards      of this worker                        split evenly by tokens
features    of each shard                         from the target, or from a cache
counts      of the whole step                     summed over workers
gradients   of each shard's part of the mean      summed over threads and workers
"""

from __future__ import annotations

import io
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_ray.core.errors import EngineError
from eagle_ray.storage.path import StoragePath
from eagle_ray.training.frozen_target import FeatureBatch, FeatureSource
from eagle_ray.training.optimization import GradientDescent, HeadRecipe, Losses
from eagle_ray.training.packing import Document, PackedBatch

SEED_STRIDE = 4096  # more shards than a step ever has
CHECKPOINTS = "checkpoints"  # directory of a run
Curves = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step.

    Attributes:
        step: finished steps, this one included.
        means: loss, its parts and agreement by depth, over the step.
        num_tokens: number of tokens of the step, over all workers.
        seconds: seconds of the step; feature_seconds of them for features.
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
        shard_tokens: tokens of one forward pass.
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
        """Run the steps begin .. end - 1. on_step: called after each."""
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
        workers, threads = self.descent.workers, self.descent.threads
        passes = math.ceil(self.batch_tokens / (workers.size * self.shard_tokens))
        per_worker = math.ceil(passes / threads) * threads
        shards = split_evenly(indices, self._lengths, workers.size * per_worker)
        mine = [shard for shard in shards[workers.rank :: workers.size] if shard]
        return [PackedBatch.of(self.documents, shard, self.device) for shard in mine]

    def _counts(self, shards: Sequence[FeatureBatch]) -> torch.Tensor:
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


class BatchOrder:
    """Which documents each step reads, as a function of the seed and the step alone.

        order = BatchOrder(lengths, batch_tokens=8192, seed=0)
        order.batch(step)                    # equal documents in every run, also after a resume
        split_evenly(indices, lengths, 4)    # shards of one step, for threads and workers

    Every epoch is a new permutation. A step takes documents until the next one would exceed batch_tokens.

    Args:
        lengths: tokens of each document.
        batch_tokens: maximum tokens of a step; a longer document is a step of its own.
        seed: seed of the permutations.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int):
        self._lengths, self._batch_tokens, self._seed = lengths, batch_tokens, seed
        self._first_steps = [0]  # of each epoch
        self._epochs: dict[int, list[list[int]]] = {}

    def batch(self, step: int) -> list[int]:
        """Return the documents of a step."""
        epoch = self.epoch_of(step)
        return self._batches(epoch)[step - self._first_steps[epoch]]

    def epoch_of(self, step: int) -> int:
        """Return the number of whole passes over the data before this step."""
        while step >= self._first_steps[-1]:
            self._first_steps.append(self._first_steps[-1] + len(self._batches(len(self._first_steps) - 1)))
        return bisect_right(self._first_steps, step) - 1

    def num_steps(self, num_epochs: int) -> int:
        """Return the steps of the first num_epochs epochs."""
        while len(self._first_steps) <= num_epochs:
            self._first_steps.append(self._first_steps[-1] + len(self._batches(len(self._first_steps) - 1)))
        return self._first_steps[num_epochs]

    def _batches(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {epoch: self._shuffle(epoch)}
        return self._epochs[epoch]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        batches: list[list[int]] = []
        num_tokens = self._batch_tokens
        for index in torch.randperm(len(self._lengths), generator=generator).tolist():
            if num_tokens + self._lengths[index] > self._batch_tokens:
                batches.append([])
                num_tokens = 0
            batches[-1].append(index)
            num_tokens += self._lengths[index]
        return batches


def split_evenly(indices: Sequence[int], lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Split the documents of a step into shards of about as many tokens: the longest first, to the smallest shard."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(index)
        sizes[smallest] += lengths[index]
    return shards


@dataclass
class TrainState:
    """State between two steps: everything that the next step depends on, in one file, local or in S3.

        checkpoints/step-00000200.pt     head, optimizers, step, curves so far

    The position in the data is the step, since the order of the data is a function of the seed and the step. Noise is
    drawn from the seed and the step as well, so a resumed run repeats the numbers of one that was never stopped, bit
    for bit.

    Attributes:
        step: finished steps.
        head, optimizers: their state_dicts.
        extra: tensors of the recipe that are made from the data at the start.
        curves: lists of numbers for the report.
        identity: what a resumed run must have in common with this one, as JSON.
    """

    step: int
    head: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def save(self, output: StoragePath, keep: int) -> None:
        """Write the checkpoint, then delete all but the newest `keep`."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        (output / CHECKPOINTS / f"step-{self.step:08d}.pt").write_atomic(buffer.getvalue())
        for old in checkpoints(output)[:-keep]:
            old.remove()

    @classmethod
    def load(cls, file: StoragePath) -> TrainState:
        """Return a checkpoint's state, on the CPU. Raises EngineError if the file is damaged."""
        try:
            values = torch.load(io.BytesIO(file.read_bytes()), map_location="cpu", weights_only=True)
            return cls(**values)
        except (RuntimeError, EOFError, ValueError, TypeError, KeyError) as error:
            raise EngineError(
                f"{file}: damaged checkpoint ({error}). Delete it to resume from the one before"
            ) from error


def checkpoints(output: StoragePath) -> list[StoragePath]:
    """Return the checkpoints of a run, the oldest first."""
    directory = output / CHECKPOINTS
    return directory.glob("step-*.pt") if directory.is_directory() else []
