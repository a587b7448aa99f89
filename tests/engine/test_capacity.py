"""Slots and KV tokens on made-up cards, and the settings that are kept."""

import pytest
import torch
from torch import nn

from eagle_ray import build
from eagle_ray.config import DeviceTooSmall, SpeculativeConfig
from eagle_ray.engine.capacity import (
    Capacity,
    DeviceMemory,
    SequenceLengths,
    plan_capacity,
    profile_pass,
)
from eagle_ray.errors import EngineError
from eagle_ray.kv.block_manager import BLOCK_SIZE
from tests.helpers.toy_models import llama

GB = 10**9
WEIGHTS = int(16.1 * GB)  # an 8B model in bf16, and an EAGLE-3 head
PER_TOKEN = 33 * 2 * 8 * 128 * 2  # 32 layers and the head's, keys and values of 8 heads of 128 numbers
PER_SLOT = 128 * 3 * 4096 * 2  # features in the draft's queue
LENGTHS = SequenceLengths(4096, 61)


def card(gigabytes: int, weights: int = WEIGHTS) -> DeviceMemory:
    total = gigabytes * GB
    return DeviceMemory(total, total - weights, of_pass=int(0.8 * GB), per_token=PER_TOKEN, per_slot=PER_SLOT)


@pytest.mark.parametrize("gigabytes, slots, least, most", [(24, 21, 20_000, 25_000), (80, 256, 380_000, 410_000)])
def test_an_8b_model_gets_what_its_card_holds(gigabytes, slots, least, most):
    capacity = plan_capacity("auto", "auto", LENGTHS, card(gigabytes))
    assert capacity.slots == slots and least <= capacity.kv_tokens <= most
    assert capacity.kv_tokens % BLOCK_SIZE == 0
    taken = WEIGHTS + capacity.kv_tokens * PER_TOKEN + capacity.slots * PER_SLOT
    assert 0.8 * gigabytes * GB < taken < 0.9 * gigabytes * GB or gigabytes == 24
    assert taken + 2 * 0.8 * GB < 0.9 * gigabytes * GB


def test_more_tokens_than_full_slots_hold_are_not_reserved():
    assert plan_capacity("auto", "auto", SequenceLengths(1024, 61), card(141)) == Capacity(256, 256 * 1088)
    assert plan_capacity(4, "auto", LENGTHS, card(141)) == Capacity(4, 4 * 4160)


def test_a_card_of_141_gb_holds_longer_sequences():
    capacity = plan_capacity("auto", "auto", LENGTHS, card(141))
    assert capacity.slots == 256 and 780_000 < capacity.kv_tokens < 830_000


def test_what_is_set_is_kept():
    assert plan_capacity(5, 9_600, LENGTHS, card(80)) == Capacity(5, 9_600)
    assert plan_capacity("auto", 40_000, LENGTHS, card(80)) == Capacity(36, 40_000)
    assert plan_capacity(7, None, LENGTHS, card(80)) == Capacity(7, None)
    full = plan_capacity("auto", None, LENGTHS, card(80))
    assert full.kv_tokens is None and full.slots * LENGTHS.full * PER_TOKEN < 0.9 * 80 * GB - WEIGHTS


def test_a_long_limit_changes_neither_slots_nor_the_memory_for_short_sequences():
    """A target made for 131,072 tokens, of which 4,096 are guaranteed."""
    long = SequenceLengths(131_072, 61, guaranteed=4096)
    assert plan_capacity("auto", "auto", long, card(80)) == plan_capacity("auto", "auto", LENGTHS, card(80))
    assert plan_capacity("auto", "auto", long, None) == Capacity(16, 16 * 4160)
    assert plan_capacity(1, "auto", long, None) == Capacity(1, 32_832)
    assert plan_capacity(2, "auto", SequenceLengths(8192, 61, guaranteed=4096), None) == Capacity(2, 2 * 4160)
    assert plan_capacity(1, "auto", SequenceLengths(8192, 61, guaranteed=4096), None) == Capacity(1, None)
    assert plan_capacity(2, "auto", SequenceLengths(131_072, 61), None) == Capacity(2, None)


def test_sequences_are_as_long_as_the_cache_holds_them_and_the_target_takes_them():
    long = SequenceLengths(131_072, 61, guaranteed=4096)
    assert [long.that_fit(tokens) for tokens in (None, 1_000, 10_016, 10_020, 200_000)] == [
        131_072,
        4096,
        10_016 - 61,
        10_016 - 61,
        131_072,
    ]
    assert SequenceLengths(131_072, 61).that_fit(10_016) == 131_072


def test_on_a_cpu_auto_is_what_it_was():
    assert plan_capacity("auto", "auto", LENGTHS, None) == Capacity(16, None)
    assert plan_capacity(3, 4_096, LENGTHS, None) == Capacity(3, 4_096)


def test_a_model_too_large_is_refused_with_what_would_help():
    with pytest.raises(EngineError, match=r"the GPU has 24 GB, of which weights take 22\.0 GB; .*gpus_per_actor"):
        plan_capacity("auto", "auto", LENGTHS, card(24, weights=22 * GB))


@pytest.mark.parametrize("num_gpus, least_free", [(2, 4), (4, 60)])
def test_a_70b_model_keeps_room_for_the_slots_that_fit(num_gpus, least_free, monkeypatch):
    """On cards of 80 GB: 256 slots of 1,024 tokens take 103 GB, more than a card has. Nothing is moved here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (84 * GB, 85 * GB))
    monkeypatch.setattr(build, "layer_sizes", lambda model: [int(1.71 * GB)] * 80)
    monkeypatch.setattr(build, "other_size", lambda model: int(4.2 * GB))
    placed = []
    monkeypatch.setattr(build, "dispatch", lambda model, devices, places: placed.append(places))
    build._dispatch(nn.Identity(), num_gpus, int(103 * GB), is_firm=False)
    on_first = placed[0].count(0) * 1.71 + 4.2
    assert least_free < 0.9 * 84 - on_first < 76
    with pytest.raises(DeviceTooSmall, match=r"execution\.gpus_per_actor: .* do not fit into 0, "):
        build._dispatch(nn.Identity(), 2, int(103 * GB), is_firm=True)


def test_it_says_what_it_is():
    assert str(Capacity(256, 412_000)) == "256 slots, 412,000 KV tokens"
    assert str(Capacity(1, None)) == "1 slot, room for full sequences"


def test_a_pass_is_run_and_measured(monkeypatch):
    """On a CPU, whose memory is not counted: the counters are made up, the pass is real."""
    passes, model = [], llama()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + 5 * sum(passes))
    handle = model.lm_head.register_forward_hook(lambda module, args, out: passes.append(len(out)))
    assert profile_pass(model, None, 80) >= 5 * 80
    handle.remove()


def test_trees_of_a_fixed_size_take_rows_of_logits_for_every_slot():
    model, nodes = llama(), 60
    uniform = SpeculativeConfig(max_nodes=nodes, budget="uniform")
    assert build._bytes_of_logits(model, uniform) == 3 * (1 + nodes) * 97 * 4
    assert build._bytes_of_logits(model, SpeculativeConfig(method="sequoia", max_nodes=nodes)) > 0
    for cheap in (SpeculativeConfig(), SpeculativeConfig(method="none", budget="uniform")):
        assert build._bytes_of_logits(model, cheap) == 0
