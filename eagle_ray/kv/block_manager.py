"""Blocks: which block of a pool holds which columns of which slot.

A slot's column c lies in block table[slot, c // size], at place c % size. Blocks are handed out as sequences grow, so
memory follows what is used. Full blocks of a prompt can be published: a later slot that starts with the same tokens
adopts them instead of computing them anew. A block is shared only when full, so nobody writes to what another reads.

    slot 0   [ 7 | 2 | 5 | dump ...]      blocks 7 and 2 hold a prompt that slot 1 starts with too
    slot 1   [ 7 | 2 | 9 | dump ...]

One object serves every cache of an engine: a block number means the same columns in all of them.
Does not know the caches, the model or who runs.
"""

from __future__ import annotations

import heapq

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.async_copy import copy_to_device
from eagle_ray.kv.prefix_cache import PrefixCache

BLOCK_SIZE = 32  # columns: small enough to waste little, large enough that gathering is as fast as reading


class BlockManager:
    """The tables of num_slots slots over a pool of num_blocks blocks.

    capacity: most columns of a slot. num_blocks: None is enough for every slot to be full.
    nowhere: one slot more, which never holds anything: that of the sequences that fill up a batch. Columns that nobody
    reserved lie in block `num_blocks`, which takes padding rows and is never read for its content.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        num_blocks: int | None = None,
        device: torch.device | str = "cpu",
        size: int = BLOCK_SIZE,
    ):
        self.num_slots, self.capacity, self.size = num_slots, capacity, size
        blocks_per_slot = self.blocks_for(capacity)
        self.num_blocks = num_slots * blocks_per_slot if num_blocks is None else num_blocks
        self.null_slot = num_slots
        shape = (num_slots + 1, blocks_per_slot + 1)  # the last entry is never reserved: column `padding` lies there
        self._host_table = torch.full(shape, self.num_blocks, dtype=torch.int64)
        self._table = copy_to_device(self._host_table, device)
        self._is_stale = False
        self.null_position = blocks_per_slot * size
        self._held: list[list[int]] = [[] for _ in range(num_slots)]
        self._references = [0] * self.num_blocks
        self._free = list(range(self.num_blocks))  # a heap: low blocks first keeps slots contiguous and memory small
        self._prefixes = PrefixCache()

    @property
    def block_table(self) -> Int[Tensor, "S1 W"]:
        """Which block each column of each slot lies in; on the device, always in the same memory."""
        self.sync_table()
        return self._table

    def sync_table(self) -> None:
        """Send the device what the host has changed, in one copy; before a captured pass, which cannot ask for it."""
        if self._is_stale and self._table is not self._host_table:
            self._table.copy_(self._host_table.pin_memory(), non_blocking=True)
        self._is_stale = False

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` could hand out: free, or held by no slot and kept only for reuse."""
        return len(self._free) + self._prefixes.num_idle

    def blocks_for(self, columns: int) -> int:
        return -(-columns // self.size)

    def block(self, slot: int, index: int) -> int:
        """The block of the slot's columns from index * size on, which must be reserved."""
        return self._held[slot][index]

    def first_of_run(self, slot: int, width: int) -> int | None:
        """The slot's first block where its first `width` blocks are neighbours in the pool, else None."""
        held = self._held[slot][:width]
        return held[0] if held and held == list(range(held[0], held[0] + width)) else None

    def blocks_needed(self, slot: int, columns: int) -> int:
        """Blocks that the slot lacks to hold `columns` columns."""
        return max(self.blocks_for(columns) - len(self._held[slot]), 0)

    def reserve(self, slot: int, columns: int) -> bool:
        """Make room for the slot's first `columns` columns; False, and nothing changes, where the pool is short."""
        missing = self.blocks_needed(slot, columns)
        if missing > self.num_available:
            return False
        self._extend(slot, [self._take() for _ in range(missing)])
        return True

    def trim(self, slot: int, columns: int) -> None:
        """Give back the blocks past the slot's first `columns` columns."""
        keep = self.blocks_for(columns)
        held = self._held[slot]
        if keep >= len(held):
            return
        for block in reversed(held[keep:]):  # the last first: what is reused least goes first when space runs out
            self._unref(block)
        self._host_table[slot, keep : len(held)] = self.num_blocks
        self._is_stale = True
        del held[keep:]

    def free(self, slot: int) -> None:
        """The slot holds nothing any more; published blocks stay until their space is needed."""
        self.trim(slot, 0)

    def attach_prefix(self, slot: int, tokens: list[int]) -> int:
        """Let an empty slot start with the published blocks that hold its first tokens; returns how many columns.

        At least one token is left to compute: its row gives the first logits.
        """
        blocks = self._prefixes.match(tokens, self.size)[: (len(tokens) - 1) // self.size]
        for block in blocks:
            self._ref(block)
        self._extend(slot, blocks)
        return len(blocks) * self.size

    def cache_full_blocks(self, slot: int, tokens: list[int]) -> None:
        """Offer the slot's full blocks, which hold (or will, before anyone reads them) these tokens, for reuse."""
        self._prefixes.add(tokens, self._held[slot], self.size)

    def reset_prefix_cache(self) -> None:
        """Blocks that no slot holds are offered no longer: the next prompts are computed anew."""
        while self._prefixes.num_idle:
            heapq.heappush(self._free, self._prefixes.evict())

    def check_integrity(self) -> None:
        """Every block is free, idle or held as often as it is referenced; the tables say the same."""
        counts = [0] * self.num_blocks
        for slot, held in enumerate(self._held):
            assert len(set(held)) == len(held), f"slot {slot} holds a block twice: {held}"
            row = self.block_table[slot].tolist()
            assert row == held + [self.num_blocks] * (len(row) - len(held)), f"slot {slot}: {row} is not {held}"
            for block in held:
                counts[block] += 1
        assert counts == self._references, "reference counts"
        idle = [block for block in range(self.num_blocks) if self._prefixes.is_idle(block)]
        unused = [block for block, count in enumerate(counts) if count == 0]
        assert sorted([*self._free, *idle]) == unused, f"free {self._free}, idle {idle}, unused {unused}"
        assert self.block_table[self.null_slot].eq(self.num_blocks).all(), "the slot that never holds anything"
        self._prefixes.check_integrity()

    def _extend(self, slot: int, blocks: list[int]) -> None:
        if not blocks:
            return
        held = self._held[slot]
        self._host_table[slot, len(held) : len(held) + len(blocks)] = torch.tensor(blocks)
        self._is_stale = True
        held += blocks

    def _take(self) -> int:
        block = heapq.heappop(self._free) if self._free else self._prefixes.evict()
        self._references[block] = 1
        return block

    def _ref(self, block: int) -> None:
        if self._references[block] == 0:
            self._prefixes.acquire(block)
        self._references[block] += 1

    def _unref(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0 and not self._prefixes.release(block):
            heapq.heappush(self._free, block)
