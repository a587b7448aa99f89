"""Quantised layers of a GPU, on a CPU: numbers against dequantised references, and launches counted."""

import pytest
import torch
from torch import nn

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels import layer_ops
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.gpu_linears import Fp8Linear, fp8_weight, quantize_linears
from eagle_ray.models.packed_linear import merge_linears
from eagle_ray.models.target import TargetModel
from tests.support.families import CHUNKS, COVERED, FAMILIES, assert_trees_equal, plain_copy, random_model, target_of
from tests.support.operations import device_operations, tree_pass
from tests.support.toy_models import llama


def linear(num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(num_in + num_out)
    return nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)


def in_fp8(layer: nn.Linear) -> Fp8Linear:
    return Fp8Linear(fp8_weight(layer.weight), layer.bias)


def test_a_weight_in_fp8_is_the_nearest_with_a_scale_for_each_output():
    weight = linear(64, 32).weight * torch.logspace(-6, 3, 32)[:, None]
    weight[3] = 0.0
    quantised = fp8_weight(weight)
    assert quantised.values.dtype == torch.float8_e4m3fn and quantised.scale.shape == (32, 1)
    error = (quantised.dequantize() - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 2**4, quantised.scale / 2**9)).all()
    assert (quantised.dequantize()[3] == 0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_rounded_rows_by_its_dequantised_weight(bias, dtype):
    layer = linear(128, 48, bias, dtype)
    quantised, inputs = in_fp8(layer), torch.randn(2, 5, 128).to(dtype)
    rows = layer_ops.scaled_rows(inputs.flatten(0, 1))
    weight = fp8_weight(layer.weight).dequantize()
    expected = rows.dequantize() @ weight.T + (layer.bias.float() if bias else 0)
    found = quantised(inputs)
    assert found.dtype == dtype and found.shape == (2, 5, 48)
    torch.testing.assert_close(found.flatten(0, 1).float(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps * 4)
    assert torch.equal(quantised(rows), found.flatten(0, 1))
    torch.testing.assert_close(found, layer(inputs), atol=0.1, rtol=0.1)


def test_merged_layers_share_the_memory_of_their_parts():
    parts = [in_fp8(linear(32, size, bias=True)) for size in (16, 32, 48)]
    inputs = torch.randn(3, 32)
    expected = torch.cat([part(inputs) for part in parts], 1)
    whole = merge_linears(parts)
    torch.testing.assert_close(whole(inputs), expected, atol=0, rtol=0)
    assert merge_linears(parts).values.data_ptr() == whole.values.data_ptr() == parts[0].values.data_ptr()
    torch.testing.assert_close(torch.cat([part(inputs) for part in parts], 1), expected, atol=0, rtol=0)


def test_a_size_that_no_product_takes_is_named():
    with pytest.raises(EngineError, match=r"model\.quantization: 1 is 40 x 16, and FP8 needs multiples of 16"):
        quantize_linears(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 40)))


@pytest.mark.parametrize("name", ["llama3 rope", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_model_in_fp8_equals_transformers_forward_of_its_layers(name, fused):
    """Prompts in chunks, then trees. Sums in another order round some numbers to FP8's neighbour, a sixteenth away."""
    model = random_model((COVERED | FAMILIES)[name])
    quantize_linears(model.base_model.layers)
    assert is_llama_shaped(model)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS, atol=0.2)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "trees"])
@torch.inference_mode()
def test_a_layer_in_fp8_is_one_launch_more_than_in_bf16(plain, fused):
    """The rounding of what `o_proj` reads; the norms and the activation round what the other projections read."""
    counts = {}
    for quantise in (False, True):
        for num_layers in (2, 4):
            model = llama(num_hidden_layers=num_layers)
            if quantise:
                quantize_linears(model.base_model.layers)
            target = TargetModel(model, 4, 64)
            counts[quantise, num_layers] = device_operations(lambda target=target: tree_pass(target, plain))
    dense, quantised = (counts[quantise, 4] - counts[quantise, 2] for quantise in (False, True))
    assert quantised["_scaled_mm_v2"] == 8 and not quantised["mm"]
    assert quantised["_scaled_rows"] == quantised["_silu_mul_fp8"] == 2 and quantised["_add_rms_norm"] == 4
    assert quantised.total() == dense.total() + 2, (dense, quantised)
