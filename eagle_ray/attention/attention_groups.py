"""AttentionGroup: sequences of a batch that attend in one call, padded to the longest and the largest tree.

What a call takes goes with sequences times columns times (READ_COST + rows of a tree): keys and values are gathered,
and each row meets each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

READ_COST = 5  # rows: reading a column takes as long as that many rows that meet it
CALL_COST = 200  # columns that take as long to read as one more call in a layer: measured at 16
GROUP_COST = 700  # likewise of what is made for each group once for all layers


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """members: indices of sequences. size: rows of the largest of their trees."""

    members: list[int]
    size: int


def group_sequences(lengths: Sequence[int], sizes: Sequence[int], num_layers: int) -> list[AttentionGroup]:
    """lengths: columns of each sequence. sizes: rows of its tree.

    A batch is split where that saves most, by length or by size, as long as it saves more than it takes; then its parts
    are.
    """
    least = CALL_COST + GROUP_COST / num_layers
    parts = _split(list(range(len(lengths))), lengths, sizes, least)
    return [AttentionGroup(part, max(sizes[i] for i in part)) for part in parts]


def _split(members: list[int], lengths: Sequence[int], sizes: Sequence[int], least: float) -> list[list[int]]:
    together = _cost(len(members), max(lengths[i] for i in members), max(sizes[i] for i in members))
    if together - sum(_cost(1, lengths[i], sizes[i]) for i in members) < least:  # not even all apart
        return [members]
    cuts = [_best_cut(sorted(members, key=by.__getitem__), lengths, sizes) for by in (lengths, sizes)]
    apart, place, order = min(cuts)
    if together - apart < least:
        return [members]
    return [group for part in (order[:place], order[place:]) for group in _split(part, lengths, sizes, least)]


def _best_cut(order: list[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[float, int, list[int]]:
    """Return the least cost with this order split in two, the size of the first part, and the order."""
    below, above = _costs(order, lengths, sizes), _costs(order[::-1], lengths, sizes)[::-1]
    both = [x + y for x, y in zip(below[:-1], above[1:], strict=True)]
    least = min(both)
    return least, 1 + both.index(least), order


def _costs(order: list[int], lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Return the costs of the first sequence, the first two, and so on, together."""
    longest, largest = (accumulate(map(of.__getitem__, order), max) for of in (lengths, sizes))
    return [_cost(n, x, y) for n, (x, y) in enumerate(zip(longest, largest, strict=True), 1)]


def _cost(number: int, longest: int, largest: int) -> float:
    """Return the cost of one call, in positions read by a single row."""
    return number * longest * (READ_COST + largest) / (READ_COST + 1)
