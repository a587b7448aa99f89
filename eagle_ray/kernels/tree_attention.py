"""Launch tree attention over a block table on a GPU.

The kernels are in flash_decoding.py. Everything that a launch depends on is known on the host before the rows are;
everything else stays on the device.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import is_interpreting, launch
from eagle_ray.kernels.flash_decoding import attend, combine
from eagle_ray.kernels.tree_metadata import MAX_SPLITS, MIN_TILES, KernelTrees, num_splits, tile_shape

INTERPRETED = (9, 0), 8  # few programs in all, and contexts in parts nevertheless
COMBINE_WARPS = 2
TOGETHER = 16  # parts that `combine` reads at a time


def tree_attention(
    query: Float[Tensor, "heads R d"],
    keys: Float[Tensor, "blocks size kv_heads d"],
    values: Float[Tensor, "blocks size kv_heads dv"],
    trees: KernelTrees,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "heads R dv"]:
    """Return the attention of each row over its slot's keys and values; zeros for padding rows.

    keys, values: contiguous, in the query's dtype. scaling to sinks: as in AttentionParams.
    """
    heads, num_rows, key_dim = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    group = heads // kv_heads
    capability, cores = _device(query.device)
    shape = tile_shape(-(-num_rows * group // trees.num_trees), key_dim, value_dim, keys.dtype, capability)
    tiles = trees.schedule(num_rows, group, shape.rows)
    splits = num_splits(tiles.count * kv_heads, trees.longest, shape, cores)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = query.new_empty(num_rows, heads, value_dim)
    room = (splits, num_rows, heads) if splits > 1 else (0, 0, 0)
    parts, tops = (out.new_empty(size, dtype=torch.float32) for size in ((*room, value_dim), room))
    none = trees.lengths  # stands for the indices that a rectangle has no need of
    seq, *packing = (none,) * 5 if trees.rows is None else (*trees.rows.tensors, tiles.trees, tiles.begins)
    span = (trees.lengths, trees.first, window, splits)
    sizes = dict(HEADS=heads, DV=value_dim, PAD_DV=padded(value_dim), BLOCK_N=shape.keys, MIN_TILES=MIN_TILES)
    launch(attend, (tiles.count, kv_heads, splits))(
        query, keys, values, out, parts, tops, sinks, scaling, softcap,
        *span, trees.words, trees.depths, trees.position_depths, trees.slots, trees.table,
        seq, *packing, tiles.per_tree, trees.num_trees, trees.num_nodes, num_rows, trees.words.shape[2],
        trees.num_positions, trees.max_positions, trees.table.stride(0),
        trees.depths.stride(0), trees.position_depths.stride(0), query.stride(0), query.stride(1),
        **sizes, KV_HEADS=kv_heads, DK=key_dim, PAD_DK=padded(key_dim), BLOCK_SIZE=block_size, BLOCK_M=shape.rows,
        WIDE=is_interpreting(), num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        launch(combine, (num_rows, heads))(
            out, parts, tops, *span, seq, tiles.per_tree, trees.num_nodes, num_rows,
            **sizes, MAX_PARTS=MAX_SPLITS, TOGETHER=TOGETHER, num_warps=COMBINE_WARPS,
        )  # fmt: skip
    return out.transpose(0, 1)


def padded(dim: int) -> int:
    """Return the next power of two, at least the minimum of tensor cores."""
    return max(1 << (dim - 1).bit_length(), 16)


@cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return compute capability and number of multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
