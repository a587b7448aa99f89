"""Experts in FP8: products equal those of dequantised stacks, and checkpoints keep them as they are stored."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.assembly.stored_bytes import target_bytes_of
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.kernels import grouped_experts
from eagle_ray.kernels.fp8 import Fp8Stack
from eagle_ray.models import quantized_model
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.fp8_experts import Fp8Experts
from eagle_ray.models.loader import load_causal_lm, read_model_config
from eagle_ray.parallel.shard import check_shards
from tests.support.families import MOE, config_of, plain_copy, prefill, random_model, target_of
from tests.support.kernels import DEVICE
from tests.support.operations import device_operations, tree_pass

BLOCKS = {
    "of an output": (1, 10**6),
    "of an expert": (10**6, 10**6),
    "of 128 x 128": (128, 128),
    "of 32 x 64": (32, 64),
}
SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def stack_of(num_experts: int, num_out: int, num_in: int, block: tuple[int, int]) -> Fp8Stack:
    sizes = min(block[0], num_out), min(block[1], num_in)
    shape = -(-num_out // sizes[0]), -(-num_in // sizes[1])
    values = random(num_experts, num_out, num_in).to(torch.float8_e4m3fn)
    scale = (random(num_experts, *shape).abs() + 0.5) / num_in**0.5
    return Fp8Stack(values, scale, sizes)


@pytest.mark.parametrize("num_rows", [1, 9, 90])
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_those_of_the_dequantised_experts(kind, num_rows):
    """Few pairs of an expert and more than a tile has; experts without any."""
    gate_up, down = stack_of(5, 192, 192, BLOCKS[kind]), stack_of(5, 192, 96, BLOCKS[kind])
    rows = random(num_rows, 192).bfloat16()
    choices = grouped_experts.route(random(num_rows, 5), 5, 2, True, torch.float32)
    groups = grouped_experts.group_pairs(choices.experts, 5)
    inner = grouped_experts.gated_products(rows, gate_up, groups, 2)
    found = grouped_experts.products(inner, down, groups).float()

    chosen = choices.experts.long()
    both = torch.einsum("rkoh,rh->rko", gate_up.dequantize(torch.float32)[chosen], rows.float())
    gate, up = both.chunk(2, -1)
    middle = torch.nn.functional.silu(gate) * up
    expected = torch.einsum("rkhi,rki->rkh", down.dequantize(torch.float32)[chosen], middle)
    atol = 0.01 * float(expected.abs().max())
    torch.testing.assert_close(found, expected.flatten(0, 1), atol=atol, rtol=2e-2)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def checkpoint(request, tmp_path_factory):
    """Return a directory with a random mixture in FP8 by blocks, and the model that it stands for."""
    path = tmp_path_factory.mktemp(request.param)
    sizes = dict(moe_intermediate_size=96, intermediate_size=96, shared_expert_intermediate_size=96)
    model = random_model(config_of(request.param, **MOE | sizes | dict(hidden_size=128))).bfloat16()
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        own = stack_of(1, *tensors[name].shape, (64, 64))
        tensors[name], tensors[f"{name}_scale_inv"] = own.values[0], own.scale[0]
        weight = own.dequantize(torch.bfloat16)[0]
        if ".experts." in name:
            block, number, projection, _ = name.rsplit(".", 3)
            stack = state[f"{block}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
            half = slice(96, None) if projection == "up_proj" else slice(None, 96)
            part = stack[int(number)] if projection == "down_proj" else stack[int(number)][half]
            part.copy_(weight)
        else:
            state[name].copy_(weight)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return path, model


@pytest.fixture
def for_gpu(monkeypatch, fused):
    """Layers and experts are those of a GPU, and stay where the weights are."""
    monkeypatch.setattr(quantized_model, "keeps_experts", lambda dtype, device: True)


@torch.inference_mode()
def test_a_checkpoint_keeps_experts_in_fp8_as_stored(checkpoint, for_gpu):
    path, dense = checkpoint
    model = load_causal_lm(path, torch.bfloat16, "cpu")
    experts = [module for module in model.modules() if isinstance(module, Fp8Experts)]
    assert len(experts) == model.config.num_hidden_layers and is_llama_shaped(model)
    for own, layer in zip(experts, dense.base_model.layers, strict=True):
        stacks = layer.mlp.experts
        assert torch.equal(own.gate_up.dequantize(torch.bfloat16), stacks.gate_up_proj)
        assert torch.equal(own.down.dequantize(torch.bfloat16), stacks.down_proj)
    expected = prefill(target_of(dense), None)
    found = prefill(target_of(model), None)
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.std()), rtol=0.05)


@torch.inference_mode()
def test_without_kernels_they_are_restored_for_a_pass(checkpoint, for_gpu, monkeypatch):
    path, dense = checkpoint
    model = load_causal_lm(path, torch.bfloat16, "cpu")
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    expected = prefill(target_of(dense), None)
    found = prefill(target_of(model), None)
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.std()), rtol=0.05)
    ids = torch.arange(5, 12)[None]
    found = plain_copy(model)(ids).logits.float()
    torch.testing.assert_close(found, plain_copy(dense)(ids).logits.float(), atol=0.1, rtol=0.1)


@torch.inference_mode()
def test_a_layer_has_as_many_launches_as_with_plain_experts(checkpoint, for_gpu):
    path, dense = checkpoint
    counts = []
    for model in (load_causal_lm(path, torch.bfloat16, "cpu"), dense):
        target = target_of(model)
        counts.append(device_operations(lambda target=target: tree_pass(target, plain=True)))
    assert counts[0]["_grouped_product"] == counts[1]["_grouped_product"] > 0
    assert counts[0].total() == counts[1].total()


@torch.inference_mode()
def test_on_a_cpu_they_are_restored_as_they_are_read(checkpoint):
    path, dense = checkpoint
    model = load_causal_lm(path, torch.bfloat16, "cpu")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dense.get_parameter(name))


def test_memory_is_planned_for_experts_in_fp8(checkpoint, for_gpu, monkeypatch):
    path, _ = checkpoint
    config, model = read_model_config(path), ModelConfig(target=str(path))
    planned = target_bytes_of(path, config, torch.bfloat16, "cuda", model)
    dense = target_bytes_of(path, config, torch.bfloat16, "cpu", model)
    loaded = load_causal_lm(path, torch.bfloat16, "cpu")
    experts = [module for module in loaded.modules() if isinstance(module, Fp8Experts)]
    kept = sum(stack.values.nbytes for own in experts for stack in (own.gate_up, own.down))
    assert weight_bytes(loaded) >= kept > 0
    assert dense - planned >= kept


def test_what_experts_do_not_take_is_named(checkpoint, tmp_path, for_gpu):
    path, _ = checkpoint
    config = json.loads((path / "config.json").read_text())
    awq = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(EngineError, match="quantised experts are not read"):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match=r"the experts of .* are quantised"):
        check_shards(read_model_config(path), 2, 32)


def test_a_router_in_fp8_is_named(checkpoint, tmp_path):
    """It is no linear layer of transformers, so its scale would be left out."""
    path, _ = checkpoint
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.gate.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(EngineError, match=rf"^tensor {name}: is quantised"):
        load_causal_lm(tmp_path, torch.bfloat16, "cpu")
