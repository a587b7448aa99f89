"""Heads that eagle_ray writes are loaded as they were trained by vLLM 0.33.0 and SGLang 0.5.23, as far as rules say."""

from pathlib import Path

import pytest
import torch

import eagle_ray
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.head_files import save_head
from tests.support.checkpoints import (
    E3,
    LAYOUTS,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    target_config,
    write,
)
from tests.support.engine_loaders import SGLANG, VLLM, loader_faults

TARGET = target_config()
EMBEDDED = Path(eagle_ray.__file__).parent / "assets" / "tiny" / "draft"
COMMON = {"num_hidden_layers": 1, "max_position_embeddings": 256}
FOR_BOTH = RAW | COMMON | {"architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]}
FOR_BOTH_3 = E3 | COMMON | {"architectures": ["LlamaForCausalLMEagle3"]}
FULL_VOCABULARY = {"draft_vocab_size": E3["vocab_size"]}
EAGLE_31 = {"fc_norm": True, "norm_output": True}
CLEAN = {VLLM: [], SGLANG: []}


def zero_bias(tensors):
    return tensors | {"fc.bias": torch.zeros_like(tensors["fc.bias"])}


def saved(tmp_path, tensors, raw):
    """What save_head writes of a published head."""
    save_head(load_head(write(tmp_path / "in", tensors, raw), TARGET), raw, tmp_path / "out")
    return tmp_path / "out"


def test_the_embedded_head_is_for_vllm():
    """SGLang knows no head by its architecture's name, and its fc has a bias."""
    faults = loader_faults(EMBEDDED)
    assert faults[VLLM] == []
    assert [fault.split(":")[0] for fault in faults[SGLANG]] == ["architectures", "fc.bias"]


def test_a_saved_eagle_head_is_for_both(tmp_path):
    assert loader_faults(saved(tmp_path, zero_bias(eagle_tensors()), FOR_BOTH)) == CLEAN


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_checked(tmp_path, layout):
    assert loader_faults(write(tmp_path, zero_bias(eagle_tensors()), FOR_BOTH, layout)) == CLEAN


@pytest.mark.parametrize(
    "config",
    [
        {},
        FULL_VOCABULARY,
        EAGLE_31,
        {"norm_before_fc": True},
        {"eagle_config": {"norm_before_fc": True}},
    ],
    ids=[
        "part of the vocabulary",
        "all of it",
        "EAGLE-3.1",
        "norm_before_fc",
        "norm_before_fc in a section",
    ],
)
def test_a_saved_eagle3_head_is_for_both(tmp_path, config):
    raw = FOR_BOTH_3 | config
    tensors = eagle3_tensors(raw | config.get("eagle_config", {}))
    assert loader_faults(saved(tmp_path, tensors, raw)) == CLEAN


@pytest.mark.parametrize(
    ("config", "loaders", "key"),
    [
        ({"model_type": "eagle"}, {VLLM, SGLANG}, "model_type"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, {VLLM}, "architectures"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {SGLANG}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, {SGLANG}, "architectures"),
        ({"num_hidden_layers": 40}, {VLLM, SGLANG}, "num_hidden_layers"),
        ({"tie_word_embeddings": True}, {VLLM, SGLANG}, "tie_word_embeddings"),
        ({"bias": True}, {VLLM, SGLANG}, "bias"),
        ({"attention_bias": True}, {VLLM, SGLANG}, "attention_bias"),
    ],
)
def test_a_config_that_a_loader_misreads_is_named(tmp_path, config, loaders, key):
    assert_faults(write(tmp_path, zero_bias(eagle_tensors()), FOR_BOTH | config), loaders, key)


@pytest.mark.parametrize(
    ("config", "loaders", "key"),
    [
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, {SGLANG}, "architectures"),
        ({"norm_before_residual": True}, {SGLANG}, "norm_before_residual"),
        ({"target_hidden_size": None}, {VLLM, SGLANG}, "target_hidden_size"),
        ({"eagle_config": {"norm_output": True}}, {VLLM, SGLANG}, "eagle_config"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            {SGLANG},
            "eagle_aux_hidden_state_layer_ids",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
            {VLLM},
            "eagle_config.eagle_aux_hidden_state_layer_ids",
        ),
    ],
)
def test_an_eagle3_config_that_a_loader_misreads_is_named(tmp_path, config, loaders, key):
    assert_faults(write(tmp_path, eagle3_tensors(), FOR_BOTH_3 | config), loaders, key)


def test_a_key_that_the_config_lacks_is_named(tmp_path):
    without = {key: value for key, value in FOR_BOTH_3.items() if key != "rms_norm_eps"}
    assert_faults(write(tmp_path, eagle3_tensors(), without), {VLLM, SGLANG}, "config.json")


@pytest.mark.parametrize("generation", ["EAGLE", "EAGLE-3"])
def test_missing_unexpected_and_prefixed_tensors_are_named(tmp_path, generation):
    raw, tensors = (
        (FOR_BOTH, zero_bias(eagle_tensors()))
        if generation == "EAGLE"
        else (FOR_BOTH_3, eagle3_tensors())
    )
    without = {key: tensor for key, tensor in tensors.items() if key != "fc.weight"}
    assert_faults(write(tmp_path, without, raw), {VLLM, SGLANG}, "tensors")
    assert_faults(
        write(tmp_path, tensors | {"fc_norm.0.weight": torch.ones(32)}, raw), {VLLM}, "tensors"
    )
    faults = loader_faults(
        write(tmp_path, {f"model.{key}": tensor for key, tensor in tensors.items()}, raw)
    )
    assert all(
        any(fault.startswith("tensor names") for fault in faults[loader])
        for loader in (VLLM, SGLANG)
    )


def test_biases_that_a_loader_drops_or_invents_are_named(tmp_path):
    assert_faults(write(tmp_path, eagle_tensors(), FOR_BOTH), {VLLM}, "fc.bias")
    without = eagle_tensors(FOR_BOTH | {"bias": False})
    assert_faults(write(tmp_path, without, FOR_BOTH | {"bias": False}), {SGLANG}, "fc.bias")
    biased = FOR_BOTH | {"qkv_bias": True}
    assert_faults(
        write(tmp_path, zero_bias(eagle_tensors(biased)), biased), {SGLANG}, "self_attn.*_proj.bias"
    )


def test_vocabulary_maps_go_with_the_draft_vocabulary(tmp_path):
    whole = FOR_BOTH_3 | FULL_VOCABULARY
    assert_faults(write(tmp_path, eagle3_tensors(whole), whole), {VLLM}, "d2t")
    tensors = eagle3_tensors()
    del tensors["d2t"]
    for faults in loader_faults(write(tmp_path, tensors, FOR_BOTH_3)).values():
        assert faults[0] == "tensors: some are missing"
    unsized = {key: value for key, value in whole.items() if key != "draft_vocab_size"}
    tensors = {key: t for key, t in eagle3_tensors(whole).items() if key not in ("d2t", "t2d")}
    assert_faults(write(tmp_path, tensors, unsized), {SGLANG}, "draft_vocab_size")


def assert_faults(directory, loaders, key):
    """Each of the loaders has one fault, about this key, and the others have none."""
    faults = {
        loader: [fault.split(":")[0] for fault in found]
        for loader, found in loader_faults(directory).items()
    }
    assert faults == {loader: [key] if loader in loaders else [] for loader in CLEAN}
