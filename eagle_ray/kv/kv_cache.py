"""KVCache: the keys and values of one model, in the blocks that a BlockManager allocates to slots.

A pass writes the rows of draft trees past a slot's committed tokens, and `commit` moves the
accepted path. What is not committed is overwritten by the next pass, so a rejected tree leaves no
trace.

A cache may store numbers in a smaller dtype than the rows', bf16 or FP8: they are rounded when they
are written, and read in the rows' dtype. FP8 has no scale here, because keys and values of language
models are far within its range.
"""

from __future__ import annotations

import math
import mmap

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import tree_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import FP8, to_fp8
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.tree.draft_tree import VerifyResult


class KVCache:
    """Keys and values [layers, blocks + 1, block size, kv_heads, head_dim]; the last block takes padding rows.

    Args:
        dtype: dtype of the rows that are written and read.
        value_dim: head size of the values; None is head_dim.
        stored: dtype in memory; None is `dtype`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        value_dim: int | None = None,
        stored: torch.dtype | None = None,
    ):
        self.blocks = blocks
        self.dtype = dtype
        shape = (num_layers, blocks.num_blocks + 1, blocks.size, num_kv_heads)
        self.keys = mapped_zeros((*shape, head_dim), stored or dtype, device)
        self.values = mapped_zeros((*shape, value_dim or head_dim), stored or dtype, device)

        # Views of both, made once: by index instead of block, and by layer.
        self._movable = movable(self.keys), movable(self.values)
        self._flat = tuple(part.flatten(1, 2) for part in self._movable)
        self._flat_of = _by_layer(*self._flat)
        self._blocks_of = _by_layer(*self._movable)
        self._stored_of = _by_layer(self.keys.flatten(1, 2), self.values.flatten(1, 2))

    @property
    def num_slots(self) -> int:
        return self.blocks.num_slots

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def capacity(self) -> int:
        """Return the maximum positions of a slot, tree rows included."""
        return self.blocks.capacity

    @property
    def is_rounded(self) -> bool:
        """Return whether the cache stores values in a smaller dtype than the rows'."""
        return self.keys.dtype is not self.dtype

    def layer(
        self, layer: int
    ) -> tuple[
        Float[Tensor, "indices kv_heads head_dim"], Float[Tensor, "indices kv_heads value_dim"]
    ]:
        """Return views of a layer's keys and values, by cache index and in the stored dtype."""
        return self._stored_of[layer]

    def gather(
        self, layer: int, slot_mapping: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N kv_heads head_dim"], Float[Tensor, "N kv_heads value_dim"]]:
        """Return copies of the keys and values at these indices."""
        flat_keys, flat_values = self._flat_of[layer]
        keys = flat_keys.index_select(0, slot_mapping)
        values = flat_values.index_select(0, slot_mapping)
        return self._loaded(keys), self._loaded(values)

    def slot_mapping(
        self, slots: Int[Tensor, "..."], positions: Int[Tensor, "..."]
    ) -> Int[Tensor, "..."]:
        """Return the cache index of each (slot, position) pair, at which `write` stores a row. The
        arguments are broadcast."""
        size = self.blocks.size
        index = torch.div(positions, size, rounding_mode="floor")
        block = self.blocks.block_table[slots, index]
        return block * size + positions % size

    def write(
        self,
        layer: int,
        slot_mapping: Int[Tensor, " R"],
        keys: Float[Tensor, "kv_heads R head_dim"],
        values: Float[Tensor, "kv_heads R value_dim"],
    ) -> None:
        """Store one row of keys and values at each index of `slot_mapping`."""
        flat_keys, flat_values = self._flat_of[layer]
        flat_keys.index_copy_(0, slot_mapping, self._rounded(keys.transpose(0, 1)))
        flat_values.index_copy_(0, slot_mapping, self._rounded(values.transpose(0, 1)))

    def num_positions(self, batch: DecodeSlots, more: int) -> int:
        """Return how many positions a padded read of all sequences covers: the longest length plus `more`."""
        return min(batch.max_length + more, self.blocks.null_position)

    def block_index(self, batch: DecodeSlots, more: int) -> slice | Int[Tensor, "B W"]:
        """Return the blocks of each sequence's positions and of `more` positions after them, for `read`.

        One sequence in contiguous blocks gets a slice, whose read is a view. Shorter sequences of a
        batch are padded with the null block, which stays in the CPU's cache (1 % of a plain step of
        16 sequences).
        """
        num_positions = self.num_positions(batch, more)
        size = self.blocks.size
        width = self.blocks.blocks_for(num_positions)
        if len(batch.host_slots) == 1:
            first = self.blocks.contiguous_start(batch.host_slots[0], width)
            if first is not None:
                return slice(first * size, first * size + num_positions)

        begins = torch.arange(0, width * size, size, device=batch.lengths.device)
        has = begins < (batch.lengths + more)[:, None]
        return self.blocks.block_table[batch.slots, :width].where(has, self.blocks.num_blocks)

    def read(
        self, layer: int, where: slice | Int[Tensor, "B W"], num_positions: int
    ) -> tuple[Float[Tensor, "B kv_heads T head_dim"], Float[Tensor, "B kv_heads T value_dim"]]:
        """Return the first num_positions positions of each sequence. Values at unreserved positions are arbitrary."""
        if isinstance(where, slice):
            flat_keys, flat_values = self._flat_of[layer]
            keys = flat_keys[None, where]
            values = flat_values[None, where]
        else:
            key_blocks, value_blocks = self._blocks_of[layer]
            keys = _gather_blocks(key_blocks, where)[:, :num_positions]
            values = _gather_blocks(value_blocks, where)[:, :num_positions]
        return self._loaded(keys).transpose(1, 2), self._loaded(values).transpose(1, 2)

    def _rounded(self, rows: Float[Tensor, "..."]) -> Tensor:
        """Return rows as `_flat` stores them."""
        return movable(to_fp8(rows)) if self.keys.dtype is FP8 else rows.to(self.keys.dtype)

    def _loaded(self, stored: Tensor) -> Float[Tensor, "..."]:
        """Return stored values in the dtype of rows; the inverse of `_flat`."""
        return stored.view(self.keys.dtype).to(self.dtype)

    def commit(self, batch: DecodeSlots, result: VerifyResult) -> None:
        """Move the accepted path of each tree to the positions right after its committed tokens, in every layer.

        Tree node i was written at position length + i; the j-th accepted node belongs at length + j
        <= length + i.
        """
        longest = result.accepted_nodes.shape[1]
        if longest == 1:
            return  # a root alone is in place already
        if use_triton(self.keys.device):
            return self._commit_fused(batch, result)
        if tree_ops.available(self.keys.device):
            table = self.blocks.block_table
            size = self.blocks.size
            nodes = result.accepted_nodes
            for numbers in self._flat:
                tree_ops.move_rows(numbers, table, size, batch.slots, batch.lengths, nodes)
            return None
        return self.commit_portably(batch, result)

    def commit_portably(self, batch: DecodeSlots, result: VerifyResult) -> None:
        """Run `commit` with torch operations, on any device."""
        longest = result.accepted_nodes.shape[1]
        offset = torch.arange(1, longest, device=batch.slots.device)  # the root stays
        accepted = result.accepted_nodes[:, 1:]
        moved = torch.where(accepted >= 0, accepted, offset)  # padding moves onto itself
        slots = batch.slots[:, None]
        first = batch.lengths[:, None]
        source = self.slot_mapping(slots, first + moved).flatten()
        target = self.slot_mapping(slots, first + offset).flatten()
        for flat in self._flat:
            flat.index_copy_(1, target, flat.index_select(1, source))

    def _commit_fused(self, batch: DecodeSlots, result: VerifyResult) -> None:
        from eagle_ray.kernels import fused_layer as kernel

        kernel.commit(
            *self._movable,
            self.blocks.block_table,
            batch.slots,
            batch.lengths,
            result.accepted_nodes,
        )


def _by_layer(keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return views of each layer's keys and values."""
    return list(zip(keys.unbind(0), values.unbind(0), strict=True))


def _gather_blocks(
    pool: Float[Tensor, "blocks size kv_heads d"], where: Int[Tensor, "B W"]
) -> Float[Tensor, "B W*size kv_heads d"]:
    """Return the rows of each sequence's blocks, copied."""
    rows = pool.index_select(0, where.flatten())
    return rows.view(where.shape[0], -1, *pool.shape[2:])


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a zero tensor; on a CPU its pages take memory only when written, unlike those of torch.zeros."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def movable(numbers: Tensor) -> Tensor:
    """Return a view whose numbers torch can move by index. FP8 is viewed as bytes, since torch
    lacks such operations for it."""
    return numbers.view(torch.uint8) if numbers.dtype is FP8 else numbers
