"""Scheduler: which sequences wait, which run in which slot, and what the next step is made of.

First come, first served: a finished sequence's slot is refilled at the next step. Does not know the model or time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.engine.sequence import Sequence, Status
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.speculative.sampling import BatchSampling


@dataclass(frozen=True, slots=True)
class Batch:
    """The running sequences, in slot order, and the same as tensors.

    roots: the last committed token of each. rooms: tokens that each may still produce.
    """

    sequences: list[Sequence]
    at: BatchSlots
    roots: Int[Tensor, " B"]
    sampling: BatchSampling
    rooms: list[int]

    @property
    def mean_context(self) -> float:
        """Tokens cached for a sequence, on average."""
        return sum(self.at.host_lengths) / len(self.at.host_lengths)

    def __len__(self) -> int:
        return len(self.sequences)


class Scheduler:
    """Owns the slots 0 .. num_slots - 1.

    prefill_tokens: most prompt tokens admitted in one step; a longer prompt is admitted alone.
    """

    def __init__(self, num_slots: int, prefill_tokens: int, device: torch.device | str = "cpu"):
        self.num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._device = device
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._free = sorted(range(num_slots), reverse=True)
        self._sampling: tuple[list[Sequence], BatchSampling] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Waiting -> running: as many as there are free slots and room in this step's prefill."""
        admitted: list[Sequence] = []
        room = self._prefill_tokens
        while self._waiting and self._free and (not admitted or len(self._waiting[0].prompt_ids) <= room):
            sequence = self._waiting.popleft()
            sequence.slot, sequence.status = self._free.pop(), Status.RUNNING
            self._running[sequence.slot] = sequence
            room -= len(sequence.prompt_ids)
            admitted.append(sequence)
        return admitted

    def batch(self) -> Batch | None:
        """The unfinished running sequences; None where there are none."""
        sequences = [s for _, s in sorted(self._running.items()) if s.status is Status.RUNNING]
        if not sequences:
            return None
        at = BatchSlots.of([s.slot for s in sequences], [s.num_cached for s in sequences], self._device)
        roots = torch.tensor([s.root for s in sequences], dtype=torch.int64, device=self._device)
        rooms = [s.max_tokens - len(s.output_ids) for s in sequences]
        return Batch(sequences, at, roots, self._sampling_of(sequences), rooms)

    def retire(self) -> list[Sequence]:
        """Running -> finished: free the slots of sequences that are done, and return them."""
        finished = [s for s in self._running.values() if s.status is Status.FINISHED]
        for sequence in finished:
            del self._running[sequence.slot]
            self._free.append(sequence.slot)
        self._free.sort(reverse=True)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """Forget a waiting or running sequence; a slot it held is freed."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self._running.get(sequence.slot) is sequence:
            sequence.status = Status.FINISHED
            self.retire()

    def check_integrity(self) -> None:
        """Every slot is either free or holds the one sequence that says so."""
        held = sorted([*self._free, *self._running])
        assert held == list(range(self.num_slots)), f"slots {held} of {self.num_slots}"
        assert all(sequence.slot == slot for slot, sequence in self._running.items())

    def _sampling_of(self, sequences: list[Sequence]) -> BatchSampling:
        """The batch's sampling tensors, made anew only when its members change."""
        if self._sampling is None or self._sampling[0] != sequences:
            self._sampling = sequences, BatchSampling.of([s.sampling for s in sequences], self._device)
        return self._sampling[1]
