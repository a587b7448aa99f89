"""Prefiller: chunks of prompts through the target and the drafter, and the first token after each prompt.

A chunk that follows reused blocks starts the target in the middle of a prompt. The drafter's next pair then needs the
feature of the token before, which is kept here for the last token of every block.
Does not know who is admitted or when.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafting.drafter import Drafter
from eagle_ray.engine.scheduler import Chunk
from eagle_ray.engine.sequence import Sequence
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.sampling import BatchSampling, log_probs_of, pick


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What follows a prompt. logprob: 0 where nobody asked."""

    sequence: Sequence
    token: int
    logprob: float


class Prefiller:
    """Runs one step's chunks; they must have their slots and blocks."""

    def __init__(self, target: Target, drafter: Drafter):
        self._target, self._drafter, self._blocks = target, drafter, target.cache.blocks
        self._device = target.device
        self._last_features: Tensor | None = None  # [blocks, H], of the last token of each
        self._is_drafted = [False] * self._blocks.num_blocks  # the drafter has read the block and all before it
        self._drafted_from_start = [False] * self._blocks.num_slots

    def run(self, chunks: list[Chunk], drafting: bool) -> list[FirstToken]:
        """Fill target and drafter with the chunks; first tokens of those sequences that have none yet.

        drafting: whether the drafter reads the prompts now, or only if it is asked to draft.
        """
        known = [c.sequence.token_ids[c.start : c.end + 1] for c in chunks]
        prompts = Prompts.of(
            [c.sequence.slot for c in chunks],
            [ids[: c.num_tokens] for ids, c in zip(known, chunks, strict=True)],
            self._device,
            [c.start for c in chunks],
        )
        logits, features = self._target.prefill(prompts)
        picking = self._tensor([i for i, c in enumerate(chunks) if c.picks])
        sampling = BatchSampling.of([c.sequence.sampling for c in chunks], self._device)
        picks = pick(logits[picking], sampling, picking, prompts.positions[prompts.last[picking]] + 1)
        after = [ids[1:] + [0] * (c.num_tokens + 1 - len(ids)) for ids, c in zip(known, chunks, strict=True)]
        next_tokens = self._tensor([i for ids in after for i in ids]).index_copy(0, prompts.last[picking], picks)
        self._keep_features(chunks, features)
        self._resume(chunks, self._note_drafted(chunks, drafting))
        (self._drafter.prefill if drafting else self._drafter.observe)(prompts, next_tokens, features)
        return _first_tokens([c.sequence for c in chunks if c.picks], logits[picking], picks)

    def _keep_features(self, chunks: list[Chunk], features: Float[Tensor, "R H"]) -> None:
        """The features of rows that end a block."""
        if self._last_features is None:
            self._last_features = features.new_empty(self._blocks.num_blocks, features.shape[1])
        rows, blocks, first = [], [], 0
        for chunk in chunks:
            for block in self._ended(chunk):
                rows.append(first + (block + 1) * self._blocks.size - 1 - chunk.start)
                blocks.append(self._blocks.block(chunk.sequence.slot, block))
            first += chunk.num_tokens
        self._last_features.index_copy_(0, self._tensor(blocks), features[self._tensor(rows)])

    def _note_drafted(self, chunks: list[Chunk], drafting: bool) -> list[int]:
        """Which blocks the drafter will have read; for each chunk the first column that its sequence may see there.

        In the order of the chunks: one may reuse the blocks that another fills in this very pass.
        """
        firsts = []
        for chunk in chunks:
            slot, reused = chunk.sequence.slot, chunk.num_reused // self._blocks.size
            blocks = [self._blocks.block(slot, i) for i in range(reused)]
            if chunk.start == chunk.sequence.num_reused:
                self._drafted_from_start[slot] = all(self._is_drafted[block] for block in blocks)
            firsts.append(0 if self._drafted_from_start[slot] else chunk.num_reused)
            self._drafted_from_start[slot] &= drafting
            for i in self._ended(chunk):
                self._is_drafted[self._blocks.block(slot, i)] = self._drafted_from_start[slot]
        return firsts

    def _resume(self, chunks: list[Chunk], firsts: list[int]) -> None:
        """Tell the drafter whose beginnings are others'."""
        reusing = [(c, first) for c, first in zip(chunks, firsts, strict=True) if c.num_reused]
        if not reusing:
            return
        slots = [c.sequence.slot for c, _ in reusing]
        before = [self._blocks.block(c.sequence.slot, c.start // self._blocks.size - 1) for c, _ in reusing]
        self._drafter.resume(
            slots,
            [first for _, first in reusing],
            [c.start for c, _ in reusing],
            self._tensor([c.sequence.prompt_ids[c.start] for c, _ in reusing]),
            self._last_features[self._tensor(before)],
        )

    def _ended(self, chunk: Chunk) -> range:
        """Which of the slot's blocks are full after the chunk and were not before."""
        return range(chunk.start // self._blocks.size, chunk.end // self._blocks.size)

    def _tensor(self, values: list[int]) -> Int[Tensor, " N"]:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _first_tokens(
    sequences: list[Sequence], logits: Float[Tensor, "B V"], picks: Int[Tensor, " B"]
) -> list[FirstToken]:
    asked = any(s.sampling.logprobs for s in sequences)
    logprobs = log_probs_of(logits, picks).tolist() if asked else [0.0] * len(sequences)
    return [FirstToken(*row) for row in zip(sequences, picks.tolist(), logprobs, strict=True)]
