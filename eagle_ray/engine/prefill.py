"""Prefill: one pass of prompt chunks through target and drafter, which samples the first token after each prompt.

    prefill = prefiller.prefill_of(chunks, drafting=True)
    prefiller.run(prefill)                                   # launched; or `finish` after a pass with decoding rows
    for sequence, token in prefill.read(): ...

A chunk that follows blocks from the prefix cache starts in the middle of a prompt, for target and
drafter alike. A block enters the prefix cache once the target has filled it. DraftPrefixState keeps
two more things per block, for the drafter: the feature of its last token, which is part of the next
input, and whether the drafter has read all tokens up to its end. If it has not, a sequence that
reuses the block drafts from later tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.control_state import ControlState
from eagle_ray.core.decode_batch import PromptChunk
from eagle_ray.core.device import DeviceToHost, to_device
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence, SequenceStatus
from eagle_ray.engine.controlled_sequences import sample_adjusted, synced
from eagle_ray.engine.scoring import ContinuationScorer
from eagle_ray.engine.step import likeliest, paired, record_outputs, record_prompts
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.methods.drafter import Drafter
from eagle_ray.models.target import PromptBatch, TargetModel, TargetOutput
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of, sample


class DraftPrefixState:
    """Per KV block, what the drafter needs if a prompt reuses the block from the prefix cache.

    There is one entry per block, overwritten when the block is filled again.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self.last_features: Float[Tensor, "blocks H"] | None = None  # made when H is known
        self._is_read = [False] * blocks.num_blocks
        # By slot: whether the drafter has read its sequence from the start.
        self._reads_all = [False] * blocks.num_slots

    def fill(self, chunks: list[PromptChunk], features: Float[Tensor, "R H"]) -> None:
        """Store the target's features of the rows that end a block."""
        if self.last_features is None:
            num_blocks = self._blocks.num_blocks
            hidden_size = features.shape[1]
            self.last_features = features.new_empty(num_blocks, hidden_size)

        rows = []
        blocks = []
        first_row = 0
        for chunk in chunks:
            slot = chunk.sequence.slot
            for index in self._completed_blocks(chunk):
                end_of_block = (index + 1) * self._blocks.size
                last_position = end_of_block - 1
                row_in_chunk = last_position - chunk.start
                rows.append(first_row + row_in_chunk)
                block = self._blocks.block(slot, index)
                blocks.append(block)
            first_row += chunk.num_tokens

        into = to_device(blocks, features.device)
        ends = to_device(rows, features.device)
        last_features = features[ends]
        self.last_features.index_copy_(0, into, last_features)

    def read(self, chunks: list[PromptChunk], drafting: bool) -> list[int]:
        """Record whether the drafter reads the chunks, and return the first position that each may attend to.

        The chunks are recorded in their order, because a chunk may reuse blocks that an earlier one
        fills in this pass.
        """
        firsts = []
        for chunk in chunks:
            slot = chunk.sequence.slot
            is_first_chunk = chunk.start == chunk.sequence.num_reused
            if is_first_chunk:
                self._reads_all[slot] = self._has_read_prefix(chunk)

            first = 0
            if not self._reads_all[slot]:
                first = chunk.num_reused
            firsts.append(first)

            self._reads_all[slot] &= drafting
            for index in self._completed_blocks(chunk):
                block = self._blocks.block(slot, index)
                self._is_read[block] = self._reads_all[slot]
        return firsts

    def _has_read_prefix(self, chunk: PromptChunk) -> bool:
        """Return whether the drafter has read all blocks that the chunk's sequence reuses."""
        slot = chunk.sequence.slot
        num_reused_blocks = chunk.num_reused // self._blocks.size
        for index in range(num_reused_blocks):
            block = self._blocks.block(slot, index)
            if not self._is_read[block]:
                return False
        return True

    def features_before(self, chunks: list[PromptChunk]) -> Float[Tensor, "B H"]:
        """Return the feature of the token before each chunk, which must start at a block boundary."""
        assert self.last_features is not None, "a reused block was filled before"
        before = []
        for chunk in chunks:
            slot = chunk.sequence.slot
            num_blocks_before = chunk.start // self._blocks.size
            block = self._blocks.block(slot, num_blocks_before - 1)
            before.append(block)
        index = to_device(before, self.last_features.device)
        return self.last_features[index]

    def _completed_blocks(self, chunk: PromptChunk) -> range:
        """Return which of the slot's blocks become full with the chunk."""
        size = self._blocks.size
        first = chunk.start // size
        end = chunk.end // size
        return range(first, end)


