"""Folding: packed rows of trees to query heads that lie beside the key/value head they share, and back.

    query [R, heads, d]  ->  [B, kv_heads, G * N, d]      rows of tree b by head of the group, then by node
    out   [B, kv_heads, G * N, dv]  ->  [R, heads, dv]

Trees of different sizes are padded to N rows on the way. Each row is moved once either way, and not once to its tree
and once more to its heads. Does not know attention or the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Folding:
    """there: for each place of the folded queries its row and head. back: for each row and head its place."""

    there: Int[Tensor, " BKGN"]
    back: Int[Tensor, " RH"]
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, row_of: Int[Tensor, "B N"], unpack: Int[Tensor, " R"], heads: int, kv_heads: int) -> Folding:
        """row_of: the row of each node. unpack: of each row b * N + n."""
        batch, num_nodes = row_of.shape
        group, device = heads // kv_heads, row_of.device
        head = torch.arange(heads, device=device).view(1, kv_heads, group, 1)
        there = row_of[:, None, None] * heads + head
        tree, node = unpack // num_nodes, unpack % num_nodes
        first = (tree * (group * num_nodes) + node)[:, None, None] * kv_heads
        member = torch.arange(group, device=device) * (num_nodes * kv_heads)
        back = first + torch.arange(kv_heads, device=device)[:, None] + member
        return cls(there.flatten(), back.flatten(), (batch, kv_heads, group * num_nodes))

    def fold(self, query: Float[Tensor, "1 heads R d"]) -> Float[Tensor, "B kv_heads GN d"]:
        rows = query[0].transpose(0, 1).flatten(0, 1)  # as they lie in memory
        return rows.index_select(0, self.there).view(*self.shape, -1)

    def unfold(self, out: Float[Tensor, "B kv_heads GN dv"], heads: int) -> Float[Tensor, "1 heads R dv"]:
        rows = out.transpose(1, 2).flatten(0, 2)  # as torch's attention leaves them in memory
        return rows.index_select(0, self.back).unflatten(0, (-1, heads)).transpose(0, 1)[None]


def fold_rectangle(query: Float[Tensor, "1 heads R d"], batch: int, kv_heads: int) -> Float[Tensor, "B kv_heads GN d"]:
    """The same where every tree has as many rows as the others, one tree after the other."""
    return query[0].unflatten(1, (batch, -1)).transpose(0, 1).reshape(batch, kv_heads, -1, query.shape[3])


def unfold_rectangle(out: Float[Tensor, "B kv_heads GN dv"], heads: int) -> Float[Tensor, "1 heads R dv"]:
    batch, _, _, value_dim = out.shape
    by_node = out.reshape(batch, heads, -1, value_dim).transpose(1, 2)
    return by_node.flatten(0, 1).transpose(0, 1)[None]
