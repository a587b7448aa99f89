"""Every part of every context is read once, by whatever program, and added in the order of its number."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.kernels import tree_metadata, work_list
from eagle_ray.kernels.tree_metadata import Reading, TileShape, possible_readings, tile_shape
from eagle_ray.kernels.work_list import WorkList
from tests.support.attention_trees import AttentionCase, RandomTrees, kernel_trees
from tests.support.kernels import DEVICE
from tests.support.operations import device_operations

LONG = 225  # positions of a context in several parts
SHAPE = TileShape(16, 16, warps=8, stages=2, per_core=2, parts=6, fold=4)


@pytest.fixture
def short_parts(monkeypatch):
    """A quarter of a part is enough for contexts of a quarter."""
    monkeypatch.setattr(tree_metadata, "PART_POSITIONS", 64)


def listed(trees, reading: Reading) -> tuple[WorkList, list[list[int]]]:
    made = WorkList.of(trees, reading)
    return made, made.items[: made.counts[0]].tolist()


def expected(
    reading: Reading,
    num_nodes: int,
    length: int,
    first: int,
    num_positions: int,
    max_positions: int,
):
    """Return tiles of rows, tiles of keys and parts of one tree, in plain words."""
    rows, keys = reading.tile.rows, reading.tile.keys
    tiles = -(-num_nodes * reading.group // rows)
    window = reading.window
    low = first
    if window is not None:
        begin = length // -window * -window if window < 0 else length - window + 1
        low = max(first, begin)
    begin = max(low, 0) // keys
    end = max(-(-min(length + num_positions, max_positions) // keys), begin + 1)
    size = max(
        -(-(length // keys - begin) // max(reading.tile.parts // max(tiles, 1), 1)),
        reading.part_tiles,
    )
    parts = [
        number
        for number in range(end)
        if any(begin <= t < end for t in range(number * size, (number + 1) * size))
    ]
    return tiles, end - begin, len(parts)


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    window=st.none() | st.integers(1, 900) | st.integers(-900, -1),
    places=st.sampled_from([1, 4, 16, 400]),
)
def test_a_list_has_every_part_once(data, window, places):
    sizes = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=9)
    )
    counts, lengths = (list(each) for each in zip(*sizes, strict=True))
    counts = counts if any(counts) else [1] * len(counts)
    group, num_positions = data.draw(st.sampled_from([1, 3, 20])), data.draw(st.integers(1, 90))
    firsts = data.draw(st.none() | st.tuples(*(st.integers(0, length) for length in lengths)))
    seq = torch.tensor([b for b, n in enumerate(counts) for _ in range(n)] + [-1], device=DEVICE)
    reading = Reading(len(seq), 2 * group, 2, 16, window, SHAPE, places)
    trees = replace(
        kernel_trees(seq, len(counts)),
        lengths=torch.tensor(lengths, device=DEVICE),
        first=None if firsts is None else torch.tensor(firsts, device=DEVICE),
        position_depths=torch.zeros(len(counts), num_positions, dtype=torch.int64, device=DEVICE),
        max_positions=3100,
    )
    made, items = listed(trees, reading)
    wanted = [
        expected(reading, *each, num_positions, 3100)
        for each in zip(counts, lengths, firsts or [0] * len(counts), strict=True)
    ]
    share = sum(tiles * read for tiles, read, _ in wanted) * reading.kv_heads / places
    assert len(items) <= len(made.items) and made.counts[1] == 0
    found: dict[tuple[int, int], list[int]] = {}
    taken: list[tuple[int, int]] = [
        (0, -(-made.programs * SHAPE.fold * SHAPE.rows // reading.heads))
    ]
    for tree, place, part, sums in items:
        found.setdefault((tree, place), []).append(part)
        if part == 0 and place == 0:
            taken.append((sums, sums + counts[tree] * wanted[tree][2]))
    assert sorted(found) == [
        (b, t * 16) for b, (tiles, _, _) in enumerate(wanted) for t in range(tiles)
    ]
    for (tree, _), parts in found.items():
        _, read, num_parts = wanted[tree]
        if parts == [-1]:
            assert (
                num_parts == 1
                or read * work_list.SHARES <= share
                or made.room < taken[-1][1] + counts[tree] * 99
            )
        else:
            assert (
                parts == list(range(num_parts))
                and num_parts > 1
                and read * work_list.SHARES > share
            )
    for (_, end), (begin, _) in zip(sorted(taken), sorted(taken)[1:], strict=False):
        assert end <= begin
    assert max(end for _, end in taken) <= made.room
    kinds = [0 if part < 0 and wanted[tree][2] > 1 else 2 if part < 0 or part == wanted[tree][2] - 1 else 1
             for tree, _, part, _ in items]  # fmt: skip
    assert kinds == sorted(kinds)  # whole contexts, full parts, ends


def rows_of(case: AttentionCase, tree: int) -> torch.Tensor:
    out, seq = case.by_kernels()[0], case.kernels.rows.seq
    return out[:, seq == tree]


@pytest.mark.parametrize("softcap, window, sinks", [(None, None, False), (5.0, 175, True)])
def test_a_row_has_the_same_bits_in_any_batch(short_parts, softcap, window, sinks):
    """Among longer ones, shorter ones and more of them, cut or read whole."""
    alone = RandomTrees([LONG], [3], 2, 4, softcap=softcap, window=window, sinks=sinks).case()
    exact = rows_of(alone, 0)
    for lengths in ([LONG, 5], [LONG, 325, 0], [LONG] * 3 + [10]):
        others = RandomTrees(
            lengths,
            [3] * len(lengths),
            2,
            4,
            softcap=softcap,
            window=window,
            sinks=sinks,
            padding=2,
        )
        batch = others.case()
        _copy_first_tree(alone, batch)
        assert torch.equal(rows_of(batch, 0), exact), lengths


def _copy_first_tree(alone: AttentionCase, batch: AttentionCase) -> None:
    """Give the batch's first tree the other's rows, ancestors and cached positions."""
    for name in ("query", "key", "value"):
        getattr(batch, name)[:, :, :3] = getattr(alone, name)
    batch.kernels.words[0], batch.kernels.depths[0] = (
        alone.kernels.words[0],
        alone.kernels.depths[0],
    )
    if alone.attention.sinks is not None:
        batch.attention.sinks.copy_(alone.attention.sinks)
    positions = torch.arange(LONG, device=DEVICE)
    here, there = (
        p.kernels.cache.slot_mapping(torch.zeros_like(positions), positions) for p in (alone, batch)
    )
    for ours, theirs in zip(
        alone.kernels.cache.layer(0), batch.kernels.cache.layer(0), strict=True
    ):
        theirs[there] = ours[here]


@pytest.mark.parametrize("rectangle", [False, True])
def test_whole_or_cut_is_the_same(short_parts, rectangle, monkeypatch):
    """Without memory for the sums of parts each context is read by one program, a few parts at a time."""
    random_trees = RandomTrees(
        [375, 75, 175],
        [5, 5, 3],
        2,
        4,
        rectangle=rectangle,
        sinks=True,
        padding=0 if rectangle else 2,
    )
    cut = random_trees.case().by_kernels()
    monkeypatch.setattr(tree_metadata, "MAX_SUMS_BYTES", 0)
    case = random_trees.case()
    assert torch.equal(case.by_kernels(), cut)
    (made,) = case.kernels.trees.work_lists.values()
    assert set(made.items[: made.counts[0], 2].tolist()) == {-1}


def test_parts_are_added_in_their_order_whichever_ends_first(short_parts):
    case = RandomTrees([375, 75], [5, 2], 2, 4).case()
    exact = case.by_kernels()
    (made,) = case.kernels.trees.work_lists.values()
    count = int(made.counts[0])
    assert count > 6
    for seed in range(3):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        made.items[:count] = made.items[:count][order.to(DEVICE)].clone()
        assert torch.equal(case.by_kernels(), exact)


def test_a_list_serves_every_layer_and_every_replay(short_parts):
    """What programs count is zero again after each launch; a replay makes the list for the lengths that there are."""
    case = RandomTrees([LONG, 8], [4, 2], 2, 2, padding=1).case()
    trees = case.kernels.trees
    counts = device_operations(lambda: [case.by_kernels() for _ in range(3)])
    assert counts["attend"] == 3 and counts["list_work"] == 1
    (made,) = trees.work_lists.values()
    cut = [
        (tree, place) for tree, place, part, _ in made.items[: made.counts[0]].tolist() if part >= 0
    ]
    starts = case.kernels.rows.starts.tolist()
    places = [
        (kv_head * len(case.real) + starts[tree]) * 2 + place
        for tree, place in cut
        for kv_head in (0, 1)
    ]
    assert cut and made.counts[1] == 0 and not made.arrivals[places].any()
    for lengths in ([LONG, 8], [0, 175], [128, 127]):
        trees.lengths.copy_(torch.tensor(lengths))
        trees.work_lists.clear()
        assert torch.equal(case.by_kernels(), case.by_kernels())


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("rows", [4, 32, 64, 200])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 256), (64, 8, 64)])
def test_sums_of_parts_take_little_memory(rows, heads, capability, monkeypatch):
    """Of 256 sequences as of one, whatever the contexts."""
    monkeypatch.setattr(work_list, "launch", lambda *_: lambda *args, **constants: None)
    num_heads, kv_heads, dim = heads
    shape = tile_shape(rows, dim, dim, torch.bfloat16, capability)
    for batch in (1, 256):
        seq = torch.arange(batch, device=DEVICE)
        trees = replace(kernel_trees(seq, batch), max_positions=1 << 17)
        made = WorkList.of(
            trees, Reading(batch, num_heads, kv_heads, dim, None, shape, 132 * shape.per_core)
        )
        assert 4 * made.room * num_heads * (dim + 2) <= 200 << 20
        assert made.items.nbytes <= 1 << 20


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    capability=st.sampled_from([(8, 0), (9, 0)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_launch_allocates_no_more_than_a_plan_keeps(data, capability, dtype):
    """Of any rows, trees, heads and contexts within those of the plan."""
    kv_heads, group, dim = (
        data.draw(st.sampled_from(each)) for each in ([1, 2, 8], [1, 4, 7], [64, 128, 256])
    )
    max_rows, max_nodes, max_positions = (
        600,
        data.draw(st.integers(1, 300)),
        data.draw(st.sampled_from([64, 4000, 1 << 17])),
    )
    with patch.object(tree_metadata, "multiprocessors", lambda device: (capability, 132)):
        possible = possible_readings(max_rows, kv_heads * group, kv_heads, dim, dim, dtype, DEVICE)
    planned = max(each.max_sum_bytes(max_nodes, max_positions) for each in possible)
    num_rows = data.draw(st.integers(1, max_rows))
    batch = data.draw(st.integers(1, min(num_rows, 256)))
    seq = torch.arange(num_rows, device=DEVICE) % batch
    shape = tile_shape(-(-num_rows * group // batch), dim, dim, dtype, capability)
    reading = Reading(num_rows, kv_heads * group, kv_heads, dim, None, shape, 132 * shape.per_core)
    trees = kernel_trees(seq.sort().values, batch)
    nodes = torch.zeros(
        batch, data.draw(st.integers(1, max_nodes)), dtype=torch.int64, device=DEVICE
    )
    trees = replace(
        trees, position_depths=nodes, max_positions=data.draw(st.integers(1, max_positions))
    )
    with patch.object(work_list, "launch", lambda *_: lambda *args, **constants: None):
        made = WorkList.of(trees, reading)
    assert 0 < made.room * reading.row_bytes <= planned
