"""What one step works on: DecodeBatch, the sequences that decode, and PrefillChunk, a part of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.sequence import Sequence
from eagle_ray.kv.kv_cache import DecodeSlots
from eagle_ray.sampling.sampler import SamplingBatch


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, end) of one sequence's prompt, to be computed in this step.

    Attributes:
        num_reused: tokens before start that were found in the prefix cache; 0 except in a sequence's first chunk.
        is_last: the sequence decodes from the next step on.
    """

    sequence: Sequence
    start: int
    end: int
    num_reused: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def needs_sample(self) -> bool:
        """Return whether the chunk's last row is sampled; a preempted sequence has its next token already."""
        return self.is_last and not self.sequence.output_ids


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The running sequences, in slot order, and their state as tensors.

    Attributes:
        at: the slots and their cached lengths.
        roots: the last committed token of each sequence.
        remaining_tokens: tokens that each sequence may still produce, an upper bound.
        remaining_on_device: the same number on the device.
        can_draft: indices of sequences that have KV space for a tree, not only for the root; None if all have.
        num_prefill_rows: prompt rows that go through the target in the same pass.
    """

    sequences: list[Sequence]
    at: DecodeSlots
    roots: Int[Tensor, " B"]
    sampling: SamplingBatch
    remaining_tokens: list[int]
    remaining_on_device: Int[Tensor, " B"]
    can_draft: tuple[int, ...] | None
    num_prefill_rows: int = 0

    @property
    def num_cached(self) -> int:
        """Return an upper bound on the cached tokens of all sequences."""
        return sum(self.at.host_lengths)

    @property
    def controlled(self) -> list[int]:
        """Return the indices of sequences with controls."""
        return [i for i, sequence in enumerate(self.sequences) if sequence.controls is not None]

    def __len__(self) -> int:
        return len(self.sequences)
