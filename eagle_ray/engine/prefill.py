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
from eagle_ray.sampling.control_state import ControlState
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of, sample


class DraftPrefixState:
    """One entry per block, overwritten whenever the block is filled again."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self.last_features: Float[Tensor, "blocks H"] | None = None  # made when H is known
        self._is_read = [False] * blocks.num_blocks
        # By slot: whether the drafter has read its sequence from the start.
        self._reads_all = [False] * blocks.num_slots

    def fill(self, chunks: list[PromptChunk], features: Float[Tensor, "R H"]) -> None:
        """Keep the target's features of rows that end a block."""
        if self.last_features is None:
            self.last_features = features.new_empty(self._blocks.num_blocks, features.shape[1])

        rows = []
        blocks = []
        first_row = 0
        for chunk in chunks:
            for index in self._completed_blocks(chunk):
                last_position = (index + 1) * self._blocks.size - 1
                rows.append(first_row + last_position - chunk.start)
                blocks.append(self._blocks.block(chunk.sequence.slot, index))
            first_row += chunk.num_tokens

        into = to_device(blocks, features.device)
        ends = to_device(rows, features.device)
        self.last_features.index_copy_(0, into, features[ends])

    def read(self, chunks: list[PromptChunk], drafting: bool) -> list[int]:
        """Record whether the drafter reads the chunks, and return the first position that each may attend to.

        The chunks are recorded in their order, as one may reuse blocks that another fills in this
        pass.
        """
        firsts = []
        for chunk in chunks:
            slot = chunk.sequence.slot
            is_first_chunk = chunk.start == chunk.sequence.num_reused
            if is_first_chunk:
                num_reused_blocks = chunk.num_reused // self._blocks.size
                reused = [self._blocks.block(slot, i) for i in range(num_reused_blocks)]
                self._reads_all[slot] = all(self._is_read[block] for block in reused)

            firsts.append(0 if self._reads_all[slot] else chunk.num_reused)
            self._reads_all[slot] &= drafting
            for index in self._completed_blocks(chunk):
                block = self._blocks.block(slot, index)
                self._is_read[block] = self._reads_all[slot]
        return firsts

    def features_before(self, chunks: list[PromptChunk]) -> Float[Tensor, "B H"]:
        """Return the feature of the token before each chunk, which must start at a block boundary."""
        assert self.last_features is not None, "a reused block was filled before"
        before = []
        for chunk in chunks:
            last_reused = chunk.start // self._blocks.size - 1
            before.append(self._blocks.block(chunk.sequence.slot, last_reused))
        return self.last_features[to_device(before, self.last_features.device)]

    def _completed_blocks(self, chunk: PromptChunk) -> range:
        """Return which of the slot's blocks become full with the chunk."""
        size = self._blocks.size
        return range(chunk.start // size, chunk.end // size)


@dataclass(slots=True)
class Prefill:
    """One pass over prompt chunks, from the chunks to the first tokens on their way to the host.

    Attributes:
        chunks: prompt chunks of the pass.
        batch: the chunks as the target's input.
        drafting: the drafter reads the prompts in this pass, and not only when it drafts.
        sequences: sequences whose first token the pass samples.
        ended: sequences whose prompt ends in the pass, so that they decode from now on: those of
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
        """Return the prompt rows of the pass."""
        return sum(self.batch.lengths)

    def start_copy(self, logits: Float[Tensor, "P V"], tokens: Int[Tensor, " P"]) -> None:
        """Start the copy of the tokens that are sampled from these logits, one for each chunk that ends a prompt."""
        self.sequences = [c.sequence for c in self.chunks if c.needs_sample]
        params = [sequence.sampling for sequence in self.sequences]

        if any(p.wants_logprobs for p in params):
            logprobs = log_probs_of(logits, tokens)
        else:
            logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        tops: tuple[Tensor, ...] = ()
        num_tops = max((p.num_top_logprobs for p in params), default=0)
        if num_tops:
            tops = likeliest(logits, num_tops)
        self._copy = DeviceToHost(tokens, logprobs, *tops)

        # A preempted sequence goes on from the last token it had; one that is scored does not decode yet.
        joining = [i for i, s in enumerate(self.sequences) if s.status is SequenceStatus.RUNNING]
        resumed = []
        for chunk in self.chunks:
            is_running = chunk.sequence.status is SequenceStatus.RUNNING
            if chunk.is_last and not chunk.needs_sample and is_running:
                resumed.append(chunk.sequence)
        self.ended = [self.sequences[i] for i in joining]
        self.ended += resumed
        self.roots = tokens
        if len(joining) < len(self.sequences):
            self.roots = tokens[to_device(joining, tokens.device)]
        if resumed:
            resumed_roots = to_device([s.root for s in resumed], tokens.device)
            self.roots = torch.cat([self.roots, resumed_roots])

    def read(self) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence with its first token, whose log-probabilities are recorded if requested."""
        tokens, logprobs, *tops = self._copy.read()
        likeliest_of = paired(*tops) if tops else [[] for _ in tokens]
        each = zip(self.sequences, tokens, logprobs, likeliest_of, strict=True)
        for sequence, token, logprob, top in each:
            sequence.first_token_at = time.monotonic()
            record_outputs(sequence, [logprob], [top])
            yield sequence, token


class Prefiller:
    """Runs one step's prompt chunks, whose slots and blocks are reserved."""

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
        slots = [c.sequence.slot for c in chunks]
        parts = [c.sequence.token_ids[c.start : c.end] for c in chunks]
        starts = [c.start for c in chunks]
        batch = PromptBatch.of(slots, parts, self._device, starts)
        return Prefill(chunks, batch, drafting)

    def run(self, prefill: Prefill) -> None:
        """Run the chunks through target and drafter in a pass of their own, and sample the first tokens."""
        self.finish(prefill, retry_portable(lambda: self._target.prefill(prefill.batch)))

    def finish(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Do everything that follows the target's pass over these prompts."""
        chunks = prefill.chunks
        prompts = prefill.batch
        logits = passed.logits
        features = passed.features
        self._record(prefill, passed)
        for i, chunk in enumerate(chunks):
            if chunk.is_last and chunk.sequence.status is SequenceStatus.SCORING:
                chunk.sequence.first_token_at = time.monotonic()
                self.scorer.record_root(chunk.sequence, logits[i])

        ending = self._tensor([i for i, c in enumerate(chunks) if c.needs_sample])
        tokens = self._sample(prefill, logits, ending)

        # The drafter reads pairs of a feature and the token after it.
        next_ids: list[int] = []
        for chunk in chunks:
            next_ids += _next_ids(chunk)
        last_rows = prompts.last[ending]
        next_tokens = self._tensor(next_ids).index_copy(0, last_rows, tokens)

        # A chunk may reuse blocks that another one fills in this pass, so blocks are filled first.
        self.prefix_state.fill(chunks, features)
        firsts = self.prefix_state.read(chunks, prefill.drafting)
        self._attach_prefixes(chunks, firsts)
        read = self._drafter.prefill if prefill.drafting else self._drafter.prefill_deferred
        retry_portable(lambda: read(prompts, next_tokens, features))
        prefill.start_copy(logits[ending], tokens)

    def _sample(
        self, prefill: Prefill, logits: Float[Tensor, "B V"], ending: Int[Tensor, " P"]
    ) -> Int[Tensor, " P"]:
        """Return the first tokens of the chunks that end a prompt; with controls, sampled from adjusted logits."""
        chunks = prefill.chunks
        prompts = prefill.batch
        sampling = SamplingBatch.of([c.sequence.sampling for c in chunks], self._device)
        positions = prompts.positions[prompts.last[ending]] + 1
        tokens = retry_portable(lambda: sample(logits[ending], sampling, ending, positions))

        # Sequences with controls: their index among the ending chunks, and among all chunks.
        controlled: list[int] = []
        controlled_chunks: list[int] = []
        states: list[tuple[ControlState, list[list[int]]]] = []
        ends = [i for i, chunk in enumerate(chunks) if chunk.needs_sample]
        for index, i in enumerate(ends):
            sequence = chunks[i].sequence
            if sequence.controls is not None:
                controlled.append(index)
                controlled_chunks.append(i)
                states.append((synced(sequence), [[]]))
        if not controlled:
            return tokens

        indices, rows = self._tensor([controlled, controlled_chunks])
        adjusted = retry_portable(
            lambda: sample_adjusted(logits, rows, states, sampling, rows, positions[indices])
        )
        return tokens.index_copy(0, indices, adjusted)

    def _record(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Record the chunk's log-probabilities for sequences that request their prompt's."""
        hidden_by_chunk = passed.hidden.split(prefill.batch.lengths)
        for chunk, hidden in zip(prefill.chunks, hidden_by_chunk, strict=True):
            if not chunk.sequence.sampling.wants_prompt_logprobs:
                continue
            for i, rows in enumerate(hidden.split(SLICE_ROWS)):
                start = chunk.start + i * SLICE_ROWS
                record_prompts(chunk.sequence, start, self._target.logits(rows))

    def _attach_prefixes(self, chunks: list[PromptChunk], firsts: list[int]) -> None:
        """Attach cached prefixes in the drafter, with the pair after each of them."""
        reusing = [c for c in chunks if c.num_reused]
        if not reusing:
            return
        slots = [c.sequence.slot for c in reusing]
        first_of = zip(chunks, firsts, strict=True)
        reused_firsts = [first for c, first in first_of if c.num_reused]
        starts = [c.start for c in reusing]
        tokens = [c.sequence.prompt_ids[c.start] for c in reusing]
        features = self.prefix_state.features_before(reusing)
        self._drafter.attach_prefix(slots, reused_firsts, starts, self._tensor(tokens), features)

    def _tensor(self, values: list[int] | list[list[int]]) -> Int[Tensor, "..."]:
        return to_device(values, self._device)


def _next_ids(chunk: PromptChunk) -> list[int]:
    """Return the token after each token of a chunk. The last one is 0 if it is not sampled yet."""
    ids = chunk.sequence.token_ids[chunk.start + 1 : chunk.end + 1]
    return ids + [0] * (chunk.num_tokens - len(ids))
