"""Prefiller: run prompt chunks through target and drafter, and sample the first token after each prompt.

A chunk that follows blocks from the prefix cache starts in the middle of a prompt, for target and drafter alike. A
block enters the prefix cache once the target has filled it. DraftPrefixState keeps two more things per block, for the
drafter: the feature of its last token, which is part of the next input, and whether the drafter has read all tokens up
to its end. If it has not, a sequence that reuses the block drafts from later tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.async_copy import DeviceToHost, to_device
from eagle_ray.core.decode_batch import PrefillChunk
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.engine.controlled_sequences import sample_adjusted, synced
from eagle_ray.engine.step_output import likeliest, ranked, record_prompts
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.methods.drafter import Drafter
from eagle_ray.models.target import PrefillBatch, PrefillOutput, TargetModel
from eagle_ray.sampling.control_state import ControlState
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of, sample


class DraftPrefixState:
    """One entry per block, overwritten whenever the block is filled again."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._last_features: Float[Tensor, "blocks H"] | None = None  # made when H is known
        self._is_read = [False] * blocks.num_blocks
        self._reads_all = [False] * blocks.num_slots  # the drafter has read the slot's sequence from its start

    def fill(self, chunks: list[PrefillChunk], features: Float[Tensor, "R H"]) -> None:
        """Keep the target's features of rows that end a block."""
        if self._last_features is None:
            self._last_features = features.new_empty(self._blocks.num_blocks, features.shape[1])
        rows, blocks, first = [], [], 0
        for chunk in chunks:
            for index in self._completed_blocks(chunk):
                rows.append(first + (index + 1) * self._blocks.size - 1 - chunk.start)
                blocks.append(self._blocks.block(chunk.sequence.slot, index))
            first += chunk.num_tokens
        into, ends = to_device(blocks, features.device), to_device(rows, features.device)
        self._last_features.index_copy_(0, into, features[ends])

    def read(self, chunks: list[PrefillChunk], drafting: bool) -> list[int]:
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

    def features_before(self, chunks: list[PrefillChunk]) -> Float[Tensor, "B H"]:
        """Return the feature of the token before each chunk, which must start at a block boundary."""
        assert self._last_features is not None, "a reused block was filled before"
        before = [self._blocks.block(c.sequence.slot, c.start // self._blocks.size - 1) for c in chunks]
        return self._last_features[to_device(before, self._last_features.device)]

    def _completed_blocks(self, chunk: PrefillChunk) -> range:
        """Return which of the slot's blocks become full with the chunk."""
        return range(chunk.start // self._blocks.size, chunk.end // self._blocks.size)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token after a prompt. logprob: 0 if not requested. top: empty if not requested."""

    sequence: Sequence
    token: int
    logprob: float
    top: TopLogprobs


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """A launched pass over prompts, and its first tokens on their way to the host.

    Attributes:
        sequences: those whose first token it sampled.
        ended: those whose prompt ended in it, so that they decode from now on: these, then preempted ones.
        roots: last tokens of `ended`.
    """

    sequences: list[Sequence]
    copy: DeviceToHost
    has_tops: bool
    ended: list[Sequence]
    roots: Int[Tensor, " E"]

    def read(self) -> list[FirstToken]:
        tokens, logprobs, *likeliest = self.copy.read()
        tops = ranked(*likeliest) if self.has_tops else [[] for _ in tokens]
        return [FirstToken(*row) for row in zip(self.sequences, tokens, logprobs, tops, strict=True)]


class Prefiller:
    """Runs one step's prompt chunks, whose slots and blocks are reserved."""

    def __init__(self, target: TargetModel, drafter: Drafter):
        self._target, self._drafter, self._device = target, drafter, target.device
        self._blocks = DraftPrefixState(target.cache.blocks)

    def run(self, chunks: list[PrefillChunk], drafting: bool) -> PendingPrefill:
        """Run the chunks through target and drafter in a pass of their own. Return first tokens of prompts that end.

        Args:
            drafting: the drafter reads the prompts now, and not only when it drafts.
        """
        prompts = self.prompts(chunks)
        passed = retry_portable(lambda: self._target.prefill(prompts))
        return self.finish(chunks, prompts, passed, drafting)

    def prompts(self, chunks: list[PrefillChunk]) -> PrefillBatch:
        """Return the chunks as the target's input."""
        parts = [c.sequence.token_ids[c.start : c.end] for c in chunks]
        return PrefillBatch.of([c.sequence.slot for c in chunks], parts, self._device, [c.start for c in chunks])

    def finish(
        self, chunks: list[PrefillChunk], prompts: PrefillBatch, passed: PrefillOutput, drafting: bool
    ) -> PendingPrefill:
        """Do everything that follows the target's pass over these prompts; see `run`."""
        logits, features = passed.logits, passed.features
        self._record(chunks, prompts, passed)
        picking = self._tensor([i for i, c in enumerate(chunks) if c.needs_sample])
        sampling = SamplingBatch.of([c.sequence.sampling for c in chunks], self._device)
        positions = prompts.positions[prompts.last[picking]] + 1
        picks = retry_portable(lambda: sample(logits[picking], sampling, picking, positions))
        picks = self._resample_controlled(picks, chunks, logits, sampling, positions)
        known = [c.sequence.token_ids[c.start + 1 : c.end + 1] for c in chunks]
        after = [ids + [0] * (c.num_tokens - len(ids)) for ids, c in zip(known, chunks, strict=True)]
        next_tokens = self._tensor([i for ids in after for i in ids]).index_copy(0, prompts.last[picking], picks)
        self._blocks.fill(chunks, features)
        self._attach_prefixes(chunks, self._blocks.read(chunks, drafting))
        read = self._drafter.prefill if drafting else self._drafter.prefill_deferred
        retry_portable(lambda: read(prompts, next_tokens, features))
        return _sample_first(chunks, logits[picking], picks)

    def mark_prefilled(self, chunks: list[PrefillChunk], features: Float[Tensor, "R H"]) -> None:
        """Note that all caches, the drafter's too, already hold the keys and values of these chunks."""
        self._blocks.fill(chunks, features)
        self._blocks.read(chunks, drafting=True)

    def _resample_controlled(
        self,
        picks: Int[Tensor, " P"],
        chunks: list[PrefillChunk],
        logits: Float[Tensor, "B V"],
        sampling: SamplingBatch,
        positions: Int[Tensor, " P"],
    ) -> Int[Tensor, " P"]:
        """Return the first tokens, those of sequences with controls sampled from adjusted logits.

        Args:
            picks: the first token of each chunk that ends a prompt.
            positions: theirs.
        """
        ends = [i for i, chunk in enumerate(chunks) if chunk.needs_sample]
        own = [place for place, i in enumerate(ends) if chunks[i].sequence.controls is not None]
        if not own:
            return picks
        states = [synced(chunks[ends[place]].sequence) for place in own]
        places, rows = self._tensor([own, [ends[place] for place in own]])
        paths: list[tuple[ControlState, list[list[int]]]] = [(state, [[]]) for state in states]
        fresh = retry_portable(lambda: sample_adjusted(logits, rows, paths, sampling, rows, positions[places]))
        return picks.index_copy(0, places, fresh)

    def _record(self, chunks: list[PrefillChunk], prompts: PrefillBatch, passed: PrefillOutput) -> None:
        """Record the chunk's log-probabilities for sequences that request their prompt's."""
        for chunk, hidden in zip(chunks, passed.hidden.split(prompts.lengths), strict=True):
            if not chunk.sequence.sampling.wants_prompt_logprobs:
                continue
            for i, rows in enumerate(hidden.split(SLICE_ROWS)):
                record_prompts(chunk.sequence, chunk.start + i * SLICE_ROWS, self._target.logits(rows))

    def _attach_prefixes(self, chunks: list[PrefillChunk], firsts: list[int]) -> None:
        """Attach cached prefixes in the drafter, with the pair after each of them."""
        reusing = [c for c in chunks if c.num_reused]
        if reusing:
            self._drafter.attach_prefix(
                [c.sequence.slot for c in reusing],
                [first for c, first in zip(chunks, firsts, strict=True) if c.num_reused],
                [c.start for c in reusing],
                self._tensor([c.sequence.prompt_ids[c.start] for c in reusing]),
                self._blocks.features_before(reusing),
            )

    def _tensor(self, values: list[int] | list[list[int]]) -> Int[Tensor, "..."]:
        return to_device(values, self._device)


def _sample_first(chunks: list[PrefillChunk], logits: Float[Tensor, "B V"], picks: Int[Tensor, " B"]) -> PendingPrefill:
    """Start the copy of first tokens. logits, picks: of the chunks whose prompt ends."""
    sequences = [c.sequence for c in chunks if c.needs_sample]
    asked = any(s.sampling.wants_logprobs for s in sequences)
    logprobs = log_probs_of(logits, picks) if asked else torch.zeros_like(picks, dtype=torch.float32)
    most = max((s.sampling.num_top_logprobs for s in sequences), default=0)
    tops = likeliest(logits, most) if most else ()
    copy = DeviceToHost(picks, logprobs, *tops)
    resumed = [c.sequence for c in chunks if c.is_last and not c.needs_sample]
    roots = torch.cat([picks, to_device([s.root for s in resumed], picks.device)]) if resumed else picks
    return PendingPrefill(sequences, copy, bool(tops), [*sequences, *resumed], roots)
