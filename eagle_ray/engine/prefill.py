"""Prefill: one pass of prompt chunks through target and drafter, which samples the first token after each prompt.

    prefill = prefiller.prefill_of(chunks, drafting=True)
    prefiller.run(prefill)                                   # launched; or `finish` after a pass with decoding rows
    for sequence, token in prefill.read(): ...

A chunk that follows blocks from the prefix cache starts in the middle of a prompt, for target and drafter alike. A
block enters the prefix cache once the target has filled it. DraftPrefixState keeps two more things per block, for the
drafter: the feature of its last token, which is part of the next input, and whether the drafter has read all tokens up
to its end. If it has not, a sequence that reuses the block drafts from later tokens only.
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
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.controlled_sequences import sample_adjusted, synced
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
        self._reads_all = [False] * blocks.num_slots  # the drafter has read the slot's sequence from its start

    def fill(self, chunks: list[PromptChunk], features: Float[Tensor, "R H"]) -> None:
        """Keep the target's features of rows that end a block."""
        if self.last_features is None:
            self.last_features = features.new_empty(self._blocks.num_blocks, features.shape[1])
        rows, blocks, first = [], [], 0
        for chunk in chunks:
            for index in self._completed_blocks(chunk):
                rows.append(first + (index + 1) * self._blocks.size - 1 - chunk.start)
                blocks.append(self._blocks.block(chunk.sequence.slot, index))
            first += chunk.num_tokens
        into, ends = to_device(blocks, features.device), to_device(rows, features.device)
        self.last_features.index_copy_(0, into, features[ends])

    def read(self, chunks: list[PromptChunk], drafting: bool) -> list[int]:
        """Record whether the drafter reads the chunks; return the first position that each sequence may attend to
        there.

        In the order of the chunks: one may reuse blocks that another fills in this pass.
        """
        firsts = []
        for chunk in chunks:
            slot, reused = chunk.sequence.slot, chunk.num_reused // self._blocks.size
            if chunk.start == chunk.sequence.num_reused:
                self._reads_all[slot] = all(self._is_read[self._blocks.block(slot, i)] for i in range(reused))
            firsts.append(0 if self._reads_all[slot] else chunk.num_reused)
            self._reads_all[slot] &= drafting
            for index in self._completed_blocks(chunk):
                self._is_read[self._blocks.block(slot, index)] = self._reads_all[slot]
        return firsts

    def features_before(self, chunks: list[PromptChunk]) -> Float[Tensor, "B H"]:
        """Return the feature of the token before each chunk, which must start at a block boundary."""
        assert self.last_features is not None, "a reused block was filled before"
        before = [self._blocks.block(c.sequence.slot, c.start // self._blocks.size - 1) for c in chunks]
        return self.last_features[to_device(before, self.last_features.device)]

    def _completed_blocks(self, chunk: PromptChunk) -> range:
        """Return which of the slot's blocks become full with the chunk."""
        return range(chunk.start // self._blocks.size, chunk.end // self._blocks.size)


@dataclass(slots=True)
class Prefill:
    """One pass over prompt chunks, from the chunks to the first tokens on their way to the host.

    Attributes:
        batch: the chunks as the target's input.
        drafting: the drafter reads the prompts now, and not only when it drafts.
        sequences: those whose first token the pass sampled.
        ended: those whose prompt ended in it, so that they decode from now on: these, then preempted ones.
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
        """Start the copy of the tokens sampled from these logits: one of each chunk that ends a prompt."""
        self.sequences = [c.sequence for c in self.chunks if c.needs_sample]
        params = [sequence.sampling for sequence in self.sequences]
        wants_logprobs = any(p.wants_logprobs for p in params)
        logprobs = log_probs_of(logits, tokens) if wants_logprobs else torch.zeros_like(tokens, dtype=torch.float32)
        num_tops = max((p.num_top_logprobs for p in params), default=0)
        tops = likeliest(logits, num_tops) if num_tops else ()
        self._copy = DeviceToHost(tokens, logprobs, *tops)

        resumed = [c.sequence for c in self.chunks if c.is_last and not c.needs_sample]
        self.ended = [*self.sequences, *resumed]
        self.roots = torch.cat([tokens, to_device([s.root for s in resumed], tokens.device)]) if resumed else tokens

    def read(self) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence with its first token, whose log-probabilities are recorded if requested."""
        tokens, logprobs, *tops = self._copy.read()
        likeliest_of = paired(*tops) if tops else [[] for _ in tokens]
        for sequence, token, logprob, top in zip(self.sequences, tokens, logprobs, likeliest_of, strict=True):
            sequence.first_token_at = time.monotonic()
            record_outputs(sequence, [logprob], [top])
            yield sequence, token


class Prefiller:
    """Runs one step's prompt chunks, whose slots and blocks are reserved."""

    def __init__(self, target: TargetModel, drafter: Drafter):
        self._target, self._drafter, self._device = target, drafter, target.device
        self.prefix_state = DraftPrefixState(target.cache.blocks)

    def prefill_of(self, chunks: list[PromptChunk], drafting: bool) -> Prefill:
        """Return the pass over these chunks, which is not launched yet."""
        parts = [c.sequence.token_ids[c.start : c.end] for c in chunks]
        slots, starts = [c.sequence.slot for c in chunks], [c.start for c in chunks]
        return Prefill(chunks, PromptBatch.of(slots, parts, self._device, starts), drafting)

    def run(self, prefill: Prefill) -> None:
        """Run the chunks through target and drafter in a pass of their own, and sample the first tokens."""
        self.finish(prefill, retry_portable(lambda: self._target.prefill(prefill.batch)))

    def finish(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Do everything that follows the target's pass over these prompts."""
        chunks, prompts = prefill.chunks, prefill.batch
        logits, features = passed.logits, passed.features
        self._record(prefill, passed)
        ending = self._tensor([i for i, c in enumerate(chunks) if c.needs_sample])
        tokens = self._sample(prefill, logits, ending)

        known = [c.sequence.token_ids[c.start + 1 : c.end + 1] for c in chunks]
        after = [ids + [0] * (c.num_tokens - len(ids)) for ids, c in zip(known, chunks, strict=True)]
        next_tokens = self._tensor([i for ids in after for i in ids]).index_copy(0, prompts.last[ending], tokens)
        self.prefix_state.fill(chunks, features)
        self._attach_prefixes(chunks, self.prefix_state.read(chunks, prefill.drafting))
        read = self._drafter.prefill if prefill.drafting else self._drafter.prefill_deferred
        retry_portable(lambda: read(prompts, next_tokens, features))
        prefill.start_copy(logits[ending], tokens)

    def _sample(self, prefill: Prefill, logits: Float[Tensor, "B V"], ending: Int[Tensor, " P"]) -> Int[Tensor, " P"]:
        """Return the first tokens of the chunks that end a prompt; with controls, sampled from adjusted logits."""
        chunks, prompts = prefill.chunks, prefill.batch
        sampling = SamplingBatch.of([c.sequence.sampling for c in chunks], self._device)
        positions = prompts.positions[prompts.last[ending]] + 1
        tokens = retry_portable(lambda: sample(logits[ending], sampling, ending, positions))

        ends = [i for i, chunk in enumerate(chunks) if chunk.needs_sample]
        controlled = [index for index, i in enumerate(ends) if chunks[i].sequence.controls is not None]
        if not controlled:
            return tokens
        paths: list[tuple[ControlState, list[list[int]]]]
        paths = [(synced(chunks[ends[index]].sequence), [[]]) for index in controlled]
        indices, rows = self._tensor([controlled, [ends[index] for index in controlled]])
        adjusted = retry_portable(lambda: sample_adjusted(logits, rows, paths, sampling, rows, positions[indices]))
        return tokens.index_copy(0, indices, adjusted)

    def _record(self, prefill: Prefill, passed: TargetOutput) -> None:
        """Record the chunk's log-probabilities for sequences that request their prompt's."""
        for chunk, hidden in zip(prefill.chunks, passed.hidden.split(prefill.batch.lengths), strict=True):
            if not chunk.sequence.sampling.wants_prompt_logprobs:
                continue
            for i, rows in enumerate(hidden.split(SLICE_ROWS)):
                record_prompts(chunk.sequence, chunk.start + i * SLICE_ROWS, self._target.logits(rows))

    def _attach_prefixes(self, chunks: list[PromptChunk], firsts: list[int]) -> None:
        """Attach cached prefixes in the drafter, with the pair after each of them."""
        reusing = [c for c in chunks if c.num_reused]
        if reusing:
            self._drafter.attach_prefix(
                [c.sequence.slot for c in reusing],
                [first for c, first in zip(chunks, firsts, strict=True) if c.num_reused],
                [c.start for c in reusing],
                self._tensor([c.sequence.prompt_ids[c.start] for c in reusing]),
                self.prefix_state.features_before(reusing),
            )

    def _tensor(self, values: list[int] | list[list[int]]) -> Int[Tensor, "..."]:
        return to_device(values, self._device)
