"""DraftPrefixState: what a drafter needs in order to go on where reused blocks end.

A block is published once the target has filled it. For the drafter two things more are kept here: the feature of its
last token, which is one half of the next pair, and whether the drafter has read the block and all before it; where it
has not, a sequence that reuses the block drafts from what comes after.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.async_copy import to_device
from eagle_ray.core.decode_batch import PrefillChunk
from eagle_ray.kv.block_manager import BlockManager


class DraftPrefixState:
    """One entry for each block, overwritten whenever the block is filled anew."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._last_features: Tensor | None = None  # [blocks, H], made when H is known
        self._is_read = [False] * blocks.num_blocks
        self._reads_all = [False] * blocks.num_slots  # the drafter has read the slot's sequence from its start

    def fill(self, chunks: list[PrefillChunk], features: Float[Tensor, "R H"]) -> None:
        """The target's features of the chunks' rows: keep those of rows that end a block."""
        if self._last_features is None:
            self._last_features = features.new_empty(self._blocks.num_blocks, features.shape[1])
        rows, blocks, first = [], [], 0
        for chunk in chunks:
            for index in self._completed_blocks(chunk):
                rows.append(first + (index + 1) * self._blocks.size - 1 - chunk.start)
                blocks.append(self._blocks.block(chunk.sequence.slot, index))
            first += chunk.num_tokens
        self._last_features.index_copy_(0, self._tensor(blocks), features[self._tensor(rows)])

    def read(self, chunks: list[PrefillChunk], drafting: bool) -> list[int]:
        """The drafter reads the chunks, or not; returns the first column that each one's sequence may see there.

        In the order of the chunks: one may reuse the blocks that another fills in this very pass.
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
        """The feature of the token before each chunk, which must start where a block ends."""
        before = [self._blocks.block(c.sequence.slot, c.start // self._blocks.size - 1) for c in chunks]
        return self._last_features[self._tensor(before)]

    def _completed_blocks(self, chunk: PrefillChunk) -> range:
        """Which of the slot's blocks are full after the chunk and were not before."""
        return range(chunk.start // self._blocks.size, chunk.end // self._blocks.size)

    def _tensor(self, values: list[int]) -> Int[Tensor, " N"]:
        return to_device(values, self._last_features.device)
