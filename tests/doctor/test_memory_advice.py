"""A remedy is one: with it the footprint fits."""

from dataclasses import replace

import pytest

from eagle_ray.assembly.memory_plan import Capacity
from eagle_ray.doctor.memory_advice import MemorySettings, Room, most_slots, remedy
from eagle_ray.doctor.memory_estimate import Footprint

G = 1 << 30
EIGHT_B = Footprint(
    target=16 * G, draft=G, per_slot=G // 2, pool=8 * G, logits=G // 4, process=0, capacity=Capacity(16, None)
)
SETTINGS = MemorySettings(max_model_len=4096, itemsize=2, num_gpus=1)


def one_gpu(free: int) -> Room:
    return Room((free,), 1, on_gpu=True)


def test_fewer_slots_where_some_fit():
    room = one_gpu(20 * G)
    assert not room.holds(EIGHT_B)
    slots = most_slots(EIGHT_B, room)
    assert slots == 5 and room.holds(EIGHT_B.with_slots(5)) and not room.holds(EIGHT_B.with_slots(6))
    assert remedy(EIGHT_B, room, SETTINGS) == "set execution.slots to 5, or execution.kv_tokens to 22,500"


def test_a_shorter_context_where_no_slot_fits_whole():
    assert (
        remedy(EIGHT_B, one_gpu(int(17.25 * G)), SETTINGS) == "set execution.slots to 1 and model.max_model_len to 1920"
    )


def test_more_gpus_where_the_weights_do_not_fit():
    assert "execution.gpus_per_actor to 2" in remedy(EIGHT_B, one_gpu(12 * G), SETTINGS)
    two = Room((12 * G, 12 * G), 1, on_gpu=True)
    assert two.holds(EIGHT_B.with_slots(4)) and not two.holds(EIGHT_B)


def test_half_the_bytes_where_that_is_enough():
    wide = replace(EIGHT_B, target=32 * G, draft=2 * G)
    assert "bfloat16" in remedy(wide, one_gpu(20 * G), replace(SETTINGS, itemsize=4))


def test_fewer_workers_where_they_share_a_machine():
    room = Room((10 * G,), 4, on_gpu=False)
    assert remedy(EIGHT_B, room, SETTINGS).startswith("set execution.actors to 2:")
    assert "smaller model" in remedy(EIGHT_B, Room((10 * G,), 1, on_gpu=False), SETTINGS)


@pytest.mark.parametrize("free", [18, 22, 25])
def test_the_tokens_of_a_remedy_fit(free):
    room = one_gpu(free * G)
    tokens = int(remedy(EIGHT_B, room, SETTINGS).rpartition(" ")[2].replace(",", ""))
    assert room.holds(replace(EIGHT_B, pool=tokens * EIGHT_B.per_slot // SETTINGS.max_model_len))
