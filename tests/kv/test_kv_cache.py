"""KVCache: what is written to a slot's columns is read there, wherever its blocks lie, and memory follows use."""

import random

import pytest
import torch

from eagle_ray.attention import attention_groups
from eagle_ray.attention.attention_groups import group_sequences
from eagle_ray.attention.metadata import AttentionParams, TreeMetadata
from eagle_ray.attention.prefill_metadata import PrefillMetadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.draft_tree import VerifyResult
from tests.support.families import CHUNKS, prefill, target_of
from tests.support.toy_models import llama

HEADS, DIM = 2, 4


def scattered_cache(num_slots: int, capacity: int, seed: int = 0) -> KVCache:
    """A cache whose slots hold blocks in random order, all columns reserved."""
    blocks = BlockManager(num_slots, capacity, 2 * num_slots * -(-capacity // 8), size=8)
    rng = random.Random(seed)
    columns = [0] * num_slots
    while min(columns) < capacity:
        slot = rng.randrange(num_slots)
        columns[slot] = min(columns[slot] + 8, capacity)
        blocks.reserve(slot, columns[slot])
    return KVCache(blocks, 2, HEADS, DIM, torch.float32, "cpu")


def fill_cache(cache: KVCache, slots: list[int], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values [B, heads, T, d] in the first columns of each slot, in both layers."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        torch.randn(len(slots), HEADS, columns, DIM, generator=generator) for _ in range(2)
    )
    cells = cache.slot_mapping(torch.tensor(slots)[:, None], torch.arange(columns)).flatten()
    for layer in range(2):
        flat = (x.transpose(0, 1).flatten(1, 2) + layer for x in (keys, values))
        cache.write(layer, cells, *flat)
    return keys, values


@pytest.mark.parametrize("slots", [[2, 0, 3], [1]])
@pytest.mark.parametrize("columns", [1, 8, 13, 40])
def test_what_is_written_is_read(slots, columns):
    cache = scattered_cache(4, 40)
    keys, values = fill_cache(cache, slots, columns)
    where = cache.block_index(DecodeSlots.of(slots, [columns] * len(slots)), 0)
    for layer in range(2):
        read = cache.read(layer, where, columns)
        assert torch.equal(read[0], keys + layer) and torch.equal(read[1], values + layer)


@pytest.mark.parametrize("slots", [[2, 0, 3], [1]])
def test_a_cache_in_fp8_rounds_to_the_nearest_number_it_has(slots):
    """Beyond 448 to its largest; half as many bytes as in bf16."""
    blocks = scattered_cache(4, 40).blocks
    cache = KVCache(blocks, 2, HEADS, DIM, torch.bfloat16, "cpu", stored=torch.float8_e4m3fn)
    assert (
        cache.keys.nbytes * 2 == KVCache(blocks, 2, HEADS, DIM, torch.bfloat16, "cpu").keys.nbytes
    )
    keys, values = (100 * torch.randn(HEADS, 13 * len(slots), DIM).bfloat16() for _ in range(2))
    keys[0, 0] = torch.tensor([449.0, -1e9, 448.0, 2**-10])
    cells = cache.slot_mapping(torch.tensor(slots)[:, None], torch.arange(13)).flatten()
    cache.write(1, cells, keys, values)
    where = cache.block_index(DecodeSlots.of(slots, [13] * len(slots)), 0)
    for written, read, found in zip(
        (keys, values), cache.read(1, where, 13), cache.gather(1, cells), strict=True
    ):
        assert read.dtype == found.dtype == torch.bfloat16
        assert torch.equal(read.transpose(0, 1).flatten(1, 2), found.transpose(0, 1))
        expected = written.float().clamp(-448, 448)
        torch.testing.assert_close(found.transpose(0, 1).float(), expected, atol=2**-10, rtol=2**-4)
    assert found.untyped_storage().data_ptr() != cache.values.untyped_storage().data_ptr()
    assert cache.gather(1, cells[:1])[0][0, 0].tolist() == [448, -448, 448, 0]


@torch.inference_mode()
def test_a_prompt_sees_its_own_keys_as_they_are_stored():
    """Hence chunks of a prompt make no difference; with the numbers as they were written they would."""
    whole, in_chunks, exact = (
        target_of(llama(), kv_dtype=dtype) for dtype in (torch.float8_e4m3fn,) * 2 + (None,)
    )
    logits = prefill(whole, None)
    torch.testing.assert_close(prefill(in_chunks, CHUNKS), logits, atol=1e-4, rtol=1e-4)
    assert (prefill(exact, None) - logits).abs().max() > 1e-2


def test_one_sequence_in_neighbouring_blocks_is_read_in_place():
    cache = KVCache(BlockManager(2, 32, size=8), 1, HEADS, DIM, torch.float32, "cpu")
    cache.blocks.reserve(0, 20)
    keys, _ = cache.read(0, cache.block_index(DecodeSlots.of([0], [18]), 2), 20)
    assert keys.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()


def test_short_sequence_reads_the_spare_block_past_its_own():
    cache = scattered_cache(3, 40)
    keys, values = fill_cache(cache, [2, 0], 40)
    batch = DecodeSlots.of([2, 0], [30, 11])
    where = cache.block_index(batch, 5)
    assert cache.num_positions(batch, 5) == 35
    assert where.tolist()[0] == [cache.blocks.block(2, i) for i in range(5)]
    assert (
        where.tolist()[1]
        == [cache.blocks.block(0, i) for i in range(2)] + [cache.blocks.num_blocks] * 3
    )
    read = cache.read(0, where, 35)
    assert all(torch.equal(x[0], y[0, :, :35]) for x, y in zip(read, (keys, values), strict=True))
    assert all(
        torch.equal(x[1, :, :16], y[1, :, :16]) for x, y in zip(read, (keys, values), strict=True)
    )


@pytest.mark.parametrize("commit", [KVCache.commit, KVCache.commit_portably])
def test_commit_moves_the_path_and_nothing_else(commit):
    cache = scattered_cache(3, 40)
    keys, _ = fill_cache(cache, [2, 0], 20)
    paths = torch.tensor([[0, 3, 7, -1], [0, 2, -1, -1]])
    batch = DecodeSlots.of([2, 0], [10, 6])
    commit(cache, batch, VerifyResult(paths, torch.tensor([2, 1]), paths))
    read, _ = cache.read(1, cache.block_index(batch, 10), 20)
    for b, (length, path) in enumerate([(10, [0, 3, 7]), (6, [0, 2])]):
        end = length + len(path)
        wanted = keys[b, :, [*range(length), *(length + node for node in path)]] + 1
        assert torch.equal(read[b, :, :end], wanted)


def test_rows_past_what_is_reserved_harm_nobody():
    cache = KVCache(BlockManager(2, 32, size=8), 1, HEADS, DIM, torch.float32, "cpu")
    cache.blocks.reserve(0, 8)
    cache.blocks.reserve(1, 32)
    keys, _ = fill_cache(KVCache(cache.blocks, 2, HEADS, DIM, torch.float32, "cpu"), [1], 32)
    cells = cache.slot_mapping(torch.tensor([1]), torch.arange(32))
    cache.write(0, cells, keys[0], keys[0])
    cache.write(
        0,
        cache.slot_mapping(torch.tensor([0]), torch.arange(8, 33)),
        *[torch.ones(HEADS, 25, DIM)] * 2,
    )
    assert torch.equal(cache.read(0, cache.block_index(DecodeSlots.of([1], [32]), 0), 32)[0], keys)


def test_memory_is_taken_as_it_is_used():
    """A pool of half a gigabyte takes a few megabytes until its blocks are written."""
    before = resident_bytes()
    cache = KVCache(BlockManager(64, 4096), 2, 8, 64, torch.float32, "cpu")
    assert cache.keys.nbytes + cache.values.nbytes > 500e6
    assert resident_bytes() - before < 50e6
    cache.blocks.reserve(0, 4096)
    rows = torch.ones(8, 4096, 64)
    cache.write(0, cache.slot_mapping(torch.tensor([0]), torch.arange(4096)), rows, rows)
    assert 15e6 < resident_bytes() - before < 70e6


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("ragged, num_groups", [(False, [6, 3, 1]), (True, [6, 4, 1])])
def test_groups_attend_as_one_batch_does(ragged, num_groups, window, monkeypatch):
    """Trees of 1 to 5 nodes on sequences of 3 to 300 tokens: the same outputs whether read together or apart."""
    lengths, sizes, num_nodes = [300, 3, 40, 41, 280, 7], [2, 5, 1, 4, 5, 3], 5
    cache = scattered_cache(6, 320)
    fill_cache(cache, list(range(6)), 320)
    batch = DecodeSlots.of(list(range(6)), lengths)
    columns = batch.lengths[:, None] + torch.arange(num_nodes)
    ancestors = torch.ones(6, num_nodes, num_nodes, dtype=torch.bool).tril()
    depths = torch.arange(num_nodes).expand(6, num_nodes)
    cells, rows = cache.slot_mapping(batch.slots[:, None], columns).flatten(), {}
    if ragged:
        unpack = torch.tensor(
            [b * num_nodes + i for b, size in enumerate(sizes) for i in range(size)]
        )
        row_of = torch.zeros(6 * num_nodes, dtype=torch.long)
        row_of[unpack] = torch.arange(len(unpack))
        cells, rows = (
            cells[unpack],
            {"row_of": row_of.view(6, -1), "unpack": unpack, "sizes": sizes},
        )
    query, key = torch.randn(1, 4, len(cells), DIM), torch.randn(1, HEADS, len(cells), DIM)
    outputs = []
    for least in (1, 60, 1e9):
        monkeypatch.setattr(attention_groups, "CALL_COST", least)
        monkeypatch.setattr(attention_groups, "GROUP_COST", 0)
        layout = TreeMetadata(
            cache,
            batch,
            cells,
            ancestors,
            depths,
            depths,
            first=torch.tensor([1, 1, 30, 1, 1, 2]),
            **rows,
        )
        counts = len(group_sequences(lengths, sizes if ragged else [num_nodes] * 6, 2))
        outputs.append((counts, layout.attend(query, key, key, AttentionParams(0, 0.5, window))))
    assert [count for count, _ in outputs] == num_groups
    for _, output in outputs[:2]:
        torch.testing.assert_close(output, outputs[2][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "window, softcap, sinks", [(None, None, False), (6, None, False), (6, 5.0, True)]
)
@pytest.mark.parametrize("first", [0, 1])
def test_a_prompt_in_chunks_attends_as_the_whole(window, softcap, sinks, first):
    attention = AttentionParams(0, 0.5, window, softcap, torch.randn(4) if sinks else None)
    query, key, value = (
        torch.randn(1, 4, 30, DIM),
        torch.randn(1, HEADS, 30, DIM),
        torch.randn(1, HEADS, 30, DIM),
    )
    whole = PrefillMetadata(scattered_cache(2, 40), [0], [first], [first], [30]).attend(
        query, key, value, attention
    )
    cache, parts = scattered_cache(2, 40, seed=1), []
    for start, end in ((0, 11), (11, 12), (12, 30)):
        layout = PrefillMetadata(cache, [0], [first], [first + start], [end - start])
        parts.append(layout.attend(*(x[:, :, start:end] for x in (query, key, value)), attention))
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-5, rtol=0)