@dataclass(slots=True)
class Prefill:
    """One pass over prompt chunks: its inputs, and the first tokens that it samples, on their way to the host.

    Attributes:
        chunks: prompt chunks of the pass.
        batch: the chunks as the target's input.
        drafting: whether the drafter reads the prompts in this pass already, not only when it
            drafts.
        sequences: sequences whose first token the pass samples.
        ended: sequences that decode after the pass, because their prompt ends in it: those of
            `sequences` that are not scored first, then preempted ones.
        roots: last tokens of `ended`.
    """

    chunks: list[PromptChunk]
    batch: PromptBatch
    drafting: bool
    sequences: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    roots: Int[Tensor, " E"] = field(init=False)
    _copy: DeviceToHost = field(init=False)

    @property
    def num_rows(self) -> int:
        """Return the number of prompt rows in the pass."""
        return sum(self.batch.lengths)

    def start_copy(self, logits: Float[Tensor, "P V"], tokens: Int[Tensor, " P"]) -> None:
        """Sample the first tokens from these logits, one row for each ended prompt, and start their
        copy to the host."""
        self.sequences = [chunk.sequence for chunk in self.chunks if chunk.needs_sample]
        wants_logprobs = False
        num_tops = 0
        for sequence in self.sequences:
            params = sequence.sampling
            wants_logprobs |= params.wants_logprobs
            num_tops = max(num_tops, params.num_top_logprobs)

        logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        if wants_logprobs:
            logprobs = log_probs_of(logits, tokens)
        tops: tuple[Tensor, ...] = ()
        if num_tops:
            tops = likeliest(logits, num_tops)
        is_finite = logits.amax(-1).isfinite()
        sampled = torch.where(is_finite, tokens, -1)
        self._copy = DeviceToHost(sampled, logprobs, *tops)
        self._set_ended(tokens)

    def _set_ended(self, tokens: Int[Tensor, " P"]) -> None:
        """Set the sequences that decode from now on, and their roots.

        Args:
            tokens: the sampled tokens of `sequences`.
        """
        # A sequence that is scored does not decode yet.
        joining = []
        for index, sequence in enumerate(self.sequences):
            if sequence.status is SequenceStatus.RUNNING:
                joining.append(index)
        self.ended = [self.sequences[index] for index in joining]
        self.roots = tokens
        if len(joining) < len(self.sequences):
            index_of_joining = to_device(joining, tokens.device)
            self.roots = tokens[index_of_joining]

        # A preempted sequence goes on from the last token it had.
        resumed = []
        for chunk in self.chunks:
            is_running = chunk.sequence.status is SequenceStatus.RUNNING
            if chunk.is_last and not chunk.needs_sample and is_running:
                resumed.append(chunk.sequence)
        if resumed:
            self.ended += resumed
            last_tokens = [sequence.root for sequence in resumed]
            resumed_roots = to_device(last_tokens, tokens.device)
            self.roots = torch.cat([self.roots, resumed_roots])

    def read(self) -> Iterator[tuple[Sequence, int | None]]:
        """Yield each sequence with its first token, whose log-probabilities are recorded if requested.

        The token is None if the target computed no finite logits.
        """
        tokens, logprobs, *tops = self._copy.read()
        likeliest_of = paired(*tops) if tops else [[] for _ in tokens]
        each = zip(self.sequences, tokens, logprobs, likeliest_of, strict=True)
        for sequence, token, logprob, top in each:
            sequence.first_token_at = time.monotonic()
            if token < 0:
                yield sequence, None
                continue
            record_outputs(sequence, [logprob], [top])
            yield sequence, token


