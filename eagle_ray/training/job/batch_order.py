"""BatchOrder: choose each step's documents as a function of the seed and the step alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch


class BatchOrder:
    """The documents of each training step, as a function of the seed and the step alone.

        order = BatchOrder(lengths, batch_tokens=8192, seed=0)
        order.batch(step)                    # equal documents in every run, also after a resume
        split_evenly(indices, lengths, 4)    # shards of one step, for threads and workers

    Every epoch is a new permutation. A step takes documents until the next one would exceed
    batch_tokens.

    Args:
        lengths: tokens of each document.
        batch_tokens: maximum tokens of a step; a longer document is a step of its own.
        seed: seed of the permutations.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int):
        self._lengths = lengths
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._first_steps = [0]  # the first step of each epoch
        self._epochs: dict[int, list[list[int]]] = {}

    def batch(self, step: int) -> list[int]:
        """Return the documents of a step."""
        epoch = self.epoch_of(step)
        return self._batches(epoch)[step - self._first_steps[epoch]]

    def epoch_of(self, step: int) -> int:
        """Return how many whole passes over the data precede this step."""
        while step >= self._first_steps[-1]:
            self._add_epoch()
        return bisect_right(self._first_steps, step) - 1

    def num_steps(self, num_epochs: int) -> int:
        """Return the number of steps in the first num_epochs epochs."""
        while len(self._first_steps) <= num_epochs:
            self._add_epoch()
        return self._first_steps[num_epochs]

    def _add_epoch(self) -> None:
        """Find the first step of the epoch after the last one whose first step is known."""
        last_epoch = len(self._first_steps) - 1
        num_steps = len(self._batches(last_epoch))
        self._first_steps.append(self._first_steps[-1] + num_steps)

    def _batches(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {epoch: self._shuffle(epoch)}
        return self._epochs[epoch]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        """Return the documents of each step of an epoch."""
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


def split_evenly(
    indices: Sequence[int], lengths: Sequence[int], num_shards: int
) -> list[list[int]]:
    """Split the documents of a step into shards of about as many tokens: the longest first, to the smallest shard."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(index)
        sizes[smallest] += lengths[index]
    return shards
