"""Flash decoding through a block table, then over a tree's own positions by ancestor bits: the kernel and its launch.

A unit of work is BLOCK_M of one tree's nodes x query heads that share a key/value head, over one
part of the positions or over all parts in turn; see kernels/work_list.py:

    first      full tiles: all is visible    length         length + M
      |------- part 0 -------|------- part 1 -------|-- tail: bits --|

Maxima and sums are fp32, in powers of two. Parts of a context are added from the first to the last,
in whatever order programs computed them. That takes no second launch: the program that finishes its
part last adds them up.

    store sums of a part              every thread
    barrier                           orders these stores before the next line, for all threads of the program
    n = atomic_add(arrival, acq_rel)  one thread: its release covers what the barrier ordered before it, and its acquire
                                      is after the releases of all programs that arrived earlier
    barrier                           Triton's own, which hands n to all threads: they are after the acquire, too
    load sums of all parts            if n says that this one is the last; .cg, past a cache that knows no acquire

No program waits for another, so it does not matter how many run at a time. The last program of a
context resets its count of arrivals, and the program that takes the last unit of work resets the
counter of work. So both are zero for the next launch, which may be a replay. The work list sets
them to zero at first, within the pass.

The parameters of a launch are known on the host in advance; everything else stays on the device.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import is_interpreting, launch
from eagle_ray.kernels.tree_metadata import (
    KernelTrees,
    Reading,
    TileShape,
    multiprocessors,
    tile_shape,
)
from eagle_ray.kernels.work_list import FIELDS_PER_ITEM, span, window_begin, work_list

LOG2E = tl.constexpr(1.4426950408889634)
# Compiled once, whatever their values and alignment.
DECODING_VARYING = [
    "lengths",
    "first",
    "window",
    "items",
    "counts",
    "arrivals",
    "words",
    "depths",
    "position_depths",
    "slots",
    "table",
    "seq",
    "starts",
    "row_counts",
    "num_nodes",
    "num_rows",
    "num_words",
    "num_positions",
    "max_positions",
    "table_width",
    "depth_pitch",
    "position_pitch",
]


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

    Args:
        keys: cached keys, contiguous, in the query's dtype or in FP8.
        values: cached values, likewise.
        scaling: this and the following arguments are as in AttentionParams.
    """
    heads, num_rows, key_dim = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    reading = _reading(query, kv_heads, value_dim, trees, window)
    tile = reading.tile
    works = work_list(trees, reading)

    if query.stride(2) != 1:
        query = query.contiguous()
    out = query.new_empty(num_rows, heads, value_dim)

    # Weighted values, largest score and sum of weights of each part of a context.
    num_sums = works.room * heads
    parts = out.new_empty(num_sums, value_dim, dtype=torch.float32)
    tops = out.new_empty(num_sums, dtype=torch.float32)
    totals = out.new_empty(num_sums, dtype=torch.float32)

    packing = (None, None, None) if trees.rows is None else trees.rows.tensors
    launch(attend, (works.programs,))(
        query,
        keys,
        values,
        out,
        parts,
        tops,
        totals,
        sinks,
        scaling,
        softcap,
        works.items,
        works.counts,
        works.arrivals,
        trees.lengths,
        trees.first,
        window,
        trees.words,
        trees.depths,
        trees.position_depths,
        trees.slots,
        trees.table,
        *packing,
        trees.num_nodes,
        num_rows,
        trees.words.shape[2],
        trees.num_positions,
        trees.max_positions,
        trees.table.stride(0),
        trees.depths.stride(0),
        trees.position_depths.stride(0),
        query.stride(0),
        query.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DK=key_dim,
        DV=value_dim,
        PAD_DK=padded(key_dim),
        PAD_DV=padded(value_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        PART_TILES=reading.part_tiles,
        PARTS=tile.parts,
        FOLD=tile.fold,
        FOLD_ROWS=fold_rows(tile, value_dim),
        WIDE=is_interpreting(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out.transpose(0, 1)


def _reading(
    query: Float[Tensor, "heads R d"],
    kv_heads: int,
    value_dim: int,
    trees: KernelTrees,
    window: int | None,
) -> Reading:
    """Return how the programs of a layer share the pass."""
    heads, num_rows, key_dim = query.shape
    capability, cores = multiprocessors(query.device)
    group = heads // kv_heads
    rows_per_tree = -(-num_rows * group // trees.num_trees)
    tile = tile_shape(rows_per_tree, key_dim, value_dim, query.dtype, capability)
    return Reading(num_rows, heads, kv_heads, value_dim, window, tile, cores * tile.per_core)


def padded(dim: int) -> int:
    """Return the next power of two, at least the minimum of tensor cores."""
    return max(1 << (dim - 1).bit_length(), 16)


def fold_rows(tile: TileShape, value_dim: int) -> int:
    """Return how many rows are added at once so that `tile.fold` parts of them take 32 registers per thread."""
    return max(1024 * tile.warps // (tile.fold * padded(value_dim)), 1)


@triton.jit(do_not_specialize=DECODING_VARYING)
def attend(
    query,
    keys,
    values,
    out,
    parts,  # [sums, DV]: weighted values of parts of contexts
    tops,  # [sums]: their largest scores
    totals,  # [sums]: their sums of weights
    sinks,  # [HEADS]; None without sinks
    scaling,
    softcap,
    items,  # this and the following two: of the work list
    counts,
    arrivals,
    lengths,  # this to `table`: of KernelTrees
    first,
    window,
    words,
    depths,
    position_depths,
    slots,
    table,
    seq,  # this and the following two: of PackedRows; None for a rectangle
    starts,
    row_counts,
    num_nodes,
    num_rows,
    num_words,
    num_positions,
    max_positions,
    table_width,
    depth_pitch,
    position_pitch,
    query_head,
    query_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_DK: tl.constexpr,
    PAD_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Triton kernel: compute units of work until none is left. A unit is a tile of rows over one or
    all parts of its context."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if seq is not None:
        _clear(out, seq, num_rows, HEADS * DV)
    num_works = tl.load(counts) * KV_HEADS
    work = tl.program_id(0)
    next_part = 0
    while work < num_works:
        # The rows of this work, and the tiles of their context.
        kv_head = work % KV_HEADS
        item = items + work // KV_HEADS * FIELDS_PER_ITEM
        tree, start, node, head, real = _rows(
            item, kv_head, starts, row_counts, num_nodes, GROUP, BLOCK_M
        )
        length, low, part_tiles, first_tile, last_tile = span(
            tree, tree >= 0, _count(tree, row_counts, num_nodes), lengths, first, window, num_positions, max_positions,
            GROUP, BLOCK_M, BLOCK_N, PART_TILES, PARTS,
        )  # fmt: skip

        # The part of this work: a cut context's item names it, a whole one's are taken in turn.
        cut = tl.load(item + 2)
        part = first_tile // part_tiles + tl.where(cut < 0, next_part, cut)
        rows = query + tl.cast(start, tl.int64) * query_row
        q = _gathered(rows + node * query_row + head * query_head, real, DK, PAD_DK, WIDE)
        head_keys = keys + kv_head * DK
        head_values = values + kv_head * DV
        blocks = table + tl.load(slots + tree) * table_width
        begin = tl.maximum(part * part_tiles, first_tile) * BLOCK_N
        end = tl.minimum((part + 1) * part_tiles, last_tile) * BLOCK_N
        row_words = words + (tree * num_nodes + node) * num_words
        row_depths = depths + tree * depth_pitch + node
        tree_depths = position_depths + tree * position_pitch
        acc, top, total = _part(
            q, head_keys, head_values, blocks, begin, end, length, low, real, first, window, row_words, num_words,
            row_depths, tree_depths, num_positions, max_positions, scaling, softcap,
            KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip

        tl.debug_barrier()  # from here on all is read again: it would take registers from the loops above
        kv_head = work % KV_HEADS
        item = items + work // KV_HEADS * FIELDS_PER_ITEM
        tree, start, node, head, real = _rows(
            item, kv_head, starts, row_counts, num_nodes, GROUP, BLOCK_M
        )
        count = _count(tree, row_counts, num_nodes)
        _, _, part_tiles, first_tile, last_tile = span(
            tree, tree >= 0, count, lengths, first, window, num_positions, max_positions,
            GROUP, BLOCK_M, BLOCK_N, PART_TILES, PARTS,
        )  # fmt: skip
        num_parts = tl.cdiv(last_tile, part_tiles) - first_tile // part_tiles
        first_place = tl.load(item + 1)
        cut = tl.load(item + 2)
        part = tl.where(cut < 0, next_part, cut)
        is_end = part == num_parts - 1

        # Write the result if it is complete, else keep the part's sums until all are there.
        if num_parts == 1:
            _finish(out, start, node, head, acc, top, total, sinks, real, HEADS, DV, PAD_DV)
        else:
            sums, pitch, filled = _sums(
                item, cut, part, kv_head, count, first_place, GROUP, HEADS, BLOCK_M, FOLD
            )
            place = first_place + tl.arange(0, BLOCK_M)
            own_sums = sums + (filled - 1) * pitch
            _store_sums(parts, tops, totals, own_sums, place, acc, top, total, real, DV, PAD_DV)
            tl.debug_barrier()
            is_ready = is_end | (filled == FOLD)
            if cut >= 0:  # the program whose part arrives last adds all of them
                arrival = arrivals + (kv_head * num_rows + start) * GROUP + first_place
                arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
                is_ready = arrived == num_parts - 1
                is_end = part >= 0
                filled = num_parts
                if is_ready:
                    tl.store(arrival, 0)
            if is_ready:
                _add_parts(
                    out, parts, tops, totals, sinks, sums, pitch, filled, is_end, first_place, kv_head, start, count,
                    GROUP, HEADS, DV, PAD_DV, BLOCK_M, FOLD, FOLD_ROWS,
                )  # fmt: skip

        # Go on with the next part of this context, or draw the next work.
        next_part += 1
        if is_end:
            drawn = tl.atomic_add(counts + 1, 1, sem="relaxed")
            if drawn == num_works - 1:  # there are as many draws as works: this is the last one
                tl.store(counts + 1, 0)
            work = tl.num_programs(0) + drawn
            next_part = 0


@triton.jit
def _rows(item, kv_head, starts, row_counts, num_nodes, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return tree, first row of the tree, and node, head and reality of each of a tile's rows."""
    tree = tl.load(item)
    place = tl.load(item + 1) + tl.arange(0, BLOCK_M)
    start = tree * num_nodes
    if starts is not None:
        start = tl.load(starts + tree).to(tl.int32)
    node = place // GROUP
    head = kv_head * GROUP + place % GROUP
    real = node < _count(tree, row_counts, num_nodes)
    return tree, start, node, head, real


@triton.jit
def _count(tree, row_counts, num_nodes):
    count = num_nodes
    if row_counts is not None:
        count = tl.load(row_counts + tree).to(tl.int32)
    return count


@triton.jit
def _sums(
    item,
    cut,
    part,
    kv_head,
    count,
    first_place,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Return where the sums of place 0 begin, how far apart those of two parts are, and how many there are with these.

    A context that is read whole has FOLD parts at a time, in its program's own memory. After the
    first FOLD the first of them stands for all that were added.
    """
    if cut >= 0:
        begin = tl.load(item + 3).to(tl.int64) * HEADS + kv_head * count * GROUP
        pitch = count * HEADS
        filled = part + 1
    else:
        begin = (tl.program_id(0) * (FOLD * BLOCK_M) - first_place).to(tl.int64)
        pitch = FOLD * 0 + BLOCK_M
        filled_again = (part - FOLD) % (FOLD - 1) + 2
        filled = tl.where(part < FOLD, part + 1, filled_again)
    return begin, pitch.to(tl.int64), filled


@triton.jit
def _part(
    q,  # [BLOCK_M, PAD_DK]
    keys,
    values,
    blocks,  # the slot's row of the block table
    begin,
    end,
    length,
    low,
    real,
    first,
    window,
    words,
    num_words,
    depths,
    position_depths,
    num_positions,
    max_positions,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_DK: tl.constexpr,
    PAD_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return weighted values, largest score and sum of weights of rows over the positions [begin, end) of tiles."""
    acc = tl.zeros((BLOCK_M, PAD_DV), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    # Full tiles are [begin, end), and [tail, last) are those with tree positions.
    committed = length // BLOCK_N * BLOCK_N
    tail = tl.maximum(begin, committed)
    last = tl.minimum(tl.minimum(length + num_positions, max_positions), end)
    end = tl.minimum(end, committed)

    # Full tiles that some row sees only in part: up to `clear`, where every row's window has begun.
    if (first is not None) or (window is not None):
        clear = low
        if window is not None:
            deepest = tl.max(tl.load(depths, mask=real, other=0), 0).to(tl.int32)
            clear = tl.maximum(low, window_begin(length + deepest, window))
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

    # Full tiles that every row sees whole.
    for position in range(begin, end, BLOCK_N):
        positions = position + tl.arange(0, BLOCK_N)
        acc, top, total = _step(
            acc, top, total, q, keys, values, blocks, positions, None, None, scaling, softcap,
            KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, WIDE,
        )  # fmt: skip

    # Tiles with tree positions, which a row sees by its bits.
    for position in tl.range(tail, last, BLOCK_N, num_stages=2):
        positions = position + tl.arange(0, BLOCK_N)
        seen, used_by_any = _seen(
            position, length, low, real, words, num_words, depths, position_depths, num_positions, window, BLOCK_N
        )  # fmt: skip
        there = used_by_any & (positions < last)
        acc, top, total = _step(
            acc, top, total, q, keys, values, blocks, positions, seen, there, scaling, softcap,
            KV_HEADS, DK, DV, PAD_DK, PAD_DV, BLOCK_SIZE, WIDE,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _add_parts(
    out,
    parts,
    tops,
    totals,
    sinks,
    sums,
    pitch,
    num_parts,
    is_end,
    first_place,
    kv_head,
    start,
    count,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    PAD_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
):
    """Add parts in the order of their numbers, past the first-level cache: to the output, or to the first of them."""
    dims = tl.arange(0, PAD_DV)
    end_place = tl.minimum(first_place + BLOCK_M, count * GROUP)
    for begin in range(first_place, end_place, FOLD_ROWS):
        # FOLD_ROWS of the tile's rows at a time, so that FOLD parts of them fit the registers.
        place = begin + tl.arange(0, FOLD_ROWS)
        node = place // GROUP
        head = kv_head * GROUP + place % GROUP
        real = (node < count) & (place < first_place + BLOCK_M)

        acc = tl.zeros((FOLD_ROWS, PAD_DV), tl.float32)
        top = tl.full((FOLD_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((FOLD_ROWS,), tl.float32)
        for done in range(0, num_parts, FOLD):
            for i in tl.static_range(FOLD):
                at = sums + (done + i) * pitch
                there = real & (done + i < num_parts)
                numbers_at = parts + at * DV + place[:, None] * DV + dims[None, :]
                used = there[:, None] & (dims < DV)[None, :]
                more_acc = tl.load(numbers_at, mask=used, other=0.0, cache_modifier=".cg")
                more_top = tl.load(
                    tops + at + place, mask=there, other=float("-inf"), cache_modifier=".cg"
                )
                more_total = tl.load(
                    totals + at + place, mask=there, other=0.0, cache_modifier=".cg"
                )
                acc, top, total = _folded(acc, top, total, more_acc, more_top, more_total)

        if is_end:
            _finish(out, start, node, head, acc, top, total, sinks, real, HEADS, DV, PAD_DV)
        else:
            tl.debug_barrier()
            _store_sums(parts, tops, totals, sums, place, acc, top, total, real, DV, PAD_DV)
    tl.debug_barrier()


@triton.jit
def _folded(acc, top, total, more_acc, more_top, more_total):
    """Merge the softmax sums of two parts of the positions, as flash decoding does.

    acc [rows, DV] is the sum of exp2(score - top) * value, total [rows] that of exp2(score - top), and
    top [rows] the largest score so far. tl.fma fixes the rounding, so that every kernel that inlines
    this has the same bits.
    """
    new = tl.maximum(top, more_top)
    base = tl.where(new == float("-inf"), 0.0, new)
    share = tl.exp2(top - base)
    more = tl.exp2(more_top - base)
    total = tl.fma(more_total, more, total * share)
    acc = tl.fma(more_acc, more[:, None], acc * share[:, None])
    return acc, new, total


@triton.jit
def _store_sums(
    parts, tops, totals, sums, place, acc, top, total, real, DV: tl.constexpr, PAD_DV: tl.constexpr
):
    """Store the sums of a tile's rows over one part."""
    dims = tl.arange(0, PAD_DV)
    numbers_at = parts + sums * DV + place[:, None] * DV + dims[None, :]
    tl.store(numbers_at, acc, mask=real[:, None] & (dims < DV)[None, :])
    tl.store(tops + sums + place, top, mask=real)
    tl.store(totals + sums + place, total, mask=real)


@triton.jit
def _finish(
    out,
    start,
    node,
    head,
    acc,
    top,
    total,
    sinks,
    real,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    PAD_DV: tl.constexpr,
):
    """Write a tile of results. A sink counts as one more score with a value of zero."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        base = tl.maximum(top, sink)
        share = tl.exp2(top - base)
        total = tl.fma(total, share, tl.exp2(sink - base))
        acc = acc * share[:, None]

    # A row that saw nothing has zeros.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    result = tl.where(result == 0, 0.0, result)

    dims = tl.arange(0, PAD_DV)
    tree_out = out + tl.cast(start, tl.int64) * (HEADS * DV)
    numbers_at = tree_out + ((node * HEADS + head) * DV)[:, None] + dims[None, :]
    tl.store(numbers_at, result.to(out.dtype.element_ty), mask=real[:, None] & (dims < DV)[None, :])


@triton.jit
def _step(
    acc,
    top,
    total,
    query,
    keys,
    values,
    blocks,
    positions,
    seen,
    there,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_DK: tl.constexpr,
    PAD_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process one tile of keys and values.

    Args:
        seen: None if every row sees the whole tile.
        there: positions that some row sees. The others are zeros: 0 times what an unused position
            holds may be NaN.
    """
    # Find the tile's keys and values through the block table.
    if there is None:
        block = tl.load(blocks + positions // BLOCK_SIZE)
    else:
        block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0)
    slot_mapping = (block * BLOCK_SIZE + positions % BLOCK_SIZE) * KV_HEADS
    k = _gathered(keys + slot_mapping * DK, there, DK, PAD_DK, WIDE).to(query.dtype)
    v = _gathered(values + slot_mapping * DV, there, DV, PAD_DV, WIDE).to(query.dtype)

    products = tl.dot(query, tl.trans(k), input_precision="ieee")
    scores = _capped(products, scaling, softcap)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))

    # Add the tile to the sums, relative to the largest score so far.
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
    """Load rows of DIM numbers, zeros if masked.

    Args:
        WIDE: as fp32, since Triton's interpreter cannot multiply bf16.
    """
    dims = tl.arange(0, PAD_DIM)
    numbers = numbers_at[:, None] + dims[None, :]
    if there is not None:
        rows = tl.load(numbers, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == PAD_DIM:
        rows = tl.load(numbers)
    else:
        rows = tl.load(numbers, mask=(dims < DIM)[None, :], other=0.0)
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def _capped(scores, scaling, softcap):
    """Scale scores, squash them to (-softcap, softcap), and convert them to powers of two."""
    if softcap is None:
        capped = scores * (scaling * LOG2E)
    else:
        power = tl.exp2(scores * (2.0 * LOG2E * scaling / softcap))
        squashed = 1.0 - 2.0 / (power + 1.0)  # tanh
        capped = squashed * (softcap * LOG2E)
    return capped


@triton.jit
def _seen(
    position,
    length,
    low,
    real,
    words,
    num_words,
    depths,
    position_depths,
    num_positions,
    window,
    BLOCK_N: tl.constexpr,
):
    """Return which rows see which of a tile's positions, and which of these any row may see.

    A row sees committed positions from low on, tree positions by its bits, and of both what its
    window has; which positions any row may see disregards windows. Bit i of a row stands for the
    tile's position i, at most 64 of them.
    """
    begin = position - length  # in the tree, below 0 where the tile begins with committed positions

    # A tile's tree positions may lie in two words.
    word = begin >> 6
    shift = (begin & 63).to(tl.uint64)
    has_lower = real & (word >= 0) & (word < num_words)
    lower = tl.load(words + word, mask=has_lower, other=0).to(tl.uint64)
    has_upper = real & (word >= -1) & (word < num_words - 1)
    upper = tl.load(words + word + 1, mask=has_upper, other=0).to(tl.uint64)

    # Committed positions are the tile's first -begin ones, without those below low.
    one = tl.full((), 1, tl.uint64)
    up_to_tree = one << tl.maximum(-begin, 0).to(tl.uint64)
    up_to_low = one << tl.maximum(low - position, 0).to(tl.uint64)
    committed = up_to_tree - up_to_low
    bits = (lower >> shift) | ((upper << 1) << (63 - shift)) | tl.where(begin < 0, committed, 0)

    index = tl.arange(0, BLOCK_N)
    seen = ((bits[:, None] >> index[None, :].to(tl.uint64)) & 1) != 0
    used_by_any = ((tl.reduce(bits, 0, _or) >> index.to(tl.uint64)) & 1) != 0

    # A window counts positions by depth in the tree, where siblings are equally far away.
    if window is not None:
        in_tree = begin + index
        inside = (in_tree >= 0) & (in_tree < num_positions)
        position_depth = tl.load(position_depths + in_tree, mask=inside, other=0).to(tl.int32)
        positions = length + tl.where(in_tree < 0, in_tree, position_depth)
        seen &= _in_window(positions, length, real, depths, window)
    return seen, used_by_any


@triton.jit
def _in_window(positions, length, real, depths, window):
    """Return which rows have which positions in their window."""
    depth = tl.load(depths, mask=real, other=0).to(tl.int32)
    return positions[None, :] >= window_begin(length + depth, window)[:, None]


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _clear(out, seq, num_rows, WIDTH: tl.constexpr):
    """Write zeros for this program's share of the padding rows: every `programs`-th row."""
    programs = tl.num_programs(0)
    offset = tl.arange(0, 1024)
    for begin in range(tl.program_id(0), num_rows, 32 * programs):
        # Most passes have few padding rows or none, so look at 32 rows at once.
        rows = begin + tl.arange(0, 32) * programs
        trees = tl.load(seq + rows, mask=rows < num_rows, other=0)
        if tl.min(trees, 0) < 0:
            end = tl.minimum(begin + 32 * programs, num_rows)
            for row in range(begin, end, programs):
                if tl.load(seq + row) < 0:
                    for place in range(0, WIDTH, 1024):
                        numbers_at = out + tl.cast(row, tl.int64) * WIDTH + place + offset
                        nothing = tl.zeros((1024,), out.dtype.element_ty)
                        tl.store(numbers_at, nothing, mask=place + offset < WIDTH)
