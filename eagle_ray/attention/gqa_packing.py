"""GQAPacking: group the query heads that share a key/value head, and undo it for the results.

    query [R, heads, d]  ->  [b, kv_heads, G * n, d]      rows of tree b by head of the group, then by node
    out   [b, kv_heads, G * n, dv]  ->  [R, heads, dv]

Trees that attend together are padded to n rows on the way. Each row is moved once either way,
instead of once to its tree and once more to its heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.attention_groups import AttentionGroup
from eagle_ray.core.device import to_device


@dataclass(frozen=True, slots=True)
class GQAPacking:
    """The index of each row and head in the groups' folded queries, and the inverse.

    Attributes:
        gather_index: for each entry of the folded queries, its row and head.
        shapes: shapes of the groups' folded queries, without the last dimension.
        scatter_index: for each row and head, its index in the concatenated folded queries of all
            groups.
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
        """Return the packing of query heads for a pass.

        Args:
            row_of: packed row of each node.
            unpack: index b * N + n of each packed row.
            groups: groups of trees that attend together.
        """
        num_nodes = row_of.shape[1]
        group = heads // kv_heads
        device = row_of.device

        # Queries are [R, heads], and a group folds them to [b, kv_heads, group * nodes].
        head = torch.arange(heads, device=device)
        head = head.view(1, kv_heads, group, 1)
        gather_index = []
        shapes = []
        for each in groups:
            rows = row_of
            if len(groups) > 1:
                members = to_device(each.members, device)
                rows = row_of[members]
            nodes = rows[:, None, None, : each.size]
            place = nodes * heads + head
            gather_index.append(place.flatten())
            shape = (len(each.members), kv_heads, group * each.size)
            shapes.append(shape)

        # Results lie in memory as [b, group * nodes, kv_heads].
        tree = unpack // num_nodes
        node = unpack % num_nodes
        begins, sizes = _tree_begins(groups, heads, device)
        member = torch.arange(group, device=device)
        first = member * sizes[tree][:, None]
        within = (first + node[:, None]) * kv_heads
        kv_head = torch.arange(kv_heads, device=device)[:, None]
        begin = begins[tree][:, None, None]
        scatter_index = begin + kv_head + within[:, None]
        return cls(gather_index, shapes, scatter_index.flatten())

    def fold(self, query: Float[Tensor, "1 heads R d"]) -> list[Float[Tensor, "b kv_heads Gn d"]]:
        """Return the queries of packed rows in folded form, one tensor per group."""
        rows = query[0].transpose(0, 1).flatten(0, 1)  # as they lie in memory
        folded = []
        for index, shape in zip(self.gather_index, self.shapes, strict=True):
            part = rows.index_select(0, index)
            folded.append(part.view(*shape, -1))
        return folded

    def unfold(
        self, outs: list[Float[Tensor, "b kv_heads Gn dv"]], heads: int
    ) -> Float[Tensor, "1 heads R dv"]:
        """Return the groups' results in the order of heads and packed rows."""
        # As torch's attention leaves them in memory.
        rows = [out.transpose(1, 2).flatten(0, 2) for out in outs]
        together = rows[0] if len(rows) == 1 else torch.cat(rows)
        packed = together.index_select(0, self.scatter_index)
        by_row = packed.unflatten(0, (-1, heads))
        return by_row.transpose(0, 1)[None]


def _tree_begins(
    groups: list[AttentionGroup], heads: int, device: torch.device
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Return where each tree's rows begin among those of all groups, and the rows per tree of its group."""
    sizes = [each.size for each in groups for _ in each.members]
    ends = accumulate(sizes, initial=0)
    begins = [n * heads for n in ends][:-1]
    if len(groups) == 1:  # as a device knows it by itself
        tree = torch.arange(len(sizes), device=device)
        begin = tree * (sizes[0] * heads)
        size = torch.full_like(begin, sizes[0])
        return begin, size

    # From the order of the groups to that of the batch, in one copy.
    members = [i for each in groups for i in each.members]
    order = sorted(range(len(sizes)), key=members.__getitem__)
    begins_of = [begins[i] for i in order]
    sizes_of = [sizes[i] for i in order]
    both = to_device([begins_of, sizes_of], device)
    return both[0], both[1]


def fold_rectangle(
    query: Float[Tensor, "1 heads R d"], batch: int, kv_heads: int
) -> Float[Tensor, "B kv_heads GN d"]:
    """Fold the queries of trees of equal size, without index tensors."""
    rows = query[0].unflatten(1, (batch, -1))
    by_tree = rows.transpose(0, 1)
    return by_tree.reshape(batch, kv_heads, -1, query.shape[3])


def unfold_rectangle(
    out: Float[Tensor, "B kv_heads GN dv"], heads: int
) -> Float[Tensor, "1 heads R dv"]:
    """Undo `fold_rectangle` for the results: return them by head and row."""
    batch, _, _, value_dim = out.shape
    by_node = out.reshape(batch, heads, -1, value_dim).transpose(1, 2)
    return by_node.flatten(0, 1).transpose(0, 1)[None]