class Prefiller:
    """Runs one step's prompt chunks through target and drafter. Their slots and blocks are already reserved."""

    def __init__(self, target: TargetModel, drafter: Drafter, prefill_tokens: int):
        """Make a prefiller for a target and its drafter.

        Args:
            prefill_tokens: see Engine.
        """
        self._target = target
        self.scorer = ContinuationScorer(target, prefill_tokens)
        self._drafter = drafter
        self._device = target.device
        self.prefix_state = DraftPrefixState(target.cache.blocks)

    def prefill_of(self, chunks: list[PromptChunk], drafting: bool) -> Prefill:
        """Return the pass over these chunks, which is not launched yet."""
        slots = []
        parts = []
        starts = []
        for chunk in chunks:
            token_ids = chunk.sequence.token_ids
            part = token_ids[chunk.start : chunk.end]
            slots.append(chunk.sequence.slot)
            parts.append(part)
            starts.append(chunk.start)
        batch = PromptBatch.of(slots, parts, self._device, starts)
        return Prefill(chunks, batch, drafting)

    def run(self, prefill: Prefill) -> None:
        """Run the chunks through target and drafter in a separate pass, and sample the first tokens."""
        passed = retry_portable(lambda: self._target.prefill(prefill.batch))
        self.finish(prefill, passed)

    def finish(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Complete the prompts after the target's pass: drafter, prefix cache and first tokens."""
        chunks = prefill.chunks
        prompts = prefill.batch
        logits = passed.logits
        features = passed.features
        self._record(prefill, passed)
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            is_scored = sequence.status is SequenceStatus.SCORING
            if chunk.is_last and is_scored:
                sequence.first_token_at = time.monotonic()
                self.scorer.record_root(sequence, logits[i])

        # The first tokens, of the chunks that end a prompt.
        ends = _ends(chunks)
        ending = self._tensor(ends)
        tokens = self._sample(prefill, logits, ending)

        # The drafter reads pairs of a feature and the token after it.
        next_ids: list[int] = []
        for chunk in chunks:
            next_ids += _next_ids(chunk)
        next_tokens = self._tensor(next_ids)
        last_rows = prompts.last[ending]
        next_tokens = next_tokens.index_copy(0, last_rows, tokens)

        # A chunk may reuse blocks that another one fills in this pass, so blocks are filled first.
        self.prefix_state.fill(chunks, features)
        firsts = self.prefix_state.read(chunks, prefill.drafting)
        self._attach_prefixes(chunks, firsts)
        read = self._drafter.prefill_deferred
        if prefill.drafting:
            read = self._drafter.prefill
        retry_portable(lambda: read(prompts, next_tokens, features))
        prefill.start_copy(logits[ending], tokens)

    def _sample(
        self, prefill: Prefill, logits: Float[Tensor, "B V"], ending: Int[Tensor, " P"]
    ) -> Int[Tensor, " P"]:
        """Return the first tokens of the chunks that end a prompt; with controls, sampled from adjusted logits."""
        chunks = prefill.chunks
        prompts = prefill.batch
        params = [chunk.sequence.sampling for chunk in chunks]
        sampling = SamplingBatch.of(params, self._device)
        last_rows = prompts.last[ending]
        last_positions = prompts.positions[last_rows]
        positions = last_positions + 1
        tokens = retry_portable(lambda: sample(logits[ending], sampling, ending, positions))

        # Sequences with controls: their index among the ending chunks, and among all chunks.
        controlled: list[int] = []
        controlled_chunks: list[int] = []
        states: list[tuple[ControlState, list[list[int]]]] = []
        for index, i in enumerate(_ends(chunks)):
            sequence = chunks[i].sequence
            if sequence.controls is not None:
                state = synced(sequence)
                root_alone: list[list[int]] = [[]]
                controlled.append(index)
                controlled_chunks.append(i)
                states.append((state, root_alone))
        if not controlled:
            return tokens

        indices, rows = self._tensor([controlled, controlled_chunks])
        next_positions = positions[indices]
        adjusted = retry_portable(
            lambda: sample_adjusted(logits, rows, states, sampling, rows, next_positions)
        )
        return tokens.index_copy(0, indices, adjusted)

    def _record(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Record the chunk's log-probabilities for sequences that request their prompt's."""
        hidden_by_chunk = passed.hidden.split(prefill.batch.lengths)
        for chunk, hidden in zip(prefill.chunks, hidden_by_chunk, strict=True):
            sequence = chunk.sequence
            if not sequence.sampling.wants_prompt_logprobs:
                continue

            # Logits of a few rows at a time, since each row has the vocabulary's width.
            start = chunk.start
            for rows in hidden.split(SLICE_ROWS):
                logits = self._target.logits(rows)
                record_prompts(sequence, start, logits)
                start += len(rows)

    def _attach_prefixes(self, chunks: list[PromptChunk], firsts: list[int]) -> None:
        """Attach cached prefixes in the drafter, with the pair after each of them."""
        reusing = []
        slots = []
        visible_from = []
        starts = []
        next_ids = []
        for chunk, first in zip(chunks, firsts, strict=True):
            if not chunk.num_reused:
                continue
            sequence = chunk.sequence
            reusing.append(chunk)
            slots.append(sequence.slot)
            visible_from.append(first)
            starts.append(chunk.start)
            next_ids.append(sequence.prompt_ids[chunk.start])
        if not reusing:
            return

        tokens = self._tensor(next_ids)
        features = self.prefix_state.features_before(reusing)
        self._drafter.attach_prefix(slots, visible_from, starts, tokens, features)

    def _tensor(self, values: list[int] | list[list[int]]) -> Int[Tensor, "..."]:
        return to_device(values, self._device)


def _ends(chunks: list[PromptChunk]) -> list[int]:
    """Return the indices of the chunks that end a prompt whose next token is to be sampled."""
    return [index for index, chunk in enumerate(chunks) if chunk.needs_sample]


def _next_ids(chunk: PromptChunk) -> list[int]:
    """Return the token after each token of a chunk. The last one is 0 if it is not sampled yet."""
    first = chunk.start + 1
    end = chunk.end + 1
    ids = chunk.sequence.token_ids[first:end]
    num_missing = chunk.num_tokens - len(ids)
    return ids + [0] * num_missing
