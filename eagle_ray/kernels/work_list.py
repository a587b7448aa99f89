"""WorkList: which program of tree attention reads which part of which context, decided on the device.

The parts of a context depend on its own length and its tree's rows alone, and they are added in the
order of their numbers. So a row's sum is the same in any batch; which program computes a part is
free:

    positions   0            256            512            768      length
                |--- part 0 ---|--- part 1 ---|--- part 2 ---|- part 3 with the tree -|
    cut         a program for each part; the last one to finish adds the parts up
    whole       one program for all of them, one after another: where there is work enough without cutting

A part has PART_POSITIONS, or more where a context would have more than `TileShape.parts` parts.
Parts begin at multiples of their size, whatever the first visible position is. A context is cut if
reading it whole would give one program more than 1/SHARES of an even share of the batch, and if
there is memory for its partial sums.

A unit of work is an item of the list and a key/value head. Programs take units in order: contexts
that are read whole, then full parts, at last the shorter parts at the ends. The host knows only
upper bounds, so a captured pass serves contexts of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor, int32

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.tree_metadata import KernelTrees, Reading

# This many whole contexts to an even share, one after another, balance without being cut.
SHARES = 4
TREES_PER_PROGRAM = 128  # trees that the list's programs look at together
# Fields of an item: tree, its first place, part or WHOLE, first row of its sums.
FIELDS_PER_ITEM = tl.constexpr(4)
WHOLE = tl.constexpr(-1)
# Compiled once, whatever their values and alignment.
WORK_LIST_VARYING = [
    "lengths",
    "first",
    "starts",
    "counts",
    "window",
    "num_trees",
    "num_nodes",
    "num_rows",
    "num_positions",
    "max_positions",
    "own",
    "room",
    "at_once",
]


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of work of an attention pass, on the device, and the counters of the programs that process them.

    Attributes:
        items: C items of 4 fields: tree; the first of the tile's rows (nodes x heads); part, or
            WHOLE for all parts; and the first row of the buffer for the sums of its parts, in rows
            of `heads` sums.
        counts: number of items, and number of units of work that programs have taken; the latter is
            0 between launches.
        arrivals: number of parts whose sums are written, by key/value head and first row of a tile;
            0 between launches. The program that writes the last part adds them up.
        room: rows of the buffer of partial sums. The first rows belong to the programs, for
            contexts that they read whole.
        programs: number of programs to launch.
    """

    items: Int32[Tensor, "C 4"]
    counts: Int32[Tensor, " 2"]
    arrivals: Int32[Tensor, " heads*R"]
    room: int
    programs: int

    @classmethod
    def of(cls, trees: KernelTrees, reading: Reading) -> WorkList:
        """Make the list in one launch and store it in `trees.work_lists`, since layers share it."""
        tile = reading.tile
        num_rows = reading.num_rows

        # Bound the items by what the host knows: rows and positions of the pass.
        num_parts = reading.max_parts(trees.num_positions, trees.max_positions)
        num_tiles = _max_tiles(trees, num_rows, reading.group, tile.rows)
        past_whole = num_tiles * (2 + reading.tail_parts(trees.num_positions))
        capacity = min(trees.num_trees * tile.parts + past_whole, num_tiles * num_parts)
        programs = min(reading.at_once, capacity * reading.kv_heads)
        own, room = reading.sum_rows(num_parts, programs)

        like = trees.lengths
        items = like.new_empty(capacity, FIELDS_PER_ITEM.value, dtype=int32)
        counts = like.new_empty(2, dtype=int32)
        arrivals = like.new_empty(reading.heads * num_rows, dtype=int32)

        starts = None if trees.rows is None else trees.rows.starts
        row_counts = None if trees.rows is None else trees.rows.counts
        launch(list_work, (trees.num_trees,))(
            items,
            counts,
            arrivals,
            trees.lengths,
            trees.first,
            starts,
            row_counts,
            reading.window,
            trees.num_trees,
            trees.num_nodes,
            num_rows,
            trees.num_positions,
            trees.max_positions,
            own,
            room,
            reading.at_once,
            GROUP=reading.group,
            KV_HEADS=reading.kv_heads,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            PART_TILES=reading.part_tiles,
            PARTS=tile.parts,
            SHARES=SHARES,
            TREES=TREES_PER_PROGRAM,
        )
        return cls(items, counts, arrivals, room, programs)


