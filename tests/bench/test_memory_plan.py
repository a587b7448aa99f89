"""How much room keys and values get beside a shape's weights and passes."""

import pytest

from jobs.bench.gpu.device import GIB
from jobs.bench.gpu.memory_plan import OWN, KVRoom, column_bytes, own_columns, weight_bytes
from jobs.bench.widening import LLAMA_8B

BATCHES, CONTEXTS = [1, 4, 16, 64, 128, 256], [1024, 4096, 16384]


def test_an_8b_has_the_bytes_of_an_8b():
    assert weight_bytes(LLAMA_8B, 2) == pytest.approx(2 * (8.03e9 + 0.75e9), rel=0.01)  # Llama 3.1 8B and a head
    assert column_bytes(LLAMA_8B, 2) == 2 * 2 * 33 * 8 * 128


@pytest.mark.parametrize("gib, slots", [(60.0, 128), (122.0, 256), (6.0, 4)])
def test_what_is_chosen_fits_with_what_is_kept(gib, slots):
    """An H100's, an H200's and a small card's memory beside an 8B."""
    room = KVRoom.of(LLAMA_8B, 2, BATCHES, CONTEXTS, int(gib * GIB))
    assert room.slots == slots
    assert room.kept + room.columns * column_bytes(LLAMA_8B, 2) <= gib * GIB
    assert room.aside >= slots * CONTEXTS[0] and room.columns - room.aside == own_columns(slots) >= slots * OWN


def test_where_nobody_counts_there_is_what_is_asked_for():
    assert KVRoom.of(LLAMA_8B, 2, [1, 4], [64, 128], None) == KVRoom(4, own_columns(4) + 256)


def test_what_cannot_fit_says_what_it_lacks():
    with pytest.raises(MemoryError, match=r"2\.0 GiB are free, 1 sequences need 2\.1 GiB in addition to their keys"):
        KVRoom.of(LLAMA_8B, 2, BATCHES, CONTEXTS, 2 * GIB)
