"""TritonTreeMetadata: TreeMetadata for Triton's kernels.

All of its tensors are on the device before the first layer attends, and the host need not know the
lengths. So one CUDA graph serves every batch of a size.
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
from eagle_ray.tree.ancestor_words import NODES_PER_WORD, pack_ancestors

CHAIN_ROWS = NODES_PER_WORD  # rows of a prompt's chunk in one chain: its mask is one word

log = logging.getLogger("eagle_ray")


def uses_triton(kv_cache: KVCache) -> bool:
    """Return whether passes over this cache use Triton's attention. If the model prevents it, log that once."""
    keys = kv_cache.keys
    value_dim = kv_cache.values.shape[-1]
    return use_triton(keys.device) and _supports(keys.dtype, keys.shape[-1], value_dim)


def why_no_triton(kv_cache: KVCache) -> str | None:
    """Return why passes over this cache do not use Triton's attention, or None."""
    keys = kv_cache.keys
    value_dim = kv_cache.values.shape[-1]
    return why_not(keys.device) or unsupported_heads(keys.dtype, keys.shape[-1], value_dim)


@cache
def _supports(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    reason = unsupported_heads(dtype, key_dim, value_dim)
    if reason is not None:
        log.warning("portable attention, not Triton's: %s", reason)
    return reason is None


@dataclass(slots=True)
class TritonTreeMetadata:
    """Trees of up to N rows each, on top of the cached tokens of B slots: TreeMetadata in the kernels' form.

    Attributes:
        batch: slots of the batch, whose host_lengths are not read.
        words: ancestor masks of each tree's rows over M tree positions, as words.
        rows: packing of each tree's rows among R; None for the rectangle.
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

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> Tensor:
        self.cache.write(attention.layer, self.slot_mapping, key[0], value[0])
        return self.attend_rows(query[0], attention)[None]

    def attend_projected(
        self, qkv: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
    ) -> Float[Tensor, "R heads*d"]:
        query = rotate_and_write(self.cache, self.slot_mapping, qkv, rotary, shape)
        out = self.attend_rows(query.transpose(0, 1), shape.rule)
        return out.transpose(0, 1).flatten(1)

    def attend_rows(
        self, query: Float[Tensor, "heads R d"], attention: AttentionParams
    ) -> Float[Tensor, "heads R dv"]:
        """Return the attention of rows whose keys and values are already in the cache."""
        return attend_trees(self.cache, self.trees, query, attention)


def attend_trees(
    cache: KVCache,
    trees: KernelTrees,
    query: Float[Tensor, "heads R d"],
    attention: AttentionParams,
) -> Float[Tensor, "heads R dv"]:
    """Return the attention of rows whose keys and values are already in the cache."""
    from eagle_ray.kernels.flash_decoding import tree_attention

    return tree_attention(
        query,
        cache.keys[attention.layer],
        cache.values[attention.layer],
        trees,
        attention.scaling,
        attention.window,
        attention.softcap,
        attention.sinks,
    )


def chain_trees(
    cache: KVCache, slots: list[int], firsts: list[int], starts: list[int], lengths: list[int]
) -> KernelTrees:
    """Return prompt chunks as trees: chains of up to CHAIN_ROWS rows, each on top of all rows before it."""
    # Each chain's slot, first visible position, first row's position, and number of rows.
    chains = []
    for slot, first, start, length in zip(slots, firsts, starts, lengths, strict=True):
        for cut in range(0, length, CHAIN_ROWS):
            chains.append((slot, first, start + cut, min(CHAIN_ROWS, length - cut)))
    parts = [list(part) for part in zip(*chains, strict=True)]
    device = cache.keys.device
    chain_slots, chain_firsts, chain_starts, counts = to_device(parts, device)

    # In a chain each row sees those before it.
    batch = len(chains)
    size = max(parts[3])
    is_before = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    words = pack_ancestors(is_before).expand(batch, -1, -1).contiguous()
    depths = torch.arange(size, device=device).expand(batch, -1)

    chain = torch.arange(batch, device=device)
    seq = chain.repeat_interleave(counts, output_size=sum(parts[3]))
    return KernelTrees(
        slots=chain_slots,
        lengths=chain_starts,
        table=cache.blocks.block_table,
        words=words,
        depths=depths,
        position_depths=depths,
        rows=PackedRows.of(seq, batch),
        first=chain_firsts if any(firsts) else None,
        max_positions=cache.blocks.null_position,
    )


def rotate_and_write(
    cache: KVCache,
    slot_mapping: Int[Tensor, " R"],
    qkv: Float[Tensor, "R width"],
    rotary: Rotary,
    shape: AttentionShape,
) -> Float[Tensor, "R heads d"]:
    """Norm and rotate a merged projection; write its keys and values to the cache and return its queries."""
    from eagle_ray.kernels.fused_layer import rotate_and_write as launch

    keys, values = cache.layer(shape.layer)
    norms = (shape.q_norm, shape.k_norm, shape.norm_eps)
    launch(qkv, keys, values, slot_mapping, rotary.cosine, rotary.sine, *norms)
    return qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.heads]
