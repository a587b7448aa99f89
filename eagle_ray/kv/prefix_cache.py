"""Prefixes: published blocks by what they hold, and which of them rest unused, least recently used first.

A block is found by the block before it and its own token ids, so equal keys are equal tokens all the way to the
start: nothing is ever found by a hash alone. Whoever holds a block holds those before it, and gives back the last one
first, so that a block is always evicted before the one it follows.
Does not know slots, tables or how often a block is held.
"""

from __future__ import annotations

from itertools import pairwise

_START = -1  # the block "before" a first one
_Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """A trie of blocks; `idle` ones are held by nobody and may be evicted."""

    def __init__(self):
        self._block_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._idle: dict[int, None] = {}  # in the order in which they came to rest

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def match(self, tokens: list[int], size: int) -> list[int]:
        """The published blocks of `size` tokens that hold the longest prefix of `tokens`."""
        found: list[int] = []
        for part in _parts(tokens, size):
            block = self._block_of.get((found[-1] if found else _START, part))
            if block is None:
                break
            found.append(block)
        return found

    def add(self, tokens: list[int], blocks: list[int], size: int) -> None:
        """Publish the blocks that hold `tokens`; stops where another block already holds the same."""
        before = _START
        for part, block in zip(_parts(tokens, size), blocks, strict=False):
            if self._block_of.setdefault((before, part), block) != block:
                return
            self._key_of[block] = before, part
            before = block

    def release(self, block: int) -> bool:
        """The last holder let go of a block; False where it was never published, so that it is simply free."""
        if block in self._key_of:
            self._idle[block] = None
        return block in self._key_of

    def acquire(self, block: int) -> None:
        """An idle block is held again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the block that has rested longest, and return it. There must be one."""
        block = next(iter(self._idle))
        del self._idle[block], self._block_of[self._key_of.pop(block)]
        return block

    def check_integrity(self) -> None:
        """Both directions agree, and a block rests only after those that follow it."""
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        order = {block: i for i, block in enumerate(self._idle)}
        for block, (before, _) in self._key_of.items():
            assert before == _START or before in self._key_of, f"block {block} follows the forgotten {before}"
            if before in order:
                assert order.get(block, len(order)) < order[before], f"block {before} would go before {block}"


def _parts(tokens: list[int], size: int) -> list[tuple[int, ...]]:
    """The full parts of `size` tokens."""
    ends = range(0, len(tokens) + 1, size)
    return [tuple(tokens[start:end]) for start, end in pairwise(ends)]