def work_list(trees: KernelTrees, reading: Reading) -> WorkList:
    """Return the list of a layer's programs. Layers of a pass with equal Readings share one list."""
    if reading not in trees.work_lists:
        trees.work_lists[reading] = WorkList.of(trees, reading)
    return trees.work_lists[reading]


def _max_tiles(trees: KernelTrees, num_rows: int, group: int, size: int) -> int:
    """Return a bound on the programs that take `size` rows x heads of one tree each, for one key/value head."""
    if trees.rows is None:
        return trees.num_trees * -(-trees.num_nodes * group // size)

    # Each tree has at most one tile that is not full, and each row at most the tiles of a tree of one row.
    full_and_last = trees.num_trees + num_rows * group // size
    tiles_of_one_row = -(-group // size)
    return min(full_and_last, tiles_of_one_row * num_rows)


@triton.jit(do_not_specialize=WORK_LIST_VARYING)
def list_work(
    items,  # this and the following two: as in WorkList
    totals,
    arrivals,
    lengths,  # [num_trees]: tokens that each slot holds
    first,  # this and the following two: [num_trees]; None as in KernelTrees
    starts,
    counts,
    window,
    num_trees,
    num_nodes,
    num_rows,
    num_positions,
    max_positions,
    own,  # rows of sums of contexts that are read whole
    room,
    at_once,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    TREES: tl.constexpr,
):
    """Triton kernel: write the items of one tree behind those of the trees before it, and set its arrivals to zero."""
    tree = tl.program_id(0)
    index = tl.arange(0, TREES)

    # The work of the whole batch, of which a program of the pass has an even share.
    all_tiles = tl.full((), 0, tl.int64)
    for begin in range(0, num_trees, TREES):
        trees = begin + index
        _, num_tiles, _, read = _sizes(
            trees, lengths, first, counts, window, num_trees, num_nodes, num_positions, max_positions,
            GROUP, BLOCK_M, BLOCK_N, PART_TILES, PARTS,
        )  # fmt: skip
        all_tiles += tl.sum((num_tiles * read).to(tl.int64))
    share = all_tiles * KV_HEADS

    sums_end = own

    # Items of the whole batch: whole contexts, full parts, and parts at the ends.
    all_whole = 0
    all_full = 0
    all_ends = 0

    # Items of the trees before this one, by the same three kinds.
    whole_at = 0
    full_at = 0
    ends_at = 0

    # What this tree has.
    tiles = 0
    parts = 0
    is_cut = 0
    sums_at = 0
    for begin in range(0, num_trees, TREES):
        trees = begin + index
        num_nodes_of, num_tiles, num_parts, read = _sizes(
            trees, lengths, first, counts, window, num_trees, num_nodes, num_positions, max_positions,
            GROUP, BLOCK_M, BLOCK_N, PART_TILES, PARTS,
        )  # fmt: skip

        # Cut long contexts as long as there is memory for the sums of their parts.
        is_long = (num_parts > 1) & (read.to(tl.int64) * (SHARES * at_once) > share)
        rows = tl.where(is_long, num_nodes_of * num_parts, 0)
        ends = sums_end + tl.cumsum(rows)
        cut = is_long & (ends <= room)

        # A context has items of its whole, or of full parts, or of neither; and those at the end.
        whole = tl.where((num_parts > 1) & ~cut, num_tiles, 0)
        full = tl.where(cut, num_tiles * (num_parts - 1), 0)
        last = num_tiles - whole

        before = trees < tree
        is_own = trees == tree
        whole_at += tl.sum(tl.where(before, whole, 0))
        full_at += tl.sum(tl.where(before, full, 0))
        ends_at += tl.sum(tl.where(before, last, 0))
        all_whole += tl.sum(whole)
        all_full += tl.sum(full)
        all_ends += tl.sum(last)
        tiles += tl.sum(tl.where(is_own, num_tiles, 0))
        parts += tl.sum(tl.where(is_own, num_parts, 0))
        is_cut += tl.sum((is_own & cut).to(tl.int32))
        sums_at += tl.sum(tl.where(is_own, ends - rows, 0))
        sums_end += tl.sum(rows)

    if tree == 0:
        tl.store(totals, all_whole + all_full + all_ends)
        tl.store(totals + 1, 0)

    # Whole contexts come first, then full parts, then the parts at the ends.
    full_at += all_whole
    ends_at += all_whole + all_full

    # This tree's items: num_first of them that are not at the end, and the others.
    num_whole = tl.where(parts > 1, tiles, 0)
    num_first = tl.where(is_cut > 0, tiles * (parts - 1), num_whole)
    first_at = tl.where(is_cut > 0, full_at, whole_at)
    num_items = tl.where(is_cut > 0, tiles * parts, tiles)
    for begin in range(0, num_items, TREES):
        item = begin + index
        at = tl.where(item < num_first, first_at + item, ends_at + item - num_first)
        fields = items + at * FIELDS_PER_ITEM
        there = item < num_items
        per_part = tl.maximum(tiles, 1)
        tl.store(fields, tree + index * 0, mask=there)
        tl.store(fields + 1, item % per_part * BLOCK_M, mask=there)
        tl.store(fields + 2, tl.where(is_cut > 0, item // per_part, WHOLE), mask=there)
        tl.store(fields + 3, sums_at + index * 0, mask=there)

    # No part of this tree's tiles has arrived yet.
    start = tree * num_nodes if starts is None else tl.load(starts + tree).to(tl.int32)
    for begin in range(0, tiles, TREES):
        tile = begin + index
        for kv_head in range(KV_HEADS):
            place = (kv_head * num_rows + start) * GROUP + tile * BLOCK_M
            tl.store(arrivals + place, index * 0, mask=tile < tiles)


@triton.jit
def _sizes(
    trees,
    lengths,
    first,
    counts,
    window,
    num_trees,
    num_nodes,
    num_positions,
    max_positions,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return nodes of trees, tiles of their rows, parts of their contexts, and tiles of keys that a program reads."""
    there = trees < num_trees
    count = tl.where(there, num_nodes, 0)
    if counts is not None:
        count = tl.load(counts + trees, mask=there, other=0).to(tl.int32)
    _, _, part_tiles, begin, end = span(
        trees, there, count, lengths, first, window, num_positions, max_positions,
        GROUP, BLOCK_M, BLOCK_N, PART_TILES, PARTS,
    )  # fmt: skip
    num_tiles = tl.cdiv(count * GROUP, BLOCK_M)
    num_parts = tl.cdiv(end, part_tiles) - begin // part_tiles
    return count, num_tiles, num_parts, end - begin


@triton.jit
def window_begin(position, window):
    """Return the first position that a query sees through a window, or in its chunk if the window is negative."""
    chunk = tl.maximum(-window, 1)
    return tl.where(window < 0, position // chunk * chunk, position - window + 1)


@triton.jit
def span(
    trees,
    there,
    count,
    lengths,
    first,
    window,
    num_positions,
    max_positions,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return a tree's committed positions, its first visible one, the tiles per part, and the tiles
    [begin, end) to read.

    The size of parts depends on the tree's own committed positions and rows: not on the batch, and
    not on the padded tree positions of a captured pass.
    """
    length = tl.load(lengths + trees, mask=there, other=0).to(tl.int32)
    low = length * 0
    if first is not None:
        low = tl.load(first + trees, mask=there, other=0).to(tl.int32)
    if window is not None:
        low = tl.maximum(low, window_begin(length, window))
    begin = tl.minimum(low, length) // BLOCK_N

    # All tiles of a tree's rows together have at most PARTS parts of a context.
    num_tiles = tl.cdiv(count * GROUP, BLOCK_M)
    max_parts = tl.maximum(PARTS // tl.maximum(num_tiles, 1), 1)
    part_tiles = tl.maximum(tl.cdiv(length // BLOCK_N - begin, max_parts), PART_TILES)
    end = tl.cdiv(tl.minimum(length + num_positions, max_positions), BLOCK_N)
    return length, low, part_tiles, begin, tl.maximum(end, begin + 1)
