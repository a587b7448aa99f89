"""AttentionGroup: sequences whose attention runs in one call, padded to the longest context and the largest tree.

The cost of a call grows with sequences times positions times (READ_COST + rows of a tree): keys and
values are gathered, and each row is multiplied with each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_COST = 5  # rows: reading a position takes as long as that many rows that meet it
CALL_COST = 200  # positions that take as long to read as one more call in a layer: measured at 16
GROUP_COST = 700  # positions that take as long to read as making a group, once for all layers


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of a batch whose attention runs in one call.

    Attributes:
        members: indices of the sequences.
        size: rows of the largest of their trees.
    """

    members: list[int]
    size: int


def group_sequences(
    lengths: Sequence[int], sizes: Sequence[int], num_layers: int
) -> list[AttentionGroup]:
    """Split a batch into groups.

    A batch is split in two where that saves the most, by length or by tree size, if it saves more
    than a further call costs. Both parts are then split likewise.

    Args:
        lengths: positions of each sequence.
        sizes: rows of each sequence's tree.
    """
    min_saving = CALL_COST + GROUP_COST / num_layers
    members = list(range(len(lengths)))
    groups = []
    for part in _split(members, lengths, sizes, min_saving):
        largest = max(sizes[i] for i in part)
        groups.append(AttentionGroup(part, largest))
    return groups


def _split(
    members: list[int], lengths: Sequence[int], sizes: Sequence[int], min_saving: float
) -> list[list[int]]:
    """Return these sequences in groups, each of which costs less together than in two parts."""
    longest = max(lengths[i] for i in members)
    largest = max(sizes[i] for i in members)
    together = _cost(len(members), longest, largest)

    # Without waste each sequence would cost what it costs alone.
    alone = sum(_cost(1, lengths[i], sizes[i]) for i in members)
    if together - alone < min_saving:
        return [members]

    # The better one of a cut by length and a cut by size.
    by_length = sorted(members, key=lengths.__getitem__)
    by_size = sorted(members, key=sizes.__getitem__)
    length_cut = _best_cut(by_length, lengths, sizes)
    size_cut = _best_cut(by_size, lengths, sizes)
    apart, place, order = min(length_cut, size_cut)
    if together - apart < min_saving:
        return [members]
    low = _split(order[:place], lengths, sizes, min_saving)
    high = _split(order[place:], lengths, sizes, min_saving)
    return low + high


def _best_cut(
    order: list[int], lengths: Sequence[int], sizes: Sequence[int]
) -> tuple[float, int, list[int]]:
    """Return the least cost with this order split in two, the size of the first part, and the order."""
    # The costs of the first sequences and of the last ones, for each number of them.
    below = _costs(order, lengths, sizes)
    above = _costs(order[::-1], lengths, sizes)
    above.reverse()

    # A cut has a sequence on either side.
    cuts = zip(below[:-1], above[1:], strict=True)
    both = [first + second for first, second in cuts]
    cost = min(both)
    place = 1 + both.index(cost)
    return cost, place, order


def _costs(order: list[int], lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Return the costs of the first sequence, the first two, and so on, together."""
    costs = []
    longest = 0
    largest = 0
    for number, i in enumerate(order, 1):
        longest = max(longest, lengths[i])
        largest = max(largest, sizes[i])
        costs.append(_cost(number, longest, largest))
    return costs


def _cost(number: int, longest: int, largest: int) -> float:
    """Return the cost of one call, in positions read by a single row."""
    read_and_met = READ_COST + largest
    by_single_row = READ_COST + 1
    return number * longest * read_and_met / by_single_row
