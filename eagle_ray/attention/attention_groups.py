"""AttentionGroup: sequences of a batch that attend in one call, padded to the longest and the largest tree.

What a call takes goes with sequences times positions times (READ_COST + rows of a tree): keys and values are gathered,
and each row meets each of them. GQAPacking takes packed rows of trees to query heads grouped by the key/value head that
they share, and back:

    query [R, heads, d]  ->  [b, kv_heads, G * n, d]      rows of tree b by head of the group, then by node
    out   [b, kv_heads, G * n, dv]  ->  [R, heads, dv]

Trees that attend together are padded to n rows on the way. Each row is moved once either way, and not once to its tree
and once more to its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device

READ_COST = 5  # rows: reading a position takes as long as that many rows that meet it
CALL_COST = 200  # positions that take as long to read as one more call in a layer: measured at 16
GROUP_COST = 700  # likewise of what is made for each group once for all layers


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """members: indices of sequences. size: rows of the largest of their trees."""

    members: list[int]
    size: int


def group_sequences(lengths: Sequence[int], sizes: Sequence[int], num_layers: int) -> list[AttentionGroup]:
    """lengths: positions of each sequence. sizes: rows of its tree.

    A batch is split where that saves most, by length or by size, as long as it saves more than it takes; then its parts
    are.
    """
    min_saving = CALL_COST + GROUP_COST / num_layers
    parts = _split(list(range(len(lengths))), lengths, sizes, min_saving)
    return [AttentionGroup(part, max(sizes[i] for i in part)) for part in parts]


def _split(members: list[int], lengths: Sequence[int], sizes: Sequence[int], min_saving: float) -> list[list[int]]:
    together = _cost(len(members), max(lengths[i] for i in members), max(sizes[i] for i in members))
    if together - sum(_cost(1, lengths[i], sizes[i]) for i in members) < min_saving:  # not even all apart
        return [members]
    cuts = [_best_cut(sorted(members, key=by.__getitem__), lengths, sizes) for by in (lengths, sizes)]
    apart, place, order = min(cuts)
    if together - apart < min_saving:
        return [members]
    return [group for part in (order[:place], order[place:]) for group in _split(part, lengths, sizes, min_saving)]


def _best_cut(order: list[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[float, int, list[int]]:
    """Return the least cost with this order split in two, the size of the first part, and the order."""
    below, above = _costs(order, lengths, sizes), _costs(order[::-1], lengths, sizes)[::-1]
    both = [x + y for x, y in zip(below[:-1], above[1:], strict=True)]
    cost = min(both)
    return cost, 1 + both.index(cost), order


def _costs(order: list[int], lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Return the costs of the first sequence, the first two, and so on, together."""
    longest, largest = (accumulate(map(of.__getitem__, order), max) for of in (lengths, sizes))
    return [_cost(n, x, y) for n, (x, y) in enumerate(zip(longest, largest, strict=True), 1)]


def _cost(number: int, longest: int, largest: int) -> float:
    """Return the cost of one call, in positions read by a single row."""
    return number * longest * (READ_COST + largest) / (READ_COST + 1)


@dataclass(frozen=True, slots=True)
class GQAPacking:
    """there: for each place of a group's folded queries its row and head. shapes: of the groups, but for the last dim.

    back: for each row and head its place among those of all groups, one after the other.
    """

    gather_index: list[Int[Tensor, " BKGN"]]
    shapes: list[tuple[int, int, int]]
    scatter_index: Int[Tensor, " RH"]

    @classmethod
    def of(
        cls,
        row_of: Int[Tensor, "B N"],
        unpack: Int[Tensor, " R"],
        heads: int,
        kv_heads: int,
        groups: list[AttentionGroup],
    ) -> GQAPacking:
        """row_of: the row of each node. unpack: of each row b * N + n. groups: which trees are a group."""
        num_nodes, group, device = row_of.shape[1], heads // kv_heads, row_of.device
        head = torch.arange(heads, device=device).view(1, kv_heads, group, 1)
        there, shapes = [], []
        for each in groups:
            rows = row_of if len(groups) == 1 else row_of[to_device(each.members, device)]
            there.append((rows[:, None, None, : each.size] * heads + head).flatten())
            shapes.append((len(each.members), kv_heads, group * each.size))
        tree, node = unpack // num_nodes, unpack % num_nodes
        begins, sizes = _gather_index(groups, heads, device)
        member = torch.arange(group, device=device)
        within = (member * sizes[tree][:, None] + node[:, None]) * kv_heads
        back = begins[tree][:, None, None] + torch.arange(kv_heads, device=device)[:, None] + within[:, None]
        return cls(there, shapes, back.flatten())

    def fold(self, query: Float[Tensor, "1 heads R d"]) -> list[Float[Tensor, "b kv_heads Gn d"]]:
        """Return the packed rows, by group."""
        rows = query[0].transpose(0, 1).flatten(0, 1)  # as they lie in memory
        parts = zip(self.gather_index, self.shapes, strict=True)
        return [rows.index_select(0, there).view(*shape, -1) for there, shape in parts]

    def unfold(self, outs: list[Float[Tensor, "b kv_heads Gn dv"]], heads: int) -> Float[Tensor, "1 heads R dv"]:
        rows = [out.transpose(1, 2).flatten(0, 2) for out in outs]  # as torch's attention leaves them in memory
        together = rows[0] if len(rows) == 1 else torch.cat(rows)
        return together.index_select(0, self.scatter_index).unflatten(0, (-1, heads)).transpose(0, 1)[None]


def _gather_index(
    groups: list[AttentionGroup], heads: int, device: torch.device
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Return where each tree's rows begin among those of all groups, and the rows per tree of its group."""
    sizes = [each.size for each in groups for _ in each.members]
    begins = [n * heads for n in accumulate(sizes, initial=0)][:-1]
    if len(groups) == 1:  # as a device knows it by itself
        begin = torch.arange(len(sizes), device=device) * (sizes[0] * heads)
        return begin, torch.full_like(begin, sizes[0])
    order = sorted(range(len(sizes)), key=[i for each in groups for i in each.members].__getitem__)
    both = to_device([[begins[i] for i in order], [sizes[i] for i in order]], device)
    return both[0], both[1]


def fold_rectangle(query: Float[Tensor, "1 heads R d"], batch: int, kv_heads: int) -> Float[Tensor, "B kv_heads GN d"]:
    """Fold rows of trees of equal size."""
    return query[0].unflatten(1, (batch, -1)).transpose(0, 1).reshape(batch, kv_heads, -1, query.shape[3])


def unfold_rectangle(out: Float[Tensor, "B kv_heads GN dv"], heads: int) -> Float[Tensor, "1 heads R dv"]:
    batch, _, _, value_dim = out.shape
    by_node = out.reshape(batch, heads, -1, value_dim).transpose(1, 2)
    return by_node.flatten(0, 1).transpose(0, 1)[None]
