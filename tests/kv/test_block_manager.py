"""BlockManager: who holds what, what is shared, and what goes first when the pool runs out."""

import random

import pytest

from eagle_ray.kv import block_manager
from eagle_ray.kv.block_manager import BlockManager

SIZE = 4


def blocks(num_slots: int = 3, capacity: int = 32, num_blocks: int | None = None) -> BlockManager:
    return BlockManager(num_slots, capacity, num_blocks, size=SIZE)


def cells(pool: BlockManager, slot: int, columns: int) -> list[tuple[int, int]]:
    return [
        (int(pool.block_table[slot, column // SIZE]), column % SIZE) for column in range(columns)
    ]


def test_reserved_columns_have_places_of_their_own():
    pool = blocks()
    for slot, columns in ((0, 9), (1, 4), (2, 1), (0, 13)):
        assert pool.reserve(slot, columns)
        pool.check_integrity()
    places = cells(pool, 0, 13) + cells(pool, 1, 4) + cells(pool, 2, 1)
    assert len(set(places)) == len(places)
    assert all(block < pool.num_blocks for block, _ in places)


def test_unreserved_positions_are_in_the_block_that_no_slot_owns():
    pool = blocks()
    pool.reserve(0, 5)
    assert {block for block, _ in cells(pool, 0, pool.null_position + 1)[8:]} == {pool.num_blocks}
    pool.reserve(1, pool.capacity)
    assert int(pool.block_table[1, pool.null_position // SIZE]) == pool.num_blocks


def test_a_short_pool_refuses_and_changes_nothing():
    pool = blocks(num_blocks=3)
    assert pool.reserve(0, 8)
    assert not pool.reserve(1, 8)
    pool.check_integrity()
    assert pool.num_available == 1 and pool.blocks_needed(1, 8) == 2
    pool.trim(0, 4)
    assert pool.reserve(1, 8)
    pool.check_integrity()


def test_equal_beginnings_share_their_full_blocks():
    pool = blocks()
    prompt = list(range(10))
    pool.reserve(0, 10)
    pool.cache_full_blocks(0, prompt)
    assert pool.attach_prefix(1, [*prompt[:8], 77, 78]) == 8
    assert cells(pool, 1, 8) == cells(pool, 0, 8)
    assert (
        pool.attach_prefix(2, [*prompt[:6], 99, 7, 8]) == 4
    )  # the second block differs in one token
    pool.reserve(1, 10)
    assert cells(pool, 1, 10)[8:] != cells(pool, 0, 10)[8:]
    pool.check_integrity()


def test_the_last_token_is_never_reused():
    pool = blocks()
    pool.reserve(0, 8)
    pool.cache_full_blocks(0, list(range(8)))
    assert pool.attach_prefix(1, list(range(8))) == 4
    assert pool.attach_prefix(2, list(range(9))) == 8


def test_only_full_blocks_are_published():
    pool = blocks()
    pool.reserve(0, 8)
    pool.cache_full_blocks(0, list(range(7)))
    assert pool.attach_prefix(1, list(range(9))) == 4


def test_blocks_outlive_their_sequence_until_space_is_needed():
    pool = blocks(num_blocks=4)
    first, second = list(range(8)), list(range(50, 54))
    for slot, prompt in ((0, first), (1, second)):
        pool.reserve(slot, len(prompt))
        pool.cache_full_blocks(slot, prompt)
        pool.free(slot)
    assert pool.num_available == 4
    assert (
        pool.attach_prefix(0, [*first, 1]) == 8
    )  # used now, so the other prompt is the least recently used
    pool.free(0)
    assert pool.reserve(2, 8)  # one block was free, one is taken from the other prompt
    assert pool.attach_prefix(1, [*second, 1]) == 0
    assert pool.attach_prefix(0, [*first, 1]) == 8
    pool.check_integrity()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pool = blocks(num_blocks=4)
    prompt = list(range(12))
    pool.reserve(0, 12)
    pool.cache_full_blocks(0, prompt)
    pool.free(0)
    pool.reserve(1, 12)
    assert pool.attach_prefix(0, [*prompt, 1]) == 4
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_use_keeps_the_books(seed):
    """Random reserve, trim, free, adopt and publish on a small pool; contents are tracked token by token."""
    rng = random.Random(seed)
    pool = blocks(num_slots=4, capacity=24, num_blocks=rng.choice([6, 9, 24]))
    written: dict[tuple[int, int], int] = {}  # what a cache would hold: the token of each cell
    prompts: list[list[int] | None] = [None] * 4
    for _ in range(300):
        slot = rng.randrange(4)
        if prompts[slot] is None:
            prompt = [0] * rng.randint(0, 9) + [rng.randrange(2) for _ in range(rng.randint(1, 8))]
            reused = pool.attach_prefix(slot, prompt)
            assert [written[cell] for cell in cells(pool, slot, reused)] == prompt[:reused]
            if pool.reserve(slot, len(prompt)):
                written.update(
                    zip(cells(pool, slot, len(prompt))[reused:], prompt[reused:], strict=True)
                )
                pool.cache_full_blocks(slot, prompt)
                prompts[slot] = prompt
            else:
                pool.free(slot)
        elif rng.random() < 0.4:
            pool.free(slot)
            prompts[slot] = None
        elif pool.reserve(slot, rng.randint(len(prompts[slot]), 24)) and rng.random() < 0.5:
            pool.trim(slot, len(prompts[slot]))
        for held, prompt in enumerate(prompts):
            if prompt is not None:
                assert [written[cell] for cell in cells(pool, held, len(prompt))] == prompt
        pool.check_integrity()


def test_what_is_forgotten_is_adopted_no_more_but_what_is_held():
    pool = blocks()
    for slot, prompt in ((0, list(range(9))), (1, list(range(50, 59)))):
        pool.reserve(slot, 9)
        pool.cache_full_blocks(slot, prompt)
    pool.free(0)
    pool.reset_prefix_cache()
    pool.check_integrity()
    assert pool.attach_prefix(2, list(range(9))) == 0
    assert pool.attach_prefix(0, list(range(50, 59))) == 8


def test_only_changed_entries_are_copied_to_the_device(monkeypatch):
    """Whatever the table's size: blocks that were added, and once those of a sequence that left."""
    copied, copy = [], block_manager.copy_to_device
    monkeypatch.setattr(
        block_manager,
        "copy_to_device",
        lambda x, device: copied.append(x.shape[1]) or copy(x, device),
    )
    pool = BlockManager(256, 131_072, num_blocks=5_000)
    for slot in range(256):
        pool.reserve(slot, 300)
    pool.check_integrity()
    assert copied == [256 * 10]
    for slot in range(0, 256, 32):
        pool.reserve(slot, 330)
    pool.free(5)
    pool.check_integrity()
    pool.sync_table()
    assert copied == [256 * 10, 8 + 10]
