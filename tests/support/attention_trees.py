"""Random trees over random caches, attended to by the kernels and by the portable path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams, TreeMetadata
from eagle_ray.attention.triton_attention import TritonTreeMetadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels.tree_metadata import KernelTrees, PackedRows
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.ancestor_words import pack_ancestors
from tests.support.kernels import DEVICE


@dataclass(frozen=True)
class RandomTrees:
    """Trees of counts[b] nodes over lengths[b] columns, in the first rows of R; the rest is padding.

    rectangle: rows are B x N. unknown: the host does not know the lengths. stale: what positions
    hold that no sequence has written. stored: the dtype of the cache, if it is not the rows'.
    """

    lengths: list[int]
    counts: list[int]
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    padding: int = 0
    rectangle: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    firsts: list[int] | None = None
    unknown: bool = False
    stale: float | None = None
    stored: torch.dtype | None = None
    seed: int = 0

    def attend(self) -> tuple[Tensor, Tensor, Tensor]:
        """[R, heads * value_dim] by the kernels, by the portable path in fp64, and which rows are real.

        In fp32 torch's own attention on a GPU may be as far from the exact numbers as the kernels.
        """
        layer = self.case()
        ours, theirs = layer.by_kernels(), layer.by_torch()
        return *(x[0].transpose(0, 1).flatten(1).float() for x in (ours, theirs)), layer.real

    def case(self) -> AttentionCase:
        """Return one layer's trees, rows and caches."""
        torch.manual_seed(self.seed)
        cache, batch = (
            self._filled(),
            DecodeSlots.of(list(range(len(self.lengths))), self.lengths, DEVICE),
        )
        parents = [
            torch.tensor([-1] + [int(torch.randint(i, ())) for i in range(1, n)])
            for n in self.counts
        ]
        num_nodes = max(self.counts)
        ancestors, depths = self._ancestors(parents, num_nodes)
        seq, node, row_of = self._rows(num_nodes)
        heads, num_rows = self.kv_heads * self.group, len(seq)
        query = torch.randn(1, heads, num_rows, self.key_dim, device=DEVICE, dtype=self.dtype)
        key = torch.randn(1, self.kv_heads, num_rows, self.key_dim, device=DEVICE, dtype=self.dtype)
        value = torch.randn(
            1, self.kv_heads, num_rows, self.value_dim, device=DEVICE, dtype=self.dtype
        )
        if self.stored is not None:
            key, value = (x.to(self.stored).to(self.dtype) for x in (key, value))
        sinks = torch.randn(heads, device=DEVICE) if self.sinks else None
        attention = AttentionParams(0, self.key_dim**-0.5, self.window, self.softcap, sinks)
        columns = torch.where(
            seq >= 0, batch.lengths[seq.clamp(min=0)] + node, cache.blocks.null_position
        )
        cells = cache.slot_mapping(batch.slots[seq.clamp(min=0)], columns)
        first = None if self.firsts is None else torch.tensor(self.firsts, device=DEVICE)
        rows = PackedRows.of(seq, len(self.lengths), num_nodes if self.rectangle else None)
        rows = None if self.rectangle and min(self.counts) == num_nodes else rows
        unknown = replace(batch, host_lengths=[]) if self.unknown else batch
        kernels = TritonTreeMetadata(
            cache, unknown, cells, pack_ancestors(ancestors), depths, depths, rows, first
        )
        unpack = seq.clamp(min=0) * num_nodes + node
        portable = TreeMetadata(
            cache, batch, cells, ancestors, depths, depths, row_of, unpack, first
        )
        return AttentionCase(kernels, portable, query, key, value, attention, seq >= 0)

    def _filled(self) -> KVCache:
        """Every slot in blocks that lie anywhere, the columns past its length too."""
        capacity = max(self.lengths) + max(self.counts) + 1
        blocks = BlockManager(len(self.lengths), capacity, device=DEVICE)
        order = torch.randperm(blocks.num_blocks).tolist()
        blocks.free_blocks = order
        for slot, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            assert blocks.reserve(slot, length + count)
        cache = KVCache(
            blocks, 1, self.kv_heads, self.key_dim, self.dtype, DEVICE, self.value_dim, self.stored
        )
        cache.keys.copy_(torch.randn(cache.keys.shape, device=DEVICE))
        cache.values.copy_(torch.randn(cache.values.shape, device=DEVICE))
        if self.stale is not None:
            self._fill_unwritten(cache)
        return cache

    def _fill_unwritten(self, cache: KVCache) -> None:
        written = torch.zeros(cache.keys[0].shape[:2], dtype=torch.bool, device=DEVICE)
        for slot, length in enumerate(self.lengths):
            columns = torch.arange(length, device=DEVICE)
            written.view(-1)[cache.slot_mapping(torch.full_like(columns, slot), columns)] = True
        for pool in (cache.keys[0], cache.values[0]):
            pool[~written] = self.stale

    def _ancestors(self, parents: list[Tensor], num_nodes: int) -> tuple[Tensor, Tensor]:
        """By walking up, one node at a time."""
        seen = torch.zeros(len(parents), num_nodes, num_nodes, dtype=torch.bool)
        depths = torch.zeros(len(parents), num_nodes, dtype=torch.int64)
        for b, tree in enumerate(parents):
            for i, parent in enumerate(tree.tolist()):
                seen[b, i] = seen[b, parent] if parent >= 0 else False
                depths[b, i] = depths[b, parent] + 1 if parent >= 0 else 0
                seen[b, i, i] = True
        return seen.to(DEVICE), depths.to(DEVICE)

    def _rows(self, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """seq and node of each row, and the row of each node."""
        places = [
            (b, i)
            for b, n in enumerate(self.counts)
            for i in range(num_nodes if self.rectangle else n)
        ]
        seq = [b if i < self.counts[b] else -1 for b, i in places] + [-1] * self.padding
        node = [i for _, i in places] + [0] * self.padding
        row_of = torch.zeros(len(self.counts), num_nodes, dtype=torch.int64)
        for row, (b, i) in enumerate(places):
            row_of[b, i] = row
        return (
            torch.tensor(seq, device=DEVICE),
            torch.tensor(node, device=DEVICE),
            row_of.to(DEVICE),
        )


@dataclass(frozen=True)
class AttentionCase:
    """A forest's rows [1, heads, R, d], and the two ways in which they attend over its cache."""

    kernels: TritonTreeMetadata
    portable: TreeMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    attention: AttentionParams
    real: Tensor

    def by_kernels(self) -> Tensor:
        return self.kernels.attend(self.query, self.key, self.value, self.attention)

    def by_torch(self) -> Tensor:
        """In fp64, over the numbers that the cache holds."""
        cache, (key_dim, value_dim) = self.kernels.cache, (self.key.shape[-1], self.value.shape[-1])
        exact = KVCache(
            cache.blocks, 1, self.key.shape[1], key_dim, torch.float64, DEVICE, value_dim
        )
        exact.keys.copy_(cache.keys)
        exact.values.copy_(cache.values)
        portable = replace(self.portable, cache=exact)
        return portable.attend(
            self.query.double(), self.key.double(), self.value.double(), self.attention
        )


def kernel_trees(seq: torch.Tensor, batch: int) -> KernelTrees:
    """Nothing but where rows lie."""
    nothing = torch.zeros(batch, 1, 1, dtype=torch.int64)
    rows = PackedRows.of(seq, batch)
    return KernelTrees(
        *[nothing[:, 0, 0]] * 2, nothing[0], nothing, nothing[0], nothing[0], rows, None, 0
    )
