"""gpt-oss as it is published, with experts in MXFP4: restored as they are read, planned as what they become."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.models.mxfp4_experts import restored
from tests.support.families import (
    CHUNKS,
    FAMILIES,
    assert_trees_equal,
    config_of,
    plain_copy,
    prefill,
    random_model,
    target_of,
)
from tests.support.quantised_files import SLOW_BLOCKS, random_blocks
from tests.support.ranks import on_ranks

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed_stack(num_experts: int, num_inputs: int, num_outputs: int, seed: int):
    """Return blocks and scales of random experts, and their numbers [E, I, O] by a slow reader."""
    rows = num_experts * num_outputs
    data = random_blocks("MXFP4", rows, num_inputs // 32, seed).reshape(-1, 17)
    numbers = [SLOW_BLOCKS["MXFP4"](bytes(block)) for block in data]
    weight = torch.tensor(numbers, dtype=torch.float32).view(num_experts, num_outputs, num_inputs)

    # A file has code 2i and 2i + 1 in a byte, GGUF has codes i and i + 16.
    codes = torch.from_numpy(data[:, 1:].copy())
    in_order = torch.cat([codes & 15, codes >> 4], 1)
    blocks = in_order[:, ::2] | in_order[:, 1::2] << 4
    shape = (num_experts, num_outputs, num_inputs // 32)
    scales = torch.from_numpy(data[:, 0].copy())
    return blocks.view(*shape, 16), scales.view(shape), weight.transpose(1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a directory with experts in MXFP4, and the model of what they stand for."""
    path = tmp_path_factory.mktemp("gpt-oss")
    small = FAMILIES["gpt_oss"].to_dict() | dict(hidden_size=64, intermediate_size=64)
    model = random_model(config_of(small.pop("model_type"), **small))
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    stacks = [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]
    for seed, name in enumerate(stacks):
        blocks, scales, weight = packed_stack(*tensors.pop(name).shape, seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).copy_(weight)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return path, model


def test_blocks_have_the_numbers_of_a_slow_reader():
    blocks, scales, weight = packed_stack(2, 96, 5, 7)
    assert torch.equal(restored(blocks, scales).float(), weight)


@torch.inference_mode()
def test_the_model_is_that_of_the_restored_experts(checkpoint, caplog):
    path, own = checkpoint
    with caplog.at_level(logging.INFO, "eagle_ray"):
        model = load_causal_lm(path, torch.float32, "cpu")
    assert "its experts in MXFP4 are restored to 16 bits" in caplog.text
    largest = float(own(torch.tensor([[5, 6, 7]])).logits.abs().max())
    assert_trees_equal(plain_copy(own), target_of(model), CHUNKS, atol=1e-4 * largest)


@torch.inference_mode()
def test_ranks_have_parts_of_the_restored_experts(checkpoint, tmp_path):
    path, _ = checkpoint
    whole = prefill(target_of(load_causal_lm(path, torch.float32, "cpu")), None)

    def work(ranks):
        model = load_causal_lm(path, torch.float32, "cpu", ranks=ranks)
        stack = model.get_parameter("model.layers.0.mlp.part.experts.down_proj")
        return stack.shape, prefill(target_of(model), None)

    for shape, logits in on_ranks(2, tmp_path, work):
        assert shape == (4, 32, 64)
        assert (logits - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_planned_for_what_they_become(checkpoint, dtype):
    path, _ = checkpoint
    model = load_causal_lm(path, dtype, "cpu")
    config = read_model_config(path)
    planned = target_bytes_of(path, config, dtype, "cpu", ModelConfig(target=str(path)))
    assert planned == sum(parameter.nbytes for parameter in model.parameters())


def test_a_scale_that_is_no_number_is_named(checkpoint, tmp_path):
    path, _ = checkpoint
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][0, 0, 0] = 255
    tensors[f"{name}_blocks"][0, 0, 0] = 0x77
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(EngineError, match=rf"^tensor {name}: "):
        load_causal_lm(tmp_path, torch.float32, "cpu")
