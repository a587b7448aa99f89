"""Scheduler: decide which sequences run in which slot, and what the next step computes.

Sequences are admitted in the order of the waiting queue, by slots and by KV blocks: a step's prefill budget goes to the
oldest unfinished prompt, then to the head of the queue. A step also stops at MAX_GATHERED positions, if the passes of
this device gather the contexts of chunks. If blocks run out, draft trees are dropped first; then the
youngest sequence is preempted. It returns to the head of the queue, and its prompt and outputs are prefilled again
later. The oldest sequence always continues.

A pass over one short prompt reads all weights, as one over many does. So where prompts have passes of their own and
latency does not matter, a prompt waits for others while the batch is nearly full (`group_admissions`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.attention.prefill_metadata import MAX_GATHERED
from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots, PromptChunk
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_batch import SamplingBatch, SamplingTable
from eagle_ray.core.sequence import NO_SLOT, Sequence, SequenceStatus
from eagle_ray.engine.waiting_queue import FirstComeQueue, ThroughputQueue, WaitingQueue
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.tree.draft_tree import VerifyResult

GROUP_SHARE = 18  # a group is the batch divided by this; on average half of it is idle, 3 % of the batch
GROUP_STEPS = 7  # that a prompt waits at most for others: past one pass in seven steps fewer gain little


class Scheduler:
    """Owns the slots of a block manager and gives its blocks to sequences.

    Args:
        prefill_tokens: maximum prompt tokens per step.
        tree_positions: past a sequence's cached tokens, those that a drafting step may write; a plain step writes one.
        eos_ids: tokens that end a sequence.
        num_gathered: positions that a chunk of n rows behind a context makes each layer gather; None gathers nothing.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prefill_tokens: int,
        tree_positions: int,
        device: torch.device | str = "cpu",
        eos_ids: frozenset[int] = frozenset(),
        num_gathered: Callable[[int, int], int] | None = None,
    ):
        self.num_slots = blocks.num_slots
        self.num_preemptions = 0
        self._blocks, self.prefill_tokens, self._tree_positions = blocks, prefill_tokens, tree_positions
        self._device = device
        self.sampling_table = SamplingTable(self.num_slots, device, eos_ids)
        self._num_gathered = num_gathered or (lambda context, num_rows: 0)
        self._waiting: WaitingQueue = FirstComeQueue()
        self.running: dict[int, Sequence] = {}  # by slot, oldest first
        self._ending: list[Sequence] = []  # their slots are free, and their last step is not read yet
        self._free = sorted(range(self.num_slots), reverse=True)
        self._partial: Sequence | None = None  # its prompt is partly computed
        self._max_wait_steps = 0  # steps that a prompt waits for others
        self._num_wait_steps = 0  # steps that one has waited
        self._full = self.num_slots  # sequences in a full batch: slots, or fewer if KV blocks were short
        self._last_new = 0  # tokens that were computed of the last prompt admitted
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(len(self._waiting) or self.running)

    @property
    def max_solo_length(self) -> int:
        """Return the length up to which a sequence that runs alone can draft to its end."""
        return self._blocks.num_blocks * self._blocks.size - self._tree_positions

    def max_concurrent(self, tokens: int) -> int:
        """Return how many sequences of up to `tokens` tokens can run at once with KV blocks for their trees."""
        blocks = self._blocks
        each = blocks.blocks_for(tokens + self._tree_positions) + 1  # and the block that `_admit` leaves for each
        return min(self.num_slots, blocks.num_blocks // min(each, blocks.blocks_for(blocks.capacity)))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError if it could not be finished even alone."""
        num_positions, size = len(sequence.prompt_ids) + sequence.max_tokens, self._blocks.size
        if self._blocks.blocks_for(num_positions) > self._blocks.num_blocks:
            raise RequestError(
                "kv_space",
                f"the prompt of {len(sequence.prompt_ids)} tokens and its {sequence.max_tokens} output tokens need "
                f"{self._blocks.blocks_for(num_positions) * size} tokens of KV space and there are "
                f"{self._blocks.num_blocks * size}: raise execution.kv_tokens or lower max_tokens",
            )
        self._waiting.add(sequence)

    def order_for_throughput(self) -> None:
        """Admit sequences in the order of a ThroughputQueue from now on."""
        queue = ThroughputQueue(self._blocks.size)
        for sequence in self._waiting:
            queue.add(sequence)
        self._waiting = queue

    def group_admissions(self) -> None:
        """Let prompts wait for others from now on, at most GROUP_STEPS steps.

        They wait while the batch lacks less than one GROUP_SHARE-th of its sequences, and while the prompts that it
        has room for, each as long as the last one, do not fill a step's prefill budget.
        """
        self._max_wait_steps = GROUP_STEPS

    def reserve_or_preempt(self) -> int:
        """Reserve blocks for what this step may write; drop trees, then preempt the youngest, until they suffice.
        Return how many were preempted.
        """
        if self._reserve(self._decoding(), self._tree_positions):
            return 0
        before = self.num_preemptions
        for sequence in self._decoding():
            self._blocks.trim(sequence.slot, sequence.num_cached + 1)
        while not self._reserve(self._decoding(), 1):
            self.preempt(list(self.running.values())[-1])
        for sequence in self._decoding():
            self._reserve([sequence], self._tree_positions)
        return self.num_preemptions - before

    def chunks(self) -> list[PromptChunk]:
        """Return the prompt chunks of this step. Waiting sequences are admitted while the prefill budget lasts."""
        chunks: list[PromptChunk] = []
        if self._partial is None and self._holds_back():
            return chunks
        self._num_wait_steps, self._full = 0, self.num_slots
        budget, gathered = self.prefill_tokens, 0
        while budget and (partial := self._partial or self._admit()) is not None:
            context = partial.num_prefilled
            gathered += self._num_gathered(context, min(budget, partial.num_to_prefill - context))
            if chunks and gathered > MAX_GATHERED:
                break  # the next step begins with it
            chunks.append(self._next_chunk(partial, budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def batch(self) -> DecodeBatch | None:
        """Return the sequences that decode in this step, or None if there are none."""
        sequences = sorted(self._decoding(), key=lambda s: s.slot)
        if not sequences:
            return None
        self._blocks.sync_table()
        slots, lengths = [s.slot for s in sequences], [s.num_cached for s in sequences]
        remaining = [s.remaining_tokens for s in sequences]
        at, length_at, roots, remaining_at = to_device(
            [slots, lengths, [s.root for s in sequences], remaining], self._device
        )
        lacking = self._blocks.num_missing(slots, [n + self._tree_positions for n in lengths])
        can_draft = tuple(np.flatnonzero(lacking == 0).tolist())
        return DecodeBatch(
            sequences,
            DecodeSlots(at, length_at, slots, lengths),
            roots,
            self._sampling_of(sequences),
            remaining,
            remaining_at,
            None if len(can_draft) == len(sequences) else can_draft,
        )

    def next_batch(
        self, batch: DecodeBatch, result: VerifyResult, max_new_tokens: int, num_rows: int
    ) -> DecodeBatch | None:
        """Return the batch after a step of `batch` whose result only the device knows.

        Sequences that had finished before that step, or certainly finish in it, are left out. One that happens to
        finish in it still occupies a row. Returns None if no sequence is left or if KV blocks may not suffice.

        Args:
            max_new_tokens: the most tokens that one sequence can get from that step.
            num_rows: rows of its pass over trees, at least one for each sequence, which gets no more tokens than rows.
        """
        members = [
            i for i, s in enumerate(batch.sequences) if s.status is SequenceStatus.RUNNING and s.remaining_tokens > 1
        ]
        sequences = [batch.sequences[i] for i in members]
        slots = np.array([s.slot for s in sequences], dtype=np.int64)
        num_cached = np.array([s.num_cached for s in sequences], dtype=np.int64)
        remaining = np.array([s.remaining_tokens for s in sequences], dtype=np.int64)
        lasts = num_cached + remaining - 1  # cached before the last possible token
        bounds = np.minimum(num_cached + max_new_tokens, lasts)
        if not members or not self._blocks.reserve_each(slots, bounds + self._tree_positions):
            return None
        self._blocks.sync_table()
        max_total = int(num_cached.sum()) + num_rows - (len(batch) - len(members))
        at, rows, last_at = copy_to_device(torch.from_numpy(np.stack([slots, members, lasts])), self._device)
        accepted = result.num_accepted[rows]
        lengths = torch.minimum(batch.at.lengths[rows] + accepted + 1, last_at)
        return DecodeBatch(
            sequences,
            DecodeSlots(at, lengths, slots.tolist(), bounds.tolist(), int(bounds.max()), max_total),
            result.tokens[rows, accepted],
            self._sampling_of(sequences),
            (remaining - max_new_tokens).tolist(),
            (batch.remaining_on_device[rows] - accepted - 1).clamp(min=1),
            None,
        )

    def join(self, batch: DecodeBatch, sequences: list[Sequence], roots: Int[Tensor, " E"]) -> DecodeBatch | None:
        """Return the batch with sequences whose prompts were launched and whose first tokens only the device knows.

        Those that certainly end with their first token are left out. Returns None if KV blocks may not suffice.

        Args:
            roots: the last tokens of these sequences.
        """
        remaining = [s.remaining_tokens - (not s.output_ids) for s in sequences]
        members = [i for i, number in enumerate(remaining) if number > 0]
        joining = [sequences[i] for i in members]
        lengths = [s.num_to_prefill for s in joining]
        if not members:
            return batch
        num_positions = [length + self._tree_positions for length in lengths]
        if not self._blocks.reserve_each([s.slot for s in joining], num_positions):
            return None
        self._blocks.sync_table()
        slots = [*batch.at.host_slots, *(s.slot for s in joining)]
        bounds = [*batch.at.host_lengths, *lengths]
        max_total = batch.at.total_length + sum(lengths)
        sequences = [*batch.sequences, *joining]
        may_produce = [*batch.remaining_tokens, *(remaining[i] for i in members)]

        order = sorted(range(len(slots)), key=slots.__getitem__)
        place = to_device(order, self._device)
        own = [[s.slot for s in joining], lengths, [remaining[i] for i in members], members]
        *numbers, rows = to_device(own, self._device)
        before = (batch.at.slots, batch.at.lengths, batch.remaining_on_device, batch.roots)
        both = zip(before, (*numbers, roots[rows]), strict=True)
        at, length_at, remaining_at, root_at = (torch.cat(each)[place] for each in both)
        sequences = [sequences[i] for i in order]
        return DecodeBatch(
            sequences,
            DecodeSlots(at, length_at, [slots[i] for i in order], [bounds[i] for i in order], max(bounds), max_total),
            root_at,
            self._sampling_of(sequences),
            [may_produce[i] for i in order],
            remaining_at,
            None,
        )

    def release_ending(self, batch: DecodeBatch) -> None:
        """Free the slots of sequences that certainly finish in a step of `batch`, which was launched.

        Prompts launched from now on run after that step, so they may use these slots and their blocks. `retire` returns
        the sequences once the step is read.
        """
        for sequence in batch.sequences:
            if sequence.status is SequenceStatus.RUNNING and sequence.remaining_tokens <= 1:
                self._release(sequence)
                self._ending.append(sequence)

    def retire(self) -> list[Sequence]:
        """Free the slots of finished sequences and return the sequences."""
        finished = [s for s in self.running.values() if s.status is SequenceStatus.FINISHED]
        for sequence in finished:
            self._release(sequence)
        finished = [*self._ending, *finished]
        self._ending = []
        for sequence in finished:
            self._waiting.observe(sequence)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence and free its slot and blocks."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self.running.get(sequence.slot) is sequence:
            sequence.status = SequenceStatus.FINISHED
            self._release(sequence)

    def check_integrity(self) -> None:
        """Assert that every slot is free or holds exactly one sequence, and likewise for blocks."""
        used = sorted([*self._free, *self.running])
        assert used == list(range(self.num_slots)), f"slots {used} of {self.num_slots}"
        assert all(sequence.slot == slot for slot, sequence in self.running.items())
        waiting = (NO_SLOT, SequenceStatus.WAITING)
        assert all((sequence.slot, sequence.status) == waiting for sequence in self._waiting)
        prefilling = [s for s in self.running.values() if s.status is SequenceStatus.PREFILLING]
        assert prefilling == ([] if self._partial is None else [self._partial])
        assert all(self._blocks.blocks_needed(slot, 1) == 1 for slot in self._free), "a free slot holds blocks"
        self._blocks.check_integrity()

    def _decoding(self) -> list[Sequence]:
        """Return the running sequences whose prompts are computed, oldest first."""
        return [s for s in self.running.values() if s.status is SequenceStatus.RUNNING]

    def _reserve(self, sequences: list[Sequence], num_positions: int) -> bool:
        """Reserve `num_positions` positions past the cached tokens of all sequences and return True, or of none."""
        return self._blocks.reserve_each([s.slot for s in sequences], [s.num_cached + num_positions for s in sequences])

    def preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._release(sequence)
        sequence.slot, sequence.status = NO_SLOT, SequenceStatus.WAITING
        self._waiting.put_back(sequence)

    def _holds_back(self) -> bool:
        """Return whether the first waiting sequence waits for others in this step."""
        if not self._max_wait_steps or not len(self._waiting):
            return False
        num_missing = self._full - len(self.running)
        is_group = num_missing * GROUP_SHARE >= self._full or num_missing * self._last_new >= self.prefill_tokens
        self._num_wait_steps += num_missing > 0
        return not is_group and self._num_wait_steps <= self._max_wait_steps

    def _admit(self) -> Sequence | None:
        """Admit and return the first waiting sequence if there are blocks for its tokens and a tree.

        One block is left for each running sequence that can grow, so that an admitted sequence is not preempted at
        once.
        """
        if not len(self._waiting) or not self._free:
            return None
        sequence, slot = self._waiting.first(), self._free[-1]
        spare = self._blocks.num_growing
        reused = 0 if sequence.sampling.wants_prompt_logprobs else self._blocks.attach_prefix(slot, sequence.prompt_ids)
        num_positions = sequence.num_to_prefill + self._tree_positions
        if self._blocks.blocks_needed(slot, num_positions) + spare <= self._blocks.num_available:
            self._blocks.reserve(slot, num_positions)
        elif self.running:
            self._blocks.free(slot)
            self._full = len(self.running)
            return None
        else:  # alone, it goes without trees
            self._blocks.reserve(slot, sequence.num_to_prefill + 1)
        self._waiting.pop()
        sequence.slot, sequence.status = self._free.pop(), SequenceStatus.PREFILLING
        sequence.num_reused = sequence.num_prefilled = reused
        self._last_new = sequence.num_to_prefill - reused
        self.running[slot] = self._partial = sequence
        return sequence

    def _next_chunk(self, sequence: Sequence, budget: int) -> PromptChunk:
        """Return the sequence's next chunk. After its last chunk the sequence decodes."""
        start = sequence.num_prefilled
        end = min(start + budget, sequence.num_to_prefill)
        is_last = end == sequence.num_to_prefill
        self._blocks.cache_full_blocks(sequence.slot, sequence.prompt_ids[:end])
        sequence.num_prefilled = end
        if is_last:
            sequence.status, self._partial = SequenceStatus.RUNNING, None
            self.sampling_table.set(sequence.slot, sequence.sampling)
        return PromptChunk(sequence, start, end, start if start == sequence.num_reused else 0, is_last)

    def _release(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence."""
        self._blocks.free(sequence.slot)
        del self.running[sequence.slot]
        self._free.append(sequence.slot)
        self._free.sort(reverse=True)
        if self._partial is sequence:
            self._partial = None

    def _sampling_of(self, sequences: list[Sequence]) -> SamplingBatch:
        """Return the batch's sampling tensors, which are rebuilt only if its members change."""
        if self._sampling is None or self._sampling[0] != sequences:
            self._sampling = sequences, self.sampling_table.batch([s.slot for s in sequences])
        return self._sampling[1]
