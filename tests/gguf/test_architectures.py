"""Files of every architecture against the models of transformers that they were written of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from eagle_ray.families import FAMILIES
from eagle_ray.gguf.architectures import ARCHITECTURES, OF_MODEL_TYPE
from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import target_config, write_metadata
from eagle_ray.models.loader import load_causal_lm
from tests.support.families import (
    MOE,
    MULTIPLIED,
    WINDOW,
    YARN_ROPE,
    config_of,
    random_model,
)
from tests.support.gguf_families import VOCAB_SIZE, add_key, write_family

IDS = list(range(3, 40))  # more than WINDOW
SIZES = dict(vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2, pad_token_id=2)
MIXED = ["sliding_attention", "full_attention"]
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "long_factor": [1.5, 3.0],
    "short_factor": [1.0, 1.25],
    "original_max_position_embeddings": 64,
}
OLMO3_ROPE = {
    "full_attention": dict(YARN_ROPE),
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MINISTRAL_ROPE = dict(
    YARN_ROPE,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5,
)
FILES = {  # general.architecture and a config of transformers
    "llama": ("llama", config_of("llama", **SIZES)),
    "llama with yarn": ("llama", config_of("llama", **SIZES, rope_parameters=YARN_ROPE)),
    "mistral3": ("mistral3", config_of("mistral", **SIZES, head_dim=16, sliding_window=None)),
    "ministral3": (
        "mistral3",
        config_of("ministral3", **SIZES, head_dim=16, rope_parameters=MINISTRAL_ROPE),
    ),
    "smollm3": ("smollm3", config_of("smollm3", **SIZES, num_hidden_layers=4)),
    "granite": ("granite", config_of("granite", **SIZES, **MULTIPLIED)),
    "qwen2": ("qwen2", config_of("qwen2", **SIZES)),
    "qwen3": ("qwen3", config_of("qwen3", **SIZES, head_dim=16)),
    "qwen3moe": (
        "qwen3moe",
        config_of("qwen3_moe", **SIZES, **MOE, head_dim=16, norm_topk_prob=True),
    ),
    "gemma": ("gemma", config_of("gemma", **SIZES, head_dim=16)),
    "gemma2": (
        "gemma2",
        config_of("gemma2", **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW),
    ),
    "gemma3": (
        "gemma3",
        config_of(
            "gemma3_text",
            **SIZES,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            rope_parameters=TWO_BASES,
            num_hidden_layers=7,
        ),
    ),
    "phi3": (
        "phi3",
        config_of(
            "phi3",
            **SIZES,
            sliding_window=WINDOW,
            rope_parameters=dict(LONG, rope_type="default", long_factor=None, short_factor=None),
        ),
    ),
    "phi3 of long contexts": (
        "phi3",
        config_of("phi3", **SIZES, rope_parameters=LONG, original_max_position_embeddings=64),
    ),
    "olmo2": ("olmo2", config_of("olmo2", **SIZES)),
    "olmo3": (
        "olmo2",
        config_of(
            "olmo3", **SIZES, sliding_window=WINDOW, layer_types=MIXED, rope_parameters=OLMO3_ROPE
        ),
    ),
    "glm4": ("glm4", config_of("glm4", **SIZES, head_dim=16)),
    "glm4 without biases": ("glm4", config_of("glm4", **SIZES, head_dim=16, attention_bias=False)),
    "gpt_oss": (
        "gpt-oss",
        config_of(
            "gpt_oss",
            **SIZES,
            **MOE,
            head_dim=16,
            sliding_window=WINDOW,
            rope_parameters=dict(YARN_ROPE, truncate=False),
        ),
    ),
}


def written(name: str, directory: Path) -> PreTrainedModel:
    """Return a random model of FILES and write it as a directory that is a target."""
    architecture, config = FILES[name]
    model = random_model(config)
    write_family(directory / "model.gguf", architecture, model)
    write_metadata(GGUFFile.open(directory / "model.gguf"), directory)
    return model


def test_every_architecture_has_a_file_and_a_family_that_runs():
    assert {architecture for architecture, _ in FILES.values()} == ARCHITECTURES.keys()
    assert OF_MODEL_TYPE.keys() <= FAMILIES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_model_that_it_was_written_of(name, tmp_path):
    model = written(name, tmp_path)
    found = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    assert found.config.model_type == model.config.model_type
    assert type(found) is type(model)
    ids = torch.tensor([IDS])
    expected = model(ids).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(found(ids).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "phi3 of long contexts"])
def test_a_file_beside_its_models_own_config_is_the_model(name, tmp_path):
    model = written(name, tmp_path)
    model.config.save_pretrained(tmp_path)
    found = load_causal_lm(tmp_path, torch.float32, "cpu", dequantize=True)
    ids = torch.tensor([IDS])
    torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)


def test_experts_of_mxfp4_are_read(tmp_path):
    """gpt-oss has its experts in blocks of 32 inputs, which become plain weights."""
    sizes = SIZES | dict(hidden_size=32, intermediate_size=64)
    config = config_of("gpt_oss", **(sizes | MOE), head_dim=16, sliding_window=WINDOW)
    model = random_model(config)
    write_family(tmp_path / "plain.gguf", "gpt-oss", model)
    plain = GGUFFile.open(tmp_path / "plain.gguf")
    rng = np.random.default_rng(0)
    writer = GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    for key, value in plain.metadata.items():
        if key != "general.architecture":
            add_key(writer, key, value)
    for name in plain.tensors:
        values = plain.tensor(name)
        if "_exps.weight" not in name:
            writer.add_tensor(name, values)
            continue
        blocks = rng.integers(0, 256, (*values.shape[:2], values.shape[2] // 32, 17), np.uint8)
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:3])
        data = blocks.reshape(*values.shape[:2], -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "model.gguf")
    write_metadata(file, tmp_path)
    (tmp_path / "plain.gguf").unlink()
    found = load_causal_lm(tmp_path, torch.float32, "cpu")
    experts = found.model.layers[1].mlp.experts
    gate, up, down = (
        file.tensor(f"blk.1.ffn_{kind}_exps.weight") for kind in ("gate", "up", "down")
    )
    np.testing.assert_array_equal(experts.gate_up_proj[2, :, 6].numpy(), gate[2, 3])
    np.testing.assert_array_equal(experts.gate_up_proj[2, :, 7].numpy(), up[2, 3])
    np.testing.assert_array_equal(experts.down_proj[3, :, 5].numpy(), down[3, 5])


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("granite", "granite.rope.scaling.finetuned", False, "no rotary embeddings"),
        ("glm4", "glm4.nextn_predict_layers", 1, "glm4.nextn_predict_layers is set"),
        ("gemma3", "gemma3.attention.no_such_key", 2.0, "gemma3.attention.no_such_key is set"),
    ],
)
def test_a_key_of_another_model_is_named(name, key, value, says, tmp_path):
    written(name, tmp_path)
    file = GGUFFile.open(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=says):
        target_config(GGUFFile(file.metadata | {key: value}, file.tensors))


@pytest.mark.parametrize(("layers", "scalar"), [(46, 144), (42, 16)])
def test_gemma_2_of_27b_scales_attention_by_its_hidden_size(layers, scalar, tmp_path):
    written("gemma2", tmp_path)
    file = GGUFFile.open(tmp_path / "model.gguf")
    names = {
        name.replace("blk.0.", f"blk.{i}."): tensor
        for name, tensor in file.tensors.items()
        for i in range(layers if name.startswith("blk.0.") else 1)
    }
    keys = {"gemma2.block_count": layers, "gemma2.embedding_length": 576}
    config = target_config(GGUFFile(file.metadata | keys, names))
    assert config["query_pre_attn_scalar"] == scalar


def test_the_config_is_json_of_plain_numbers(tmp_path):
    written("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == TWO_BASES
    assert config["layer_types"] == ["sliding_attention"] * 5 + MIXED[::-1]
