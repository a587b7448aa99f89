"""Scheduler: which sequences wait, which run in which slot, and what the next step is made of.

First come, first served, by slots and by KV space: a step's prefill budget goes to the oldest prompt that is not done,
then to the head of the queue. When blocks run out, trees are cut first, then the youngest sequence is pre-empted: it
goes back to the head of the queue and is prefilled anew, outputs included. The oldest always goes on.
Does not know the model or time.
"""

from __future__ import annotations

from collections import deque

import torch

from eagle_ray.async_copy import to_device
from eagle_ray.core.decode_batch import DecodeBatch, PrefillChunk
from eagle_ray.core.sequence import Sequence, SequenceStatus
from eagle_ray.errors import RequestError
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import DecodeSlots
from eagle_ray.sampling.sampler import SamplingBatch
from eagle_ray.tree.accept import VerifyResult


class Scheduler:
    """Owns the slots of `blocks` and decides who gets its blocks.

    prefill_tokens: most prompt tokens computed in one step. tree_columns: columns past a sequence's cached tokens that
    a step with drafts may write, in any cache; a plain step writes one. eos_ids: tokens that end a sequence.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prefill_tokens: int,
        tree_columns: int,
        device: torch.device | str = "cpu",
        eos_ids: frozenset[int] = frozenset(),
    ):
        self.num_slots = blocks.num_slots
        self.num_preemptions = 0
        self._blocks, self._prefill_tokens, self._tree_columns = blocks, prefill_tokens, tree_columns
        self._device, self._eos_ids = device, eos_ids
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # by slot, oldest first
        self._free = sorted(range(self.num_slots), reverse=True)
        self._partial: Sequence | None = None  # the one whose prompt is half computed
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def max_solo_length(self) -> int:
        """Tokens of a sequence that can draft to its end while it runs alone."""
        return self._blocks.num_blocks * self._blocks.size - self._tree_columns

    def max_concurrent(self, tokens: int) -> int:
        """How many sequences of up to `tokens` tokens can run at once with room for their trees."""
        blocks = self._blocks
        each = blocks.blocks_for(tokens + self._tree_columns) + 1  # and the block that `_admit` leaves for each
        return min(self.num_slots, blocks.num_blocks // min(each, blocks.blocks_for(blocks.capacity)))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for one that could not be finished even alone."""
        columns, size = len(sequence.prompt_ids) + sequence.max_tokens, self._blocks.size
        if self._blocks.blocks_for(columns) > self._blocks.num_blocks:
            raise RequestError(
                "kv_space",
                f"the prompt of {len(sequence.prompt_ids)} tokens and its {sequence.max_tokens} output tokens need "
                f"{self._blocks.blocks_for(columns) * size} tokens of KV space and there are "
                f"{self._blocks.num_blocks * size}: raise execution.kv_tokens or lower max_tokens",
            )
        self._waiting.append(sequence)

    def reserve_or_preempt(self) -> None:
        """Reserve what the running sequences may write in this step, at the cost of trees, then of the youngest."""
        if self._reserve(self._decoding(), self._tree_columns):
            return
        for sequence in self._decoding():
            self._blocks.trim(sequence.slot, sequence.num_cached + 1)
        while not self._reserve(self._decoding(), 1):
            self._preempt(list(self._running.values())[-1])
        for sequence in self._decoding():
            self._reserve([sequence], self._tree_columns)

    def chunks(self) -> list[PrefillChunk]:
        """The prompt tokens to compute in this step; waiting sequences are admitted while there is budget for them."""
        chunks: list[PrefillChunk] = []
        budget = self._prefill_tokens
        while budget and (self._partial or self._admit()):
            chunks.append(self._next_chunk(self._partial, budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def batch(self) -> DecodeBatch | None:
        """The sequences that decode in this step; None where there are none."""
        sequences = sorted(self._decoding(), key=lambda s: s.slot)
        if not sequences:
            return None
        self._blocks.sync_table()
        slots, lengths = [s.slot for s in sequences], [s.num_cached for s in sequences]
        rooms = [s.remaining_tokens for s in sequences]
        at, length_at, roots, remaining_at = to_device(
            [slots, lengths, [s.root for s in sequences], rooms], self._device
        )
        spacious = tuple(i for i, s in enumerate(sequences) if not self._num_missing([s], self._tree_columns))
        everyone = len(spacious) == len(sequences)
        return DecodeBatch(
            sequences,
            DecodeSlots(at, length_at, slots, lengths),
            roots,
            self._sampling_of(sequences),
            rooms,
            remaining_at,
            None if everyone else spacious,
        )

    def next_batch(self, batch: DecodeBatch, result: VerifyResult, most_tokens: int) -> DecodeBatch | None:
        """What decodes after a step of `batch` whose result is on the device alone: at most so many tokens for each.

        Whoever has finished before that step, or will for sure in it, is left out; who finishes in it otherwise is
        carried along in vain. None where nobody is left, or where there is no KV space for whatever may come.
        """
        members = [
            i for i, s in enumerate(batch.sequences) if s.status is SequenceStatus.RUNNING and s.remaining_tokens > 1
        ]
        sequences = [batch.sequences[i] for i in members]
        lasts = [
            s.num_cached + s.remaining_tokens - 1 for s in sequences
        ]  # cached before the last token that one may produce
        bounds = [min(s.num_cached + most_tokens, last) for s, last in zip(sequences, lasts, strict=True)]
        columns = [bound + self._tree_columns for bound in bounds]
        if not members or not self._reserve_each(sequences, columns):
            return None
        self._blocks.sync_table()
        slots = [s.slot for s in sequences]
        at, rows, last_at = to_device([slots, members, lasts], self._device)
        accepted = result.num_accepted[rows]
        lengths = torch.minimum(batch.at.lengths[rows] + accepted + 1, last_at)
        return DecodeBatch(
            sequences,
            DecodeSlots(at, lengths, slots, bounds, max(bounds)),
            result.tokens[rows, accepted],
            self._sampling_of(sequences),
            [s.remaining_tokens - most_tokens for s in sequences],
            (batch.remaining_at[rows] - accepted - 1).clamp(min=1),
            None,
        )

    def retire(self) -> list[Sequence]:
        """Running -> finished: free the slots of sequences that are done, and return them."""
        finished = [s for s in self._running.values() if s.status is SequenceStatus.FINISHED]
        for sequence in finished:
            self._release(sequence)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """Forget a waiting or running sequence; a slot and blocks it held are freed."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self._running.get(sequence.slot) is sequence:
            sequence.status = SequenceStatus.FINISHED
            self._release(sequence)

    def check_integrity(self) -> None:
        """Every slot is either free or holds the one sequence that says so; blocks likewise."""
        held = sorted([*self._free, *self._running])
        assert held == list(range(self.num_slots)), f"slots {held} of {self.num_slots}"
        assert all(sequence.slot == slot for slot, sequence in self._running.items())
        assert all(sequence.slot is None and sequence.status is SequenceStatus.WAITING for sequence in self._waiting)
        prefilling = [s for s in self._running.values() if s.status is SequenceStatus.PREFILLING]
        assert prefilling == ([] if self._partial is None else [self._partial])
        assert all(self._blocks.blocks_needed(slot, 1) == 1 for slot in self._free), "a free slot holds blocks"
        self._blocks.check_integrity()

    def _decoding(self) -> list[Sequence]:
        """Unfinished sequences whose prompts are computed, oldest first."""
        return [s for s in self._running.values() if s.status is SequenceStatus.RUNNING]

    def _num_missing(self, sequences: list[Sequence], columns: int) -> int:
        """Blocks that the sequences lack to write `columns` columns past their cached tokens each."""
        return sum(self._blocks.blocks_needed(s.slot, s.num_cached + columns) for s in sequences)

    def _reserve(self, sequences: list[Sequence], columns: int) -> bool:
        """Blocks for `columns` columns past the cached tokens of every one of the sequences, or for none of them."""
        return self._reserve_each(sequences, [s.num_cached + columns for s in sequences])

    def _reserve_each(self, sequences: list[Sequence], columns: list[int]) -> bool:
        """Blocks for the first columns[i] columns of every one of the sequences, or for none of them."""
        each = [(s.slot, n) for s, n in zip(sequences, columns, strict=True)]
        if sum(self._blocks.blocks_needed(*wanted) for wanted in each) > self._blocks.num_available:
            return False
        return all(self._blocks.reserve(*wanted) for wanted in each)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._release(sequence)
        sequence.slot, sequence.status = None, SequenceStatus.WAITING
        self._waiting.appendleft(sequence)

    def _admit(self) -> bool:
        """Waiting -> prefilling, with blocks for all that is known of it and a tree; whether it happened.

        A block is left for each of the others that can grow: whoever is admitted should not be pre-empted at once.
        """
        if not self._waiting or not self._free:
            return False
        sequence, slot = self._waiting[0], self._free[-1]
        reused = 0 if sequence.sampling.prompt_logprobs else self._blocks.attach_prefix(slot, sequence.prompt_ids)
        columns = sequence.num_to_prefill + self._tree_columns
        spare = sum(self._blocks.blocks_needed(other, self._blocks.capacity) > 0 for other in self._running)
        if self._blocks.blocks_needed(slot, columns) + spare <= self._blocks.num_available:
            self._blocks.reserve(slot, columns)
        elif self._running:
            self._blocks.free(slot)
            return False
        else:  # alone, it goes without trees
            self._blocks.reserve(slot, sequence.num_to_prefill + 1)
        self._waiting.popleft()
        sequence.slot, sequence.status = self._free.pop(), SequenceStatus.PREFILLING
        sequence.num_reused = sequence.num_prefilled = reused
        self._running[slot] = self._partial = sequence
        return True

    def _next_chunk(self, sequence: Sequence, budget: int) -> PrefillChunk:
        """The sequence's next tokens; from its last chunk on it is one of those that decode."""
        start = sequence.num_prefilled
        end = min(start + budget, sequence.num_to_prefill)
        is_last = end == sequence.num_to_prefill
        self._blocks.cache_full_blocks(sequence.slot, sequence.prompt_ids[:end])
        sequence.num_prefilled = end
        if is_last:
            sequence.status, self._partial = SequenceStatus.RUNNING, None
        return PrefillChunk(sequence, start, end, start if start == sequence.num_reused else 0, is_last)

    def _release(self, sequence: Sequence) -> None:
        """Running -> out: its slot and blocks are free."""
        self._blocks.free(sequence.slot)
        del self._running[sequence.slot]
        self._free.append(sequence.slot)
        self._free.sort(reverse=True)
        if self._partial is sequence:
            self._partial = None

    def _sampling_of(self, sequences: list[Sequence]) -> SamplingBatch:
        """The batch's sampling tensors, made anew only when its members change."""
        if self._sampling is None or self._sampling[0] != sequences:
            params = [s.sampling for s in sequences]
            self._sampling = sequences, SamplingBatch.of(params, self._device, self._eos_ids)
        return self._sampling[1]
