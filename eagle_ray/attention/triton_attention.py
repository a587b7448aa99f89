"""TritonTreeMetadata: TreeMetadata for Triton's kernels.

What it needs stands on the device before the first layer attends, whatever the lengths: the host need not know them. So
one CUDA graph serves every batch of a size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams, AttentionShape, Rotary
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import to_device
from eagle_ray.kernels.availability import use_triton, why_not
from eagle_ray.kernels.tree_metadata import KernelTrees, PackedRows, unsupported_heads
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.draft_tree import NODES_PER_WORD, pack_ancestors

CHAIN_ROWS = NODES_PER_WORD  # of a prompt's chunk in one chain: its mask is one word

log = logging.getLogger("eagle_ray")


def uses_triton(kv_cache: KVCache) -> bool:
    """Return whether passes over this cache use Triton's attention; log once if the model prevents it."""
    keys, values = kv_cache.keys, kv_cache.values
    return use_triton(keys.device) and _supports(keys.dtype, keys.shape[-1], values.shape[-1])


def why_no_triton(kv_cache: KVCache) -> str | None:
    """Return why passes over this cache do not use Triton's attention, or None."""
    keys, values = kv_cache.keys, kv_cache.values
    return why_not(keys.device) or unsupported_heads(keys.dtype, keys.shape[-1], values.shape[-1])


@cache
def _supports(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    reason = unsupported_heads(dtype, key_dim, value_dim)
    if reason is not None:
        log.warning("portable attention, not Triton's: %s", reason)
    return reason is None


@dataclass(slots=True)
class TritonTreeMetadata:
    """Trees of up to N rows each, on top of what B slots hold: TreeMetadata's rows, seen by kernels.

    words: mask words of each tree's rows, over M tree positions.
    rows: place of each tree's rows among R; None for the rectangle.
    batch: its host_lengths are not read.
    """

    cache: KVCache
    batch: DecodeSlots
    slot_mapping: Int[Tensor, " R"]
    words: Int[Tensor, "B N words"]
    depths: Int[Tensor, "B N"]
    position_depths: Int[Tensor, "B M"]
    rows: PackedRows | None = None
    first: Int[Tensor, " B"] | None = None
    trees: KernelTrees = field(init=False)

    def __post_init__(self) -> None:
        self.trees = KernelTrees(
            slots=self.batch.slots,
            lengths=self.batch.lengths,
            table=self.cache.blocks.block_table,
            words=self.words.contiguous(),
            depths=self.depths,
            position_depths=self.position_depths,
            rows=self.rows,
            first=self.first,
            max_positions=self.cache.blocks.null_position,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        return self.attend_rows(query[0], attention)[None]

    def attend_projected(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
    ) -> Float[Tensor, "R heads*d"]:
        query = rotate_and_write(self.cache, self.slot_mapping, qkv, rotary, shape)
        return self.attend_rows(query.transpose(0, 1), shape.rule).transpose(0, 1).flatten(1)

    def attend_rows(self, query: Float[Tensor, "heads R d"], attention: AttentionParams) -> Float[Tensor, "heads R dv"]:
        return attend_trees(self.cache, self.trees, query, attention)


def attend_trees(
    cache: KVCache, trees: KernelTrees, query: Float[Tensor, "heads R d"], attention: AttentionParams
) -> Float[Tensor, "heads R dv"]:
    """Return the attention of rows whose keys and values the cache holds."""
    from eagle_ray.kernels.flash_decoding import tree_attention

    keys, values = cache.keys[attention.layer], cache.values[attention.layer]
    shown = (attention.scaling, attention.window, attention.softcap, attention.sinks)
    return tree_attention(query, keys, values, trees, *shown)


def chain_trees(
    cache: KVCache, slots: list[int], firsts: list[int], starts: list[int], lengths: list[int]
) -> KernelTrees:
    """Return chunks of prompts as trees: chains of up to CHAIN_ROWS rows, each on top of all rows before it."""
    device, chains = cache.keys.device, []
    for slot, first, start, length in zip(slots, firsts, starts, lengths, strict=True):
        cuts = range(0, length, CHAIN_ROWS)
        chains += [(slot, first, start + cut, min(CHAIN_ROWS, length - cut)) for cut in cuts]
    parts = [list(part) for part in zip(*chains, strict=True)]
    at, visible, bases, counts = to_device(parts, device)
    size, batch = max(parts[3]), len(chains)
    seq = torch.arange(batch, device=device).repeat_interleave(counts, output_size=sum(parts[3]))
    depths = torch.arange(size, device=device).expand(batch, -1)
    mask = pack_ancestors(torch.ones(size, size, dtype=torch.bool, device=device).tril())
    return KernelTrees(
        slots=at,
        lengths=bases,
        table=cache.blocks.block_table,
        words=mask.expand(batch, -1, -1).contiguous(),
        depths=depths,
        position_depths=depths,
        rows=PackedRows.of(seq, batch),
        first=visible if any(firsts) else None,
        max_positions=cache.blocks.null_position,
    )


def rotate_and_write(
    cache: KVCache,
    slot_mapping: Int[Tensor, " R"],
    qkv: Float[Tensor, "R width"],
    rotary: Rotary,
    shape: AttentionShape,
) -> Float[Tensor, "R heads d"]:
    """Write a merged projection's keys, normed and rotated, and values to the cache; return its queries, like keys."""
    from eagle_ray.kernels.fused_layer import rotate_and_write as launch

    keys, values = cache.layer(shape.layer)
    norms = (shape.q_norm, shape.k_norm, shape.norm_eps)
    launch(qkv, keys, values, slot_mapping, rotary.cosine, rotary.sine, *norms)
    return qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.heads]
