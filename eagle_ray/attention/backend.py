"""Choose the attention backend of a pass: our C++ on a CPU, Triton's kernels on a GPU, else torch.

The choice depends on the cache's device and the model, for rows of trees and for prompts:

    layout = tree_metadata(cache, batch, ...)          # rows of draft trees, or of plain decoding
    layout = prefill_metadata(cache, slots, ...)       # chunks of prompts
    layout = mixed_metadata(trees, prompts, 24)        # both in one pass
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import AttentionMetadata, MixedMetadata, TreeMetadata
from eagle_ray.attention.prefill_metadata import CHAIN_ROWS, PrefillMetadata, is_chained
from eagle_ray.attention.triton_attention import TritonTreeMetadata, uses_triton
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.tree_metadata import PackedRows
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.ancestor_words import pack_ancestors
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


def tree_metadata(
    kv_cache: KVCache,
    batch: DecodeSlots,
    slot_mapping: Int[Tensor, " R"],
    ancestors: Bool[Tensor, "B N M"] | Int[Tensor, "B N words"],
    depths: Int[Tensor, "B N"],
    position_depths: Int[Tensor, "B M"],
    row_of: Int[Tensor, "B N"] | None = None,
    unpack: Int[Tensor, " R"] | None = None,
    first: Int[Tensor, " B"] | None = None,
    seq: Int[Tensor, " R"] | None = None,
    sizes: list[int] | None = None,
) -> AttentionMetadata:
    """Return the metadata of rows of draft trees, in the class that this cache's device uses.

    Args:
        ancestors: ancestor masks; as words only if `uses_triton`.
        seq: tree of each row, -1 for padding rows; None if there is no padding.
    """
    if uses_cpp(kv_cache):
        parts = (slot_mapping, ancestors, depths, position_depths, unpack, first)
        return CpuMetadata.of_trees(kv_cache, batch, *parts)
    if not uses_triton(kv_cache):
        return TreeMetadata(
            kv_cache,
            batch,
            slot_mapping,
            ancestors,
            depths,
            position_depths,
            row_of,
            unpack,
            first,
            sizes,
        )
    num_nodes = depths.shape[1]
    words = ancestors if ancestors.dtype == torch.int64 else pack_ancestors(ancestors)
    if seq is None and unpack is not None:
        seq = unpack // num_nodes
    rows = None
    if seq is not None:
        pitch = num_nodes if row_of is None else None
        rows = PackedRows.of(seq, len(depths), pitch)
    return TritonTreeMetadata(
        kv_cache, batch, slot_mapping, words, depths, position_depths, rows, first
    )


def rows_metadata(
    kv_cache: KVCache, batch: DecodeSlots, tree: DraftTree, rows: VerifyRows, max_depth: int
) -> AttentionMetadata:
    """Return the layout of the packed rows of draft trees for this cache's device.

    Args:
        max_depth: upper bound on the depths; 0 if the trees are roots alone.
    """
    if uses_cpp(kv_cache):
        return CpuMetadata.of_rows(kv_cache, batch, tree, rows)
    seq = rows.seq.clamp(min=0)
    positions = torch.where(
        rows.seq >= 0, batch.lengths[seq] + rows.node, kv_cache.blocks.null_position
    )
    ancestors = (
        tree.ancestor_words(max_depth) if uses_triton(kv_cache) else tree.ancestors(max_depth)
    )
    has_padding = max_depth > 0 or not rows.is_rectangle  # roots alone have none
    return tree_metadata(
        kv_cache,
        batch,
        slot_mapping=kv_cache.slot_mapping(batch.slots[seq], positions),
        ancestors=ancestors,
        depths=tree.depths,
        position_depths=tree.depths,
        row_of=None if rows.is_rectangle else rows.row_of,
        unpack=None if rows.is_rectangle else seq * tree.num_nodes + rows.node,
        seq=rows.seq if has_padding else None,
        sizes=None if rows.is_rectangle else rows.sizes,
    )


def prefill_metadata(
    kv_cache: KVCache,
    slots: list[int],
    firsts: list[int],
    starts: list[int],
    lengths: list[int],
    chain_rows: int = CHAIN_ROWS,
) -> AttentionMetadata:
    """Return the metadata of prompt chunks, in the class that this cache's device uses."""
    if uses_cpp(kv_cache):
        return CpuMetadata.of_prompts(kv_cache, slots, firsts, starts, lengths)
    return PrefillMetadata(kv_cache, slots, firsts, starts, lengths, chain_rows)


def num_gathered(kv_cache: KVCache, context: int, num_rows: int) -> int:
    """Return the maximum positions that each layer gathers for a chunk behind `context` positions;
    0 if it gathers none.

    Chunks without a context are gathered, too, if another chunk of their pass is.
    """
    reads_by_table = uses_cpp(kv_cache) or is_chained(kv_cache, context, num_rows)
    return 0 if reads_by_table else context + num_rows


def mixed_metadata(
    first: AttentionMetadata, second: AttentionMetadata, num_first: int
) -> AttentionMetadata:
    """Return the layout of one pass with num_first rows of `first`, then the rows of `second`, over one cache."""
    if isinstance(first, CpuMetadata) and isinstance(second, CpuMetadata):
        return first.followed_by(second)
    return MixedMetadata(first, second, num_first)


def backend_name(kv_cache: KVCache) -> str:
    """Return the attention backend for this cache: triton, cpp or torch."""
    if uses_triton(kv_cache):
        return "triton"
    return "cpp" if uses_cpp(kv_cache) else "torch"


def uses_cpp(kv_cache: KVCache) -> bool:
    """Return whether passes over this cache use the C++ attention (kernels/cpu_ops)."""
    keys = kv_cache.keys
    return cpu_ops.available(keys.device, keys.dtype) and not uses_triton(kv_cache)
