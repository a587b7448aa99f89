"""The inputs of one step: DecodeBatch, the sequences that decode, and PromptChunk, a part of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [start, end) of one sequence's prompt, to be computed in this step.

    Attributes:
        num_reused: tokens before start that were found in the prefix cache; 0 except in a
            sequence's first chunk.
        is_last: whether the prompt ends here, so that the sequence decodes from the next step on.
    """

    sequence: TokenSequence
    start: int
    end: int
    num_reused: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def needs_sample(self) -> bool:
        """Return whether the chunk's last row is sampled.

        A preempted sequence already has its next token, and a sequence that is only scored gets
        none.
        """
        return self.is_last and self.sequence.generates and not self.sequence.output_ids


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """The slots of B sequences and their cached lengths, on the device and on the host.

    Attributes:
        bound: upper bound on all lengths, if they are unknown to the host because the previous step
            is not read yet, or because a captured pass serves any lengths. host_lengths then holds
            bounds, or nothing.
        max_total: upper bound on the sum of all lengths; None is the sum of host_lengths.
    """

    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    host_slots: list[int]
    host_lengths: list[int]
    bound: int | None = None
    max_total: int | None = None

    @classmethod
    def of(
        cls, slots: list[int], lengths: list[int], device: torch.device | str = "cpu"
    ) -> DecodeSlots:
        both = to_device([slots, lengths], device)
        return cls(both[0], both[1], slots, lengths)

    @classmethod
    def with_max_length(
        cls, slots: Int[Tensor, " B"], lengths: Int[Tensor, " B"], bound: int
    ) -> DecodeSlots:
        """Return slots for a captured pass that serves any lengths up to `bound`, which is at least 1."""
        return cls(slots, lengths, [], [], bound)

    def select(self, members: Sequence[int]) -> DecodeSlots:
        """Return the slots of these sequences of the batch."""
        slots, lengths = (
            [values[i] for i in members] for values in (self.host_slots, self.host_lengths)
        )
        return DecodeSlots.of(slots, lengths, self.slots.device)

    @property
    def min_length(self) -> int:
        return 0 if self.bound is not None else min(self.host_lengths)

    @property
    def max_length(self) -> int:
        return self.bound if self.bound is not None else max(self.host_lengths)

    @property
    def total_length(self) -> int:
        """Return the sum of all lengths, or an upper bound of it."""
        return (
            sum(self.host_lengths)
            if self.max_total is None
            else min(sum(self.host_lengths), self.max_total)
        )

    def shifted(self, num_tokens: int) -> DecodeSlots:
        """Return these slots with each length increased by `num_tokens`."""
        bound = None if self.bound is None else self.bound + num_tokens
        return DecodeSlots(
            self.slots,
            self.lengths + num_tokens,
            self.host_slots,
            [n + num_tokens for n in self.host_lengths],
            bound,
        )


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The running sequences, in slot order, and their state as tensors.

    Attributes:
        at: slots of the sequences, with their cached lengths.
        roots: the last committed token of each sequence.
        remaining_tokens: upper bound on the tokens that each sequence may still produce.
        remaining_on_device: remaining_tokens as a tensor on the device.
        can_draft: indices of sequences that may have a draft tree, because there is KV space for it
            and their grammar is not slow; None is all.
        num_prefill_rows: number of prompt rows in the target's pass of this step.
    """

    sequences: list[TokenSequence]
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
