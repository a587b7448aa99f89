"""Flash decoding through a block table, then over a tree's own positions by ancestor bits: kernels and their launch.

A program takes BLOCK_M of one tree's nodes x query heads that share a key/value head, over one part of the
positions:

    first      full tiles: all is visible    length         length + M
      |------- part 0 -------|------- part 1 ---|-- tail: bits --|

The last part includes the tail, and `combine` merges the parts. The launch fixes the number of parts, the device the
length of a part: a shorter sequence has fewer. Maxima and sums are fp32, in powers of two. Arguments are those of
KernelTrees, TileSchedule and TileShape.

Everything that a launch depends on is known on the host before the rows are; everything else stays on the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import is_interpreting, launch
from eagle_ray.kernels.tree_metadata import MAX_SPLITS, MIN_TILES, KernelTrees, num_splits, tile_shape

LOG2E = tl.constexpr(1.4426950408889634)
VARYING = [
    "lengths",
    "first",
    "window",
    "num_parts",
    "words",
    "depths",
    "position_depths",
    "slots",
    "table",
    "seq",
    "starts",
    "counts",
    "tile_trees",
    "tile_begins",
    "per_tree",
    "num_trees",
    "num_nodes",
    "num_rows",
    "num_words",
    "num_positions",
    "max_positions",
    "table_width",
    "depth_pitch",
    "position_pitch",
]  # compiled once, whatever their values and alignment
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

    keys, values: contiguous, in the query's dtype or in FP8. scaling to sinks: as in AttentionParams.
    """
    heads, num_rows, key_dim = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    group = heads // kv_heads
    capability, cores = _device(query.device)
    shape = tile_shape(-(-num_rows * group // trees.num_trees), key_dim, value_dim, query.dtype, capability)
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


@triton.jit(do_not_specialize=VARYING)
def attend(
    query, keys, values, out, parts, tops, sinks, scaling, softcap,
    lengths, first, window, num_parts, words, depths, position_depths, slots, table,
    seq, starts, counts, tile_trees, tile_begins, per_tree, num_trees, num_nodes, num_rows, num_words,
    num_positions, max_positions, table_width, depth_pitch, position_pitch, query_head, query_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_DK: tl.constexpr, PAD_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one part of one tile of rows: its share of the output, or the output if there is only one part."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if per_tree > 0:
        tree, begin = tile // per_tree, tile % per_tree * BLOCK_M
        start, count = tree * num_nodes, num_nodes
    else:
        if num_parts == 1:
            _clear(out, seq, num_rows, kv_head * GROUP, GROUP, HEADS, DV, PAD_DV, BLOCK_M)
        tree, begin = tl.load(tile_trees + tile).to(tl.int32), tl.load(tile_begins + tile).to(tl.int32)
        if tree >= num_trees:
            return
        start, count = tl.load(starts + tree).to(tl.int32), tl.load(counts + tree).to(tl.int32)
    length, low, part_tiles, used = _span(lengths, first, window, tree, num_parts, BLOCK_N, MIN_TILES)
    if part >= used:
        return

    place = begin + tl.arange(0, BLOCK_M)
    node, head = place // GROUP, kv_head * GROUP + place % GROUP
    real = node < count
    row = (start + node).to(tl.int64)
    words += (tree * num_nodes + node) * num_words
    depths += tree * depth_pitch + node
    position_depths += tree * position_pitch
    q = _gathered(query + row * query_row + head * query_head, real, DK, PAD_DK, WIDE)
    acc = tl.zeros((BLOCK_M, PAD_DV), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:  # one more score, of which the first part keeps count
        counted = real & (part == 0)
        top = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2E
        total = counted.to(tl.float32)

    blocks = table + tl.load(slots + tree) * table_width
    keys += kv_head * DK
    values += kv_head * DV
    begin, end = low // BLOCK_N + part * part_tiles, length // BLOCK_N
    begin, end = begin * BLOCK_N, tl.minimum(begin + part_tiles, end) * BLOCK_N
    last = tl.minimum(length + num_positions, max_positions)
    if (first is not None) or (window is not None):
        clear = low
        if window is not None:
            deepest = tl.max(tl.load(depths, mask=real, other=0), 0).to(tl.int32)
            clear = tl.maximum(low, length + deepest - window + 1)
        for position in tl.range(begin, tl.minimum(end, clear), BLOCK_N, num_stages=1):
            positions = position + tl.arange(0, BLOCK_N)  # all of them committed
            there = positions >= low
            seen = there[None, :]
            if window is not None:
                seen &= _in_window(positions, length, real, depths, window)
            acc, top, total = _step(
                acc, top, total, q, keys, values, blocks, positions, seen, there, scaling, softcap,
                KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, WIDE,
            )  # fmt: skip
        begin = tl.maximum(begin, tl.cdiv(clear, BLOCK_N) * BLOCK_N)
    for position in range(begin, end, BLOCK_N):
        acc, top, total = _step(
            acc, top, total, q, keys, values, blocks, position + tl.arange(0, BLOCK_N), None, None, scaling, softcap,
            KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, WIDE,
        )  # fmt: skip
    if part == used - 1:
        for position in tl.range(length // BLOCK_N * BLOCK_N, last, BLOCK_N, num_stages=1):
            positions = position + tl.arange(0, BLOCK_N)
            seen, there = _seen(
                positions, length, low, real, words, num_words, depths, position_depths, num_positions, window
            )
            acc, top, total = _step(
                acc, top, total, q, keys, values, blocks, positions, seen, there & (positions < last), scaling, softcap,
                KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, WIDE,
            )  # fmt: skip

    dims = tl.arange(0, PAD_DV)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    where = row * HEADS + head
    stored = real[:, None] & (dims < DV)[None, :]
    if num_parts == 1:
        tl.store(out + where[:, None] * DV + dims[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        where += part.to(tl.int64) * num_rows * HEADS
        tl.store(parts + where[:, None] * DV + dims[None, :], result, mask=stored)
        tl.store(tops + where, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), top), mask=real)


@triton.jit(do_not_specialize=VARYING)
def combine(
    out, parts, tops, lengths, first, window, num_parts, seq, per_tree, num_nodes, num_rows,
    HEADS: tl.constexpr, DV: tl.constexpr, PAD_DV: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one head of one row by their sums; zeros for a padding row."""
    row, head = tl.program_id(0), tl.program_id(1)
    tree = row // num_nodes if per_tree > 0 else tl.load(seq + row).to(tl.int32)
    _, _, _, used = _span(lengths, first, window, tl.maximum(tree, 0), num_parts, BLOCK_N, MIN_TILES)
    used = tl.where(tree < 0, 0, used)
    stride = num_rows.to(tl.int64) * HEADS
    where = row * HEADS + head
    every = tl.arange(0, MAX_PARTS)
    top = tl.max(tl.load(tops + where + every * stride, mask=every < used, other=float("-inf")), 0)
    dims = tl.arange(0, PAD_DV)
    acc = tl.zeros((PAD_DV,), tl.float32)
    total = 0.0
    for done in range(0, used, TOGETHER):
        part = done + tl.arange(0, TOGETHER)
        weight = tl.exp2(tl.load(tops + where + part * stride, mask=part < used, other=float("-inf")) - top)
        numbers_at = (where + part * stride)[:, None] * DV + dims[None, :]
        each = tl.load(parts + numbers_at, mask=(part < used)[:, None] & (dims < DV)[None, :], other=0.0)
        acc += tl.sum(each * weight[:, None], 0)
        total += tl.sum(weight, 0)
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + where * DV + dims, result.to(out.dtype.element_ty), mask=dims < DV)


@triton.jit
def _span(lengths, first, window, tree, num_parts, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Return the committed positions, the first visible one, the tiles of a part, and the number of parts with work."""
    length = tl.load(lengths + tree).to(tl.int32)
    low = length * 0
    if first is not None:
        low = tl.load(first + tree).to(tl.int32)
    if window is not None:
        low = tl.maximum(low, length - window + 1)
    num_tiles = tl.maximum(length // BLOCK_N - low // BLOCK_N, 0)
    part_tiles = tl.maximum(tl.cdiv(num_tiles, num_parts), MIN_TILES)
    return length, low, part_tiles, tl.maximum(tl.cdiv(num_tiles, part_tiles), 1)


@triton.jit
def _step(
    acc, top, total, query, keys, values, blocks, positions, seen, there, scaling, softcap,
    KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_DK: tl.constexpr, PAD_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys and values. seen: None if every row sees the whole tile.

    there: positions that some row sees. The others are zeros: 0 times what an unused position holds may be NaN.
    """
    if there is None:
        block = tl.load(blocks + positions // BLOCK_SIZE)
    else:
        block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0)
    slot_mapping = (block * BLOCK_SIZE + positions % BLOCK_SIZE) * KV_HEADS
    k = _gathered(keys + slot_mapping * DK, there, DK, PAD_DK, WIDE).to(query.dtype)
    v = _gathered(values + slot_mapping * DV, there, DV, PAD_DV, WIDE).to(query.dtype)
    scores = _capped(tl.dot(query, tl.trans(k), input_precision="ieee"), scaling, softcap)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    base = new
    if seen is not None:  # a row may have seen nothing yet
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    share = tl.exp2(top - base)
    total = total * share + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * share[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit
def _gathered(numbers_at, there, DIM: tl.constexpr, PAD_DIM: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of DIM numbers, zeros if masked. WIDE: as fp32, since Triton's interpreter cannot multiply bf16."""
    dims = tl.arange(0, PAD_DIM)
    numbers = numbers_at[:, None] + dims[None, :]
    if there is None:
        rows = tl.load(numbers) if DIM == PAD_DIM else tl.load(numbers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(numbers, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def _capped(scores, scaling, softcap):
    """Scale scores, squash them to (-softcap, softcap), and convert them to powers of two."""
    if softcap is None:
        capped = scores * (scaling * LOG2E)
    else:
        squashed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E * scaling / softcap)) + 1.0)  # tanh
        capped = squashed * (softcap * LOG2E)
    return capped


@triton.jit
def _seen(positions, length, low, real, words, num_words, depths, position_depths, num_positions, window):
    """Return which rows see which positions: committed ones from low on, tree positions by their bits, windows by
    positions. And which positions any row may see, without regard to windows.
    """
    in_tree = positions - length
    word = tl.min(in_tree, 0) >> 6
    bits = words + word
    lower = tl.load(bits, mask=real & (word >= 0) & (word < num_words), other=0)
    upper = tl.load(bits + 1, mask=real & (word >= -1) & (word < num_words - 1), other=0)
    is_lower, shift = (in_tree >> 6) == word, (in_tree & 63).to(tl.int64)
    bits = tl.where(is_lower[None, :], lower[:, None], upper[:, None])
    committed = (in_tree < 0) & (positions >= low)
    seen = (((bits >> shift[None, :]) & 1) != 0) | committed[None, :]
    union = tl.where(is_lower, tl.reduce(lower, 0, _or), tl.reduce(upper, 0, _or))
    used_by_any = (((union >> shift) & 1) != 0) | committed
    if window is not None:
        inside = (in_tree >= 0) & (in_tree < num_positions)
        position_depth = tl.load(position_depths + in_tree, mask=inside, other=0).to(tl.int32)
        seen &= _in_window(tl.where(in_tree < 0, positions, length + position_depth), length, real, depths, window)
    return seen, used_by_any


@triton.jit
def _in_window(positions, length, real, depths, window):
    """Return which rows have which positions in their window."""
    depth = tl.load(depths, mask=real, other=0).to(tl.int32)
    return (length + depth)[:, None] - positions[None, :] < window


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _clear(
    out, seq, num_rows, head, GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, PAD_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write zeros for the padding rows of this program's share, at most BLOCK_M rows."""
    share = tl.cdiv(num_rows, tl.num_programs(0))
    offset = tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * share + offset
    mine = (offset < share) & (row < num_rows)
    padding = mine & (tl.load(seq + row, mask=mine, other=0) < 0)
    dims = tl.arange(0, PAD_DV)
    nothing = tl.zeros((BLOCK_M, PAD_DV), out.dtype.element_ty)
    for i in range(GROUP):
        numbers_at = (row.to(tl.int64) * HEADS + head + i)[:, None] * DV + dims[None, :]
        tl.store(out + numbers_at, nothing, mask=padding[:, None] & (dims < DV)[None, :])
