"""Scheduler: decide which sequences run in which slot, and what the next step computes.

Sequences are admitted in the order of the waiting queue, by slots and by KV blocks: a step's
prefill budget goes to the oldest unfinished prompt, then to the head of the queue. A step also
stops at MAX_GATHERED positions, if the passes of this device gather the contexts of chunks. If
blocks run out, draft trees are dropped first; then the youngest sequence is preempted. It returns
to the head of the queue, and its prompt and outputs are prefilled again later. The oldest sequence
always continues.

A pass over one short prompt reads all weights, as one over many does. So where prompts have passes
of their own and latency does not matter, a prompt waits for others while the batch is nearly full
(`group_admissions`).
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

# A group is the batch divided by this; on average half of a group is idle, 3 % of the batch.
GROUP_SHARE = 18
# Steps that a prompt waits for others at most: fewer passes than one in seven steps gain little.
GROUP_STEPS = 7


class Scheduler:
    """Decides which sequences hold the slots and KV blocks of a block manager, and what each step computes.

    Args:
        prefill_tokens: maximum prompt tokens per step.
        tree_positions: positions past a sequence's cached tokens that a drafting step may write; a
            plain step writes one.
        eos_ids: tokens that end a sequence.
        num_gathered: returns the positions that each layer gathers for a chunk behind a context;
            None if this device gathers none.
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
        self.prefill_tokens = prefill_tokens
        self._blocks = blocks
        self._tree_positions = tree_positions
        self._device = device
        self.sampling_table = SamplingTable(self.num_slots, device, eos_ids)
        self._num_gathered = num_gathered or (lambda context, num_rows: 0)
        self._waiting: WaitingQueue = FirstComeQueue()
        self.running: dict[int, Sequence] = {}  # slot -> sequence, oldest first
        # Sequences whose slots are free already and whose last step is not read yet.
        self._ending: list[Sequence] = []
        self._free = sorted(range(self.num_slots), reverse=True)
        self._partial: Sequence | None = None  # its prompt is partly computed
        self._max_wait_steps = 0  # steps that a prompt waits for others
        self._num_wait_steps = 0  # steps that one has waited
        # Sequences in a full batch: the slots, or fewer if KV blocks were short.
        self._full = self.num_slots
        self._last_new = 0  # computed tokens of the last admitted prompt
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(len(self._waiting) or self.running)

    @property
    def max_solo_length(self) -> int:
        """Return the length up to which a sequence that runs alone always has KV blocks for its draft trees."""
        return self._blocks.num_blocks * self._blocks.size - self._tree_positions

    def max_concurrent(self, tokens: int) -> int:
        """Return how many sequences of up to `tokens` tokens can run at once with KV blocks for their trees."""
        blocks = self._blocks
        # `_admit` leaves one more block for each sequence.
        each = blocks.blocks_for(tokens + self._tree_positions) + 1
        each = min(each, blocks.blocks_for(blocks.capacity))
        return min(self.num_slots, blocks.num_blocks // each)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError if it could not be finished even alone."""
        num_prompt = len(sequence.prompt_ids)
        num_more = sequence.max_tokens
        if sequence.scoring is not None:
            num_more = max(num_more, sequence.scoring.longest - 1)
        num_blocks = self._blocks.blocks_for(num_prompt + num_more)
        if num_blocks > self._blocks.num_blocks:
            size = self._blocks.size
            raise RequestError(
                "kv_space",
                f"the prompt of {num_prompt} tokens and its {num_more} output tokens need "
                f"{num_blocks * size} tokens of KV space and there are "
                f"{self._blocks.num_blocks * size}: raise execution.kv_tokens or lower max_tokens",
            )
        self._waiting.add(sequence)

    def score_room(self, sequence: Sequence) -> int:
        """Return how many positions of a slot remain behind the sequence's prompt, for scoring its continuations."""
        blocks = self._blocks
        return min(blocks.capacity, blocks.num_blocks * blocks.size) - len(sequence.prompt_ids)

    def scoring(self) -> list[Sequence]:
        """Return the running sequences that have rows of continuations left to score, oldest first."""
        return [s for s in self.running.values() if s.status is SequenceStatus.SCORING]

    def order_for_throughput(self) -> None:
        """From now on, admit sequences in the order of a ThroughputQueue."""
        queue = ThroughputQueue(self._blocks.size)
        for sequence in self._waiting:
            queue.add(sequence)
        self._waiting = queue

    def group_admissions(self) -> None:
        """From now on, let prompts wait for others so that they are computed together, for at most GROUP_STEPS steps.

        They wait while the batch is nearly full (it lacks less than one GROUP_SHARE-th of its
        sequences) and while the prompts that fit, each as long as the last one, do not fill a
        step's prefill budget.
        """
        self._max_wait_steps = GROUP_STEPS

    def reserve_or_preempt(self) -> int:
        """Reserve blocks for what this step may write, and return the number of preempted sequences.

        If blocks do not suffice, draft trees are dropped first; then the youngest sequences are
        preempted.
        """
        if self._reserve(self._decoding(), self._tree_positions):
            return 0

        for sequence in self._decoding():
            self._blocks.trim(sequence.slot, sequence.num_cached + 1)

        before = self.num_preemptions
        while not self._reserve(self._decoding(), 1):
            youngest = list(self.running.values())[-1]
            self.preempt(youngest)

        # The oldest sequences draft with the blocks that are left.
        for sequence in self._decoding():
            self._reserve([sequence], self._tree_positions)
        return self.num_preemptions - before

    def chunks(self) -> list[PromptChunk]:
        """Return the prompt chunks of this step. Waiting sequences are admitted while the prefill budget lasts."""
        chunks: list[PromptChunk] = []
        if self._partial is None and self._holds_back():
            return chunks

        self._num_wait_steps = 0
        self._full = self.num_slots
        budget = self.prefill_tokens
        gathered = 0
        while budget:
            partial = self._partial or self._admit()
            if partial is None:
                break
            context = partial.num_prefilled
            num_rows = min(budget, partial.num_to_prefill - context)
            gathered += self._num_gathered(context, num_rows)
            if chunks and gathered > MAX_GATHERED:
                break  # the next step begins with it
            chunk = self._next_chunk(partial, budget)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def batch(self) -> DecodeBatch | None:
        """Return the sequences that decode in this step, or None if there are none."""
        sequences = sorted(self._decoding(), key=lambda s: s.slot)
        if not sequences:
            return None
        self._blocks.sync_table()

        # One copy to the device for all of them.
        slots = [s.slot for s in sequences]
        lengths = [s.num_cached for s in sequences]
        roots = [s.root for s in sequences]
        remaining = [s.remaining_tokens for s in sequences]
        at, length_at, root_at, remaining_at = to_device(
            [slots, lengths, roots, remaining], self._device
        )

        # A sequence without blocks for a tree decodes plainly.
        lacking = self._blocks.num_missing(slots, [n + self._tree_positions for n in lengths])
        can_draft = tuple(np.flatnonzero(lacking == 0).tolist())
        return DecodeBatch(
            sequences,
            DecodeSlots(at, length_at, slots, lengths),
            root_at,
            self._sampling_of(sequences),
            remaining,
            remaining_at,
            None if len(can_draft) == len(sequences) else can_draft,
        )

    def next_batch(
        self, batch: DecodeBatch, result: VerifyResult, max_new_tokens: int, num_rows: int
    ) -> DecodeBatch | None:
        """Return the batch after a step of `batch` whose result only the device knows.

        Sequences that had finished before that step, or certainly finish in it, are left out. One
        that happens to finish in it still occupies a row. Returns None if no sequence is left or if
        KV blocks may not suffice.

        Args:
            max_new_tokens: maximum tokens that one sequence can get from that step.
            num_rows: rows of its pass over trees, at least one for each sequence. A sequence gets
                at most as many tokens as it has rows.
        """
        members = [
            i
            for i, s in enumerate(batch.sequences)
            if s.status is SequenceStatus.RUNNING and s.remaining_tokens > 1
        ]
        if not members:
            return None

        # What the host knows: bounds on the lengths, for which blocks are reserved.
        sequences = [batch.sequences[i] for i in members]
        slots = np.array([s.slot for s in sequences], dtype=np.int64)
        num_cached = np.array([s.num_cached for s in sequences], dtype=np.int64)
        remaining = np.array([s.remaining_tokens for s in sequences], dtype=np.int64)
        lasts = num_cached + remaining - 1  # cached before the last possible token
        bounds = np.minimum(num_cached + max_new_tokens, lasts)
        if not self._blocks.reserve_each(slots, bounds + self._tree_positions):
            return None
        self._blocks.sync_table()

        # A sequence that is left out has at least one of the rows, and adds no token.
        num_left_out = len(batch) - len(members)
        max_total = int(num_cached.sum()) + num_rows - num_left_out

        # What only the device knows: lengths, roots and remaining tokens.
        numbers = torch.from_numpy(np.stack([slots, members, lasts]))
        at, rows, last_at = copy_to_device(numbers, self._device)
        accepted = result.num_accepted[rows]
        lengths = torch.minimum(batch.at.lengths[rows] + accepted + 1, last_at)
        roots = result.tokens[rows, accepted]
        remaining_at = (batch.remaining_on_device[rows] - accepted - 1).clamp(min=1)
        return DecodeBatch(
            sequences,
            DecodeSlots(at, lengths, slots.tolist(), bounds.tolist(), int(bounds.max()), max_total),
            roots,
            self._sampling_of(sequences),
            (remaining - max_new_tokens).tolist(),
            remaining_at,
            None,
        )

    def join(
        self, batch: DecodeBatch, sequences: list[Sequence], roots: Int[Tensor, " E"]
    ) -> DecodeBatch | None:
        """Return the batch with sequences added whose prompts were launched, and whose first tokens
        only the device knows.

        Sequences that certainly end with their first token are left out. Returns None if KV blocks
        may not suffice.

        Args:
            roots: the last tokens of these sequences.
        """
        # A sequence without outputs gets its first token from its prompt's pass.
        remaining = [s.remaining_tokens - (not s.output_ids) for s in sequences]
        members = [i for i, number in enumerate(remaining) if number > 0]
        if not members:
            return batch

        joining = [sequences[i] for i in members]
        own_slots = [s.slot for s in joining]
        own_lengths = [s.num_to_prefill for s in joining]
        own_remaining = [remaining[i] for i in members]
        num_positions = [length + self._tree_positions for length in own_lengths]
        if not self._blocks.reserve_each(own_slots, num_positions):
            return None
        self._blocks.sync_table()

        # Members of a batch are in the order of their slots.
        slots = [*batch.at.host_slots, *own_slots]
        order = sorted(range(len(slots)), key=slots.__getitem__)

        def in_order(before: list, own: list) -> list:
            both = [*before, *own]
            return [both[i] for i in order]

        place = to_device(order, self._device)
        own = [own_slots, own_lengths, own_remaining, members]
        slot_at, length_at, remaining_at, rows = to_device(own, self._device)

        def in_order_at(before: Tensor, own: Tensor) -> Tensor:
            return torch.cat([before, own])[place]

        all_sequences = in_order(batch.sequences, joining)
        bounds = in_order(batch.at.host_lengths, own_lengths)
        return DecodeBatch(
            all_sequences,
            DecodeSlots(
                in_order_at(batch.at.slots, slot_at),
                in_order_at(batch.at.lengths, length_at),
                in_order(batch.at.host_slots, own_slots),
                bounds,
                max(bounds),
                batch.at.total_length + sum(own_lengths),
            ),
            in_order_at(batch.roots, roots[rows]),
            self._sampling_of(all_sequences),
            in_order(batch.remaining_tokens, own_remaining),
            in_order_at(batch.remaining_on_device, remaining_at),
            None,
        )

    def release_ending(self, batch: DecodeBatch) -> None:
        """Free the slots of sequences that certainly finish in the launched step of `batch`.

        Prompts launched from now on run after that step, so they may use these slots and their
        blocks. `retire` returns the sequences once the step is read.
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
        for slot, sequence in self.running.items():
            assert sequence.slot == slot

        for sequence in self._waiting:
            assert sequence.slot == NO_SLOT
            assert sequence.status is SequenceStatus.WAITING

        prefilling = [s for s in self.running.values() if s.status is SequenceStatus.PREFILLING]
        partial = [] if self._partial is None else [self._partial]
        assert prefilling == partial

        for slot in self._free:
            assert self._blocks.blocks_needed(slot, 1) == 1, "a free slot holds blocks"
        self._blocks.check_integrity()

    def _decoding(self) -> list[Sequence]:
        """Return the running sequences whose prompts are computed, oldest first."""
        return [s for s in self.running.values() if s.status is SequenceStatus.RUNNING]

    def _reserve(self, sequences: list[Sequence], num_positions: int) -> bool:
        """Reserve positions past the cached tokens, for all of the sequences or for none. Return whether it did."""
        slots = [s.slot for s in sequences]
        ends = [s.num_cached + num_positions for s in sequences]
        return self._blocks.reserve_each(slots, ends)

    def preempt(self, sequence: Sequence) -> None:
        """Free the slot of a running sequence and put it back at the head of the queue."""
        self.num_preemptions += 1
        self._release(sequence)
        if sequence.scoring is not None and not sequence.scoring.is_complete:
            sequence.scoring.restart()
        sequence.slot = NO_SLOT
        sequence.status = SequenceStatus.WAITING
        self._waiting.put_back(sequence)

    def _holds_back(self) -> bool:
        """Return whether the first waiting sequence waits for others in this step."""
        if not self._max_wait_steps or not len(self._waiting):
            return False
        num_missing = self._full - len(self.running)
        lacks_group = num_missing * GROUP_SHARE >= self._full
        fills_budget = num_missing * self._last_new >= self.prefill_tokens
        self._num_wait_steps += num_missing > 0
        if lacks_group or fills_budget:
            return False
        return self._num_wait_steps <= self._max_wait_steps

    def _admit(self) -> Sequence | None:
        """Admit and return the first waiting sequence if there are blocks for its tokens and a tree.

        One block is left for each running sequence that can grow, so that an admitted sequence is
        not preempted at once.
        """
        if not len(self._waiting) or not self._free:
            return None
        blocks = self._blocks
        sequence = self._waiting.first()
        slot = self._free[-1]
        spare = blocks.num_growing

        # Log-probabilities of a prompt and its mean need all of its rows, so nothing of it is reused.
        reused = 0
        if not sequence.needs_all_rows:
            reused = blocks.attach_prefix(slot, sequence.prompt_ids)

        num_positions = self._positions_of(sequence)
        if blocks.blocks_needed(slot, num_positions) + spare <= blocks.num_available:
            blocks.reserve(slot, num_positions)
        elif self.running:
            blocks.free(slot)
            self._full = len(self.running)
            return None
        else:  # alone, it goes without trees, but not without rows of its continuations
            num_scored = 1 if sequence.scoring is None else max(sequence.scoring.num_positions, 1)
            blocks.reserve(slot, sequence.num_to_prefill + num_scored)

        self._waiting.pop()
        sequence.slot = self._free.pop()
        sequence.status = SequenceStatus.PREFILLING
        sequence.num_reused = reused
        sequence.num_prefilled = reused
        self._last_new = sequence.num_to_prefill - reused
        self.running[slot] = sequence
        self._partial = sequence
        return sequence

    def _positions_of(self, sequence: Sequence) -> int:
        """Return the positions that are reserved for a sequence at its admission, all that its scores need included."""
        num_more = self._tree_positions if sequence.generates else 0
        if sequence.scoring is not None and not sequence.scoring.is_complete:
            num_more = max(num_more, sequence.scoring.num_positions)
        return sequence.num_to_prefill + num_more

    def _next_chunk(self, sequence: Sequence, budget: int) -> PromptChunk:
        """Return the sequence's next chunk. After its last chunk the sequence decodes."""
        start = sequence.num_prefilled
        end = min(start + budget, sequence.num_to_prefill)
        is_last = end == sequence.num_to_prefill
        self._blocks.cache_full_blocks(sequence.slot, sequence.prompt_ids[:end])
        sequence.num_prefilled = end
        if is_last:
            is_scored = sequence.scoring is not None and not sequence.scoring.is_complete
            sequence.status = SequenceStatus.SCORING if is_scored else SequenceStatus.RUNNING
            self._partial = None
            self.sampling_table.set(sequence.slot, sequence.sampling)

        num_reused = start if start == sequence.num_reused else 0
        return PromptChunk(sequence, start, end, num_reused, is_last)

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
            slots = [s.slot for s in sequences]
            self._sampling = (sequences, self.sampling_table.batch(slots))
        return self._sampling[1]
