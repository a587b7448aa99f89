"""Checkpoints in FP8 with a scale for each block, as Qwen3 publishes them: kept on a GPU, and divided by ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.kernels.stored_weight import SKINNY_ROWS
from eagle_ray.models import gpu_linears
from eagle_ray.models.block_fp8_linear import BlockFp8Linear
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.fp8_blocks import Fp8BlockWeight, part_of_blocks
from eagle_ray.models.gpu_linears import gpu_linear
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import merge_linears, slice_rows
from eagle_ray.parallel.shard import Part, cut_out
from tests.support.families import FAMILIES, config_of, prefill, random_model, target_of
from tests.support.operations import device_operations
from tests.support.ranks import on_ranks


def weight_of(num_out: int, num_in: int, block: tuple[int, int] = (128, 128)) -> Fp8BlockWeight:
    generator = torch.Generator().manual_seed(num_out + num_in)
    values = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn)
    shape = [-(-size // step) for size, step in zip((num_out, num_in), block, strict=True)]
    scale = (torch.rand(*shape, generator=generator) + 0.5) / num_in**0.5
    return Fp8BlockWeight(values, scale, block)


PARTS = {
    "whole blocks of outputs": Part(0, ((128, 256),)),
    "half a block of outputs": Part(0, ((64, 128), (192, 256))),
    "the last outputs, and rows of zeros after them": Part(0, ((256, 300),), 20),
    "whole blocks of inputs": Part(1, ((0, 128),)),
    "half a block of inputs": Part(1, ((192, 256),)),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_that_of_the_dequantised_weight(kind):
    weight, part = weight_of(300, 256), PARTS[kind]
    found = part_of_blocks(weight, part)
    assert torch.equal(found.dequantize(), cut_out(weight.dequantize(), part))


@pytest.mark.parametrize("num_rows", [1, SKINNY_ROWS, SKINNY_ROWS + 1])
@pytest.mark.parametrize("block", [(128, 128), (16, 32)])
def test_a_layer_multiplies_by_the_dequantised_weight(num_rows, block, fused):
    weight, bias = weight_of(144, 320, block), torch.randn(144)
    layer, rows = BlockFp8Linear(weight, bias), torch.randn(num_rows, 320).bfloat16()
    expected = rows.float() @ weight.dequantize().T + bias
    found = layer(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=2**-6)
    launches = (
        {"_skinny_product": 1} if num_rows <= SKINNY_ROWS else {"_restored_fp8": 1, "addmm": 1}
    )
    assert device_operations(lambda: layer(rows)) == launches


def test_the_restored_weight_is_the_nearest_in_bf16(fused, monkeypatch):
    layer = BlockFp8Linear(weight_of(80, 1100, (64, 96)))
    restored = layer.dequantize()
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    assert torch.equal(restored, layer.dequantize())


def test_merged_layers_equal_their_parts_and_share_their_memory(fused):
    """The second ends within a block, so that scales are of smaller ones."""
    parts = [BlockFp8Linear(weight_of(size, 256)) for size in (256, 64, 128)]
    rows = torch.randn(5, 256).bfloat16()
    expected = torch.cat([part(rows) for part in parts], 1)
    whole = merge_linears(parts)
    assert isinstance(whole, BlockFp8Linear) and whole.block == (64, 128)
    assert torch.equal(whole(rows), expected)
    assert parts[0].values.data_ptr() == whole.values.data_ptr()
    some = slice_rows(whole, torch.tensor([300, 0]))
    torch.testing.assert_close(
        some(rows).float(), expected[:, [300, 0]].float(), atol=0.03, rtol=2**-6
    )


def test_blocks_that_no_kernel_takes_become_dense_and_are_said(fused, messages):
    gpu_linears.log_dense.cache_clear()  # other tests may have met these reasons
    cpu = torch.device("cpu")
    for weight, dtype in (
        (weight_of(32, 96, (16, 24)), torch.bfloat16),
        (weight_of(32, 64), torch.float16),
    ):
        layer = gpu_linear(weight, None, dtype, cpu)
        assert torch.equal(layer.weight, weight.dequantize().to(dtype))
    assert [line for line in messages if "24 inputs share a scale" in line]
    assert [line for line in messages if "rows are float16" in line]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a directory with a random Qwen3 in the layout of Qwen3-*-FP8, and the weights that it stands for."""
    path = tmp_path_factory.mktemp("qwen3-fp8")
    shape = dict(hidden_size=256, intermediate_size=384, head_dim=64, num_attention_heads=4)
    small = FAMILIES["qwen3"].to_dict() | shape | dict(num_key_value_heads=2)
    model = random_model(config_of(small.pop("model_type"), **small)).bfloat16()
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = weight_of(*tensors[name].shape)
        tensors[name] = weight.values
        tensors[f"{name}_scale_inv"] = weight.scale
        model.get_parameter(name).copy_(weight.dequantize())
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path, model


@torch.inference_mode()
def test_a_checkpoint_in_fp8_blocks_stays_so_on_a_gpu(checkpoint, fused, monkeypatch):
    path, dense = checkpoint
    monkeypatch.setattr(gpu_linears, "why_not_blocks", lambda weight, device: None)
    model = load_causal_lm(path, torch.bfloat16, "cpu", runs_on="cuda")
    kinds = {type(x) for name, x in model.named_modules() if name.endswith("_proj")}
    assert kinds == {BlockFp8Linear} and is_llama_shaped(model)
    expected = prefill(target_of(dense), None)
    found = prefill(target_of(model), None)
    torch.testing.assert_close(found, expected, atol=0.1 * float(expected.std()), rtol=0.05)


@torch.inference_mode()
def test_ranks_have_parts_of_the_blocks(checkpoint, tmp_path):
    """Two ranks cut blocks of keys and of the MLP's 384 outputs and inputs in halves."""
    path, _ = checkpoint

    def work(ranks):
        model = load_causal_lm(path, torch.float32, "cpu", ranks=ranks)
        return prefill(target_of(model), None)

    whole = prefill(target_of(load_causal_lm(path, torch.float32, "cpu")), None)
    for logits in on_ranks(2, tmp_path, work):
        torch.testing.assert_close(logits, whole, atol=1e-4 * float(whole.abs().max()), rtol=1e-4)
