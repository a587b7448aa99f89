"""A remedy is one: with it the worker fits."""

from dataclasses import replace

import pytest

from eagle_ray.assembly.engine_sizes import SequenceLengths
from eagle_ray.assembly.memory_plan import DeviceMemory, MemoryPlan
from eagle_ray.doctor.memory_check import remedy

G = 1 << 30
EIGHT_B = MemoryPlan(
    SequenceLengths(4096, 0),
    target=16 * G,
    draft=G,
    kv_per_token=G // 8192,
    per_slot=G // 64,
    slots=16,
)


def on_gpu(room: int, others_room: int = 0) -> MemoryPlan:
    """Return the plan on a card that has this much room."""
    return replace(EIGHT_B, memory=DeviceMemory(100 * G, room + 100 * G - 90 * G, others_room))


def on_cpu(room: int) -> MemoryPlan:
    return replace(EIGHT_B, memory=DeviceMemory(room, room, on_gpu=False))


def remedy_of(plan: MemoryPlan, num_sharing: int = 1, itemsize: int = 2) -> str:
    return remedy(plan, num_sharing, itemsize, num_gpus=1)


def test_fewer_slots_where_some_fit():
    plan = on_gpu(20 * G)
    assert not plan.fits and plan.with_slots(5).fits and not plan.with_slots(6).fits
    assert remedy_of(plan) == "set execution.slots to 5, or execution.kv_tokens to 22,400"


def test_a_shorter_context_where_no_slot_fits_whole():
    assert (
        remedy_of(on_gpu(int(17.25 * G)))
        == "set execution.slots to 1 and model.max_model_len to 1856"
    )


def test_more_gpus_where_the_weights_do_not_fit():
    assert "execution.gpus_per_actor to 2" in remedy_of(on_gpu(12 * G))
    two = on_gpu(12 * G, others_room=11 * G)
    assert two.with_slots(4).fits and not two.fits


def test_the_next_number_of_ranks_that_can_share_the_target():
    plan = on_gpu(6 * G)
    assert "execution.gpus_per_actor to 4: as many ranks" in remedy(
        plan, 1, 2, 2, [1, 2, 4, 8], num_ranks=1
    )
    assert "execution.gpus_per_actor to 8: as many ranks" in remedy(
        plan, 1, 2, 4, [1, 2, 4, 8], num_ranks=4
    )
    assert "quantised model" in remedy(plan, 1, 2, 2, [1, 2], num_ranks=2)
    assert "quantised model" in remedy(plan, 1, 2, 8, [1, 2, 4, 8, 16], num_ranks=8)


def test_half_the_bytes_where_that_is_enough():
    wide = replace(on_gpu(20 * G), target=32 * G, draft=2 * G)
    assert "bfloat16" in remedy_of(wide, itemsize=4)


def test_fewer_workers_where_they_share_a_machine():
    assert remedy_of(on_cpu(10 * G), num_sharing=4).startswith("set execution.actors to 2:")
    assert "smaller model" in remedy_of(on_cpu(10 * G))


@pytest.mark.parametrize("free", [18, 22, 25])
def test_the_tokens_of_a_remedy_fit(free):
    plan = on_gpu(free * G)
    tokens = int(remedy_of(plan).rpartition(" ")[2].replace(",", ""))
    assert plan.sized(plan.slots, tokens).fits and not plan.sized(plan.slots, tokens + 200).fits
