"""BlockManager: allocate blocks of the KV pool to the positions of slots, with a prefix cache.

Position p of a slot is in block block_table[slot, p // size], at offset p % size. Blocks are
allocated as sequences grow. Full blocks of a prompt enter the prefix cache: a later slot that
starts with the same tokens attaches them instead of computing them. Only full blocks are shared, so
no slot writes to a block that another reads.

    slot 0   [ 7 | 2 | 5 | null ...]      blocks 7 and 2 hold a prompt that slot 1 starts with too
    slot 1   [ 7 | 2 | 9 | null ...]

One block manager serves all caches of an engine, target's and drafters': a block number stands for
equal positions in each of them.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import ArrayLike
from torch import Tensor

from eagle_ray.core.device import copy_to_device
from eagle_ray.kv.prefix_cache import PrefixCache

# Positions: small enough to waste little, large enough that gathering is as fast as reading.
BLOCK_SIZE = 32


class BlockManager:
    """Block tables of num_slots slots over a pool of num_blocks blocks.

    Positions that are not reserved map to the null block `num_blocks`. It takes padding rows and
    its content is never used.

    Args:
        capacity: maximum positions of a slot.
        num_blocks: number of blocks in the pool; None is enough for every slot to be full.

    Attributes:
        null_slot: extra slot that is always empty, for sequences that pad a batch.
        null_position: position that always maps to the null block.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        num_blocks: int | None = None,
        device: torch.device | str = "cpu",
        size: int = BLOCK_SIZE,
    ):
        self.num_slots = num_slots
        self.capacity = capacity
        self.size = size
        blocks_per_slot = self.blocks_for(capacity)
        self.num_blocks = num_slots * blocks_per_slot if num_blocks is None else num_blocks
        self.null_slot = num_slots
        # The last entry of a slot is never reserved: null_position is there.
        shape = (num_slots + 1, blocks_per_slot + 1)
        self._table = torch.full(shape, self.num_blocks, dtype=torch.int64, device=device)
        # The entries [first, last) of each slot that the device lacks.
        self._changed: dict[int, tuple[int, int]] = {}
        self.null_position = blocks_per_slot * size
        self._slot_blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_slot_blocks = np.zeros(num_slots, dtype=np.int64)  # their lengths
        self._references = [0] * self.num_blocks
        # A heap: low blocks first keeps slots contiguous.
        self.free_blocks = list(range(self.num_blocks))
        self._prefixes = PrefixCache()

    @property
    def block_table(self) -> Int[Tensor, "S1 W"]:
        """Return the block numbers of each slot as a tensor on the device, always in one memory."""
        self.sync_table()
        return self._table

    def sync_table(self) -> None:
        """Copy changed entries of the block table to the device. Call it before a captured pass,
        which cannot do so itself."""
        if not self._changed:
            return
        indices: list[np.ndarray] = []
        blocks: list[int] = []
        width = self._table.shape[1]
        for slot, (first, last) in self._changed.items():
            indices.append(np.arange(slot * width + first, slot * width + last))
            slot_blocks = self._slot_blocks[slot][first:last]
            num_released = last - first - len(slot_blocks)
            blocks += slot_blocks
            blocks += [self.num_blocks] * num_released
        self._changed.clear()
        both = torch.from_numpy(np.stack([np.concatenate(indices), np.array(blocks)]))
        index, values = copy_to_device(both, self._table.device)
        self._table.view(-1).index_copy_(0, index, values)

    @property
    def num_available(self) -> int:
        """Return the number of blocks that can be allocated: free ones, and cached ones that no slot uses."""
        return len(self.free_blocks) + self._prefixes.num_evictable

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.size)

    def block(self, slot: int, index: int) -> int:
        """Return the number of the slot's `index`-th block, which must be reserved."""
        return self._slot_blocks[slot][index]

    def contiguous_start(self, slot: int, width: int) -> int | None:
        """Return the slot's first block if its first `width` blocks are contiguous in the pool, else None."""
        slot_blocks = self._slot_blocks[slot][:width]
        if not slot_blocks:
            return None
        first = slot_blocks[0]
        return first if slot_blocks == list(range(first, first + width)) else None

    def blocks_needed(self, slot: int, num_positions: int) -> int:
        """Return how many more blocks the slot needs to hold `num_positions` positions."""
        return max(self.blocks_for(num_positions) - len(self._slot_blocks[slot]), 0)

    def reserve(self, slot: int, num_positions: int) -> bool:
        """Reserve blocks for the slot's first positions. Return False, and change nothing, if there
        are not enough blocks."""
        missing = self.blocks_needed(slot, num_positions)
        if missing > self.num_available:
            return False
        self._extend(slot, [self._allocate() for _ in range(missing)])
        return True

    def num_missing(self, slots: ArrayLike, num_positions: ArrayLike) -> Int[np.ndarray, " B"]:
        """Return how many more blocks all slots[i] together need to hold num_positions[i] positions each."""
        wanted = -(-np.asarray(num_positions, np.int64) // self.size)
        return np.maximum(wanted - self._num_slot_blocks[np.asarray(slots, np.int64)], 0)

    def reserve_each(self, slots: ArrayLike, num_positions: ArrayLike) -> bool:
        """Reserve blocks for the first num_positions[i] positions of each slots[i].

        Return False, and change nothing, if there are not enough blocks.
        """
        slots = np.asarray(slots, np.int64)
        missing = self.num_missing(slots, num_positions)
        if missing.sum() > self.num_available:
            return False
        for i in missing.nonzero()[0].tolist():
            self._extend(int(slots[i]), [self._allocate() for _ in range(missing[i])])
        return True

    @property
    def num_growing(self) -> int:
        """Return how many slots hold blocks and are not full."""
        full = self.blocks_for(self.capacity)
        is_growing = (self._num_slot_blocks > 0) & (self._num_slot_blocks < full)
        return int(np.count_nonzero(is_growing))

    def trim(self, slot: int, num_positions: int) -> None:
        """Release the blocks past the slot's first `num_positions` positions."""
        keep = self.blocks_for(num_positions)
        slot_blocks = self._slot_blocks[slot]
        if keep >= len(slot_blocks):
            return
        for block in reversed(slot_blocks[keep:]):  # the last first: evicted in this order
            self._unref(block)
        self._mark_changed(slot, keep, len(slot_blocks))
        del slot_blocks[keep:]
        self._num_slot_blocks[slot] = keep

    def free(self, slot: int) -> None:
        """Release all blocks of a slot. Cached blocks stay in the prefix cache until their space is needed."""
        self.trim(slot, 0)

    def attach_prefix(self, slot: int, tokens: list[int]) -> int:
        """Attach the cached blocks that hold an empty slot's first tokens. Return how many tokens they hold.

        At least one token is left to compute, because its row yields the first logits.
        """
        max_blocks = (len(tokens) - 1) // self.size
        blocks = self._prefixes.match(tokens, self.size)[:max_blocks]
        for block in blocks:
            self._ref(block)
        self._extend(slot, blocks)
        return len(blocks) * self.size

    def cache_full_blocks(self, slot: int, tokens: list[int]) -> None:
        """Add the slot's full blocks to the prefix cache under these tokens, which they hold or
        will hold before they are read."""
        self._prefixes.add(tokens, self._slot_blocks[slot], self.size)

    def reset_prefix_cache(self) -> None:
        """Evict all cached blocks that no slot uses."""
        while self._prefixes.num_evictable:
            heapq.heappush(self.free_blocks, self._prefixes.evict())

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or in use as often as it is referenced, and that the tables agree."""
        counts = [0] * self.num_blocks
        for slot, slot_blocks in enumerate(self._slot_blocks):
            assert len(set(slot_blocks)) == len(slot_blocks) == self._num_slot_blocks[slot], (
                f"slot {slot} holds a block twice: {slot_blocks}"
            )
            row = self.block_table[slot].tolist()
            assert row == slot_blocks + [self.num_blocks] * (len(row) - len(slot_blocks)), (
                f"slot {slot}: {row} is not {slot_blocks}"
            )
            for block in slot_blocks:
                counts[block] += 1
        assert counts == self._references, "reference counts"
        idle = [block for block in range(self.num_blocks) if self._prefixes.is_evictable(block)]
        unused = [block for block, count in enumerate(counts) if count == 0]
        assert sorted([*self.free_blocks, *idle]) == unused, (
            f"free {self.free_blocks}, idle {idle}, unused {unused}"
        )
        assert self.block_table[self.null_slot].eq(self.num_blocks).all(), (
            "the slot that never holds anything"
        )
        self._prefixes.check_integrity()

    def _extend(self, slot: int, blocks: list[int]) -> None:
        if not blocks:
            return
        slot_blocks = self._slot_blocks[slot]
        self._mark_changed(slot, len(slot_blocks), len(slot_blocks) + len(blocks))
        slot_blocks += blocks
        self._num_slot_blocks[slot] = len(slot_blocks)

    def _mark_changed(self, slot: int, first: int, last: int) -> None:
        old_first, old_last = self._changed.get(slot, (first, last))
        self._changed[slot] = min(first, old_first), max(last, old_last)

    def _allocate(self) -> int:
        """Return a free block, or a cached one that no slot holds."""
        block = heapq.heappop(self.free_blocks) if self.free_blocks else self._prefixes.evict()
        self._references[block] = 1
        return block

    def _ref(self, block: int) -> None:
        if self._references[block] == 0:
            self._prefixes.acquire(block)
        self._references[block] += 1

    def _unref(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0 and not self._prefixes.release(block):
            heapq.heappush(self.free_blocks, block)
