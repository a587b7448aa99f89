"""PrefixCache: find full blocks of earlier prompts by their tokens, so that a new slot can reuse them.

    cache.add([5, 6, 7, 8], blocks=[3, 9], size=2)      # block 3 holds 5 6, block 9 holds 7 8 after 5 6
    cache.match([5, 6, 7, 9], size=2)                   # [3]

The block manager, which calls it, counts the slots that use a block.
"""

from __future__ import annotations

from itertools import pairwise

_START = -1  # the block "before" a first one
_Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """A trie of full blocks by their tokens, with the unused ones in least-recently-used order.

    A block's key is the block before it and its own token ids, so equal keys mean equal tokens from
    the start: no block is found by a hash alone. A slot that uses a block also uses those before it
    and releases the last one first, so a block is always evicted before its predecessor. Idle
    blocks are used by no slot and may be evicted.
    """

    def __init__(self):
        self._block_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._idle: dict[int, None] = {}  # least recently used first

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def is_evictable(self, block: int) -> bool:
        return block in self._idle

    def match(self, tokens: list[int], size: int) -> list[int]:
        """Return the cached blocks of `size` tokens that hold the longest prefix of `tokens`."""
        matched: list[int] = []
        before = _START
        for part in split_blocks(tokens, size):
            block = self._block_of.get((before, part))
            if block is None:
                break
            matched.append(block)
            before = block
        return matched

    def add(self, tokens: list[int], blocks: list[int], size: int) -> None:
        """Add the blocks that hold `tokens`, up to the first whose tokens are already cached in another block."""
        before = _START
        for part, block in zip(split_blocks(tokens, size), blocks, strict=False):
            if self._block_of.setdefault((before, part), block) != block:
                return
            self._key_of[block] = before, part
            before = block

    def release(self, block: int) -> bool:
        """Mark a block as idle. Return False if it is not cached, so that the caller can free it."""
        if block in self._key_of:
            self._idle[block] = None
        return block in self._key_of

    def acquire(self, block: int) -> None:
        """Mark an idle block as in use."""
        del self._idle[block]

    def evict(self) -> int:
        """Remove and return the least recently used idle block. There must be one."""
        block = next(iter(self._idle))
        key = self._key_of.pop(block)
        del self._idle[block]
        del self._block_of[key]
        return block

    def check_integrity(self) -> None:
        """Assert that both maps agree, and that a block is idle only if the blocks after it are."""
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        order = {block: i for i, block in enumerate(self._idle)}
        for block, (before, _) in self._key_of.items():
            assert before == _START or before in self._key_of, (
                f"block {block} follows the evicted {before}"
            )
            if before in order:
                assert order.get(block, len(order)) < order[before], (
                    f"block {before} would go before {block}"
                )


def split_blocks(tokens: list[int], size: int) -> list[tuple[int, ...]]:
    """Split tokens into full blocks of `size` tokens; the rest is left out."""
    ends = range(0, len(tokens) + 1, size)
    return [tuple(tokens[start:end]) for start, end in pairwise(ends)]
