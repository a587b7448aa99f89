"""Quantised layers of a GPU, on a CPU: numbers against dequantised references, and launches counted."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from eagle_ray.core.errors import EngineError
from eagle_ray.kernels import layer_ops
from eagle_ray.kernels.stored_weight import SKINNY_ROWS
from eagle_ray.models import gpu_linears
from eagle_ray.models.decoder import is_llama_shaped
from eagle_ray.models.gpu_linears import (
    INT4_ROWS,
    Fp8Linear,
    Int4Linear,
    fp8_weight,
    gpu_linear,
    quantize_fp8,
    tile_packed,
    tile_unpacked,
)
from eagle_ray.models.packed_linear import merge_linears, slice_rows
from eagle_ray.models.quantized_linear import QuantizedWeight
from eagle_ray.models.quantized_model import build_model
from eagle_ray.models.target import TargetModel
from tests.support.families import (
    CHUNKS,
    COVERED,
    FAMILIES,
    assert_trees_equal,
    plain_copy,
    prefill,
    random_model,
    target_of,
)
from tests.support.operations import device_operations, tree_pass
from tests.support.toy_models import llama


def linear(
    num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(num_in + num_out)
    return nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)


def fp8_linear(layer: nn.Linear) -> Fp8Linear:
    return Fp8Linear(fp8_weight(layer.weight), layer.bias)


def test_fp8_weight_is_nearest_with_a_scale_per_output():
    weight = linear(64, 32).weight * torch.logspace(-6, 3, 32)[:, None]
    weight[3] = 0.0
    quantised = fp8_weight(weight)
    assert quantised.values.dtype == torch.float8_e4m3fn and quantised.scale.shape == (32, 1)
    error = (quantised.dequantize() - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 2**4, quantised.scale / 2**9)).all()
    assert (quantised.dequantize()[3] == 0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_layer_multiplies_rounded_rows_by_dequantized_weight(bias, dtype):
    layer = linear(128, 48, bias, dtype)
    quantised, inputs = fp8_linear(layer), torch.randn(2, 5, 128).to(dtype)
    rows = layer_ops.scaled_rows(inputs.flatten(0, 1))
    weight = fp8_weight(layer.weight).dequantize()
    expected = rows.dequantize() @ weight.T + (layer.bias.float() if bias else 0)
    found = quantised(inputs)
    assert found.dtype == dtype and found.shape == (2, 5, 48)
    torch.testing.assert_close(
        found.flatten(0, 1).float(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps * 4
    )
    assert torch.equal(quantised(rows), found.flatten(0, 1))
    torch.testing.assert_close(found, layer(inputs), atol=0.1, rtol=0.1)


def test_merged_layers_share_the_memory_of_their_parts():
    parts = [fp8_linear(linear(32, size, bias=True)) for size in (16, 32, 48)]
    inputs = torch.randn(3, 32)
    expected = torch.cat([part(inputs) for part in parts], 1)
    whole = merge_linears(parts)
    torch.testing.assert_close(whole(inputs), expected, atol=0, rtol=0)
    assert (
        merge_linears(parts).values.data_ptr()
        == whole.values.data_ptr()
        == parts[0].values.data_ptr()
    )
    torch.testing.assert_close(
        torch.cat([part(inputs) for part in parts], 1), expected, atol=0, rtol=0
    )


def test_a_size_that_no_product_takes_is_named():
    with pytest.raises(
        EngineError, match=r"model\.quantization: 1 is 40 x 16, and FP8 needs multiples of 16"
    ):
        quantize_fp8(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 40)))


@pytest.mark.parametrize("name", ["llama3 rope", "qwen2", "qwen3"])
@torch.inference_mode()
def test_fp8_model_equals_transformers_forward_of_its_layers(name, fused):
    """Prompts in chunks, then trees. Sums in another order round some numbers to FP8's neighbour, a sixteenth away."""
    model = random_model((COVERED | FAMILIES)[name])
    quantize_fp8(model.base_model.layers)
    assert is_llama_shaped(model)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS, atol=0.2)


@pytest.mark.parametrize(
    "products, product", [("skinny", "_skinny_product"), ("torch", "_scaled_mm_v2")]
)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "trees"])
@torch.inference_mode()
def test_a_layer_in_fp8_is_one_launch_more_than_in_bf16(
    plain, products, product, fused, monkeypatch
):
    """The rounding of what `o_proj` reads; the norms and the activation round what the other projections read."""
    monkeypatch.setenv("EAGLE_RAY_PRODUCTS", products)
    counts = {}
    for quantise in (False, True):
        for num_layers in (1, 3):
            model = llama(num_hidden_layers=num_layers)
            if quantise:
                quantize_fp8(model.base_model.layers)
            target = TargetModel(model, 4, 64)
            counts[quantise, num_layers] = device_operations(
                lambda target=target: tree_pass(target, plain)
            )
    dense, quantised = (counts[quantise, 3] - counts[quantise, 1] for quantise in (False, True))
    assert quantised[product] == 8 and not quantised["mm"]
    assert (
        quantised["_scaled_rows"] == quantised["_silu_mul_fp8"] == 2
        and quantised["_add_rms_norm"] == 4
    )
    assert quantised.total() == dense.total() + 2, (dense, quantised)


def weight_of(
    num_out: int, num_in: int, group: int, order: torch.Tensor | None = None
) -> QuantizedWeight:
    """Random codes with scales and offsets as AWQ has them."""
    generator = torch.Generator().manual_seed(num_out + group)
    codes = torch.randint(0, 16, (num_out, num_in), generator=generator).to(torch.uint8)
    scale = torch.rand(num_out, num_in // group, generator=generator).half() * 0.02 + 0.001
    offset = -scale * torch.randint(0, 16, scale.shape, generator=generator)
    return QuantizedWeight(codes, scale, offset, 4, order)


def multiply_on_cpu(rows, packed, group_size, scales):
    """torch's product of 4 bits for a CPU, whose formula is CUDA's."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu(
        rows,
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(tile_unpacked(packed), 1),
        group_size,
        scales,
    )


@pytest.mark.parametrize("num_out, num_in", [(8, 32), (24, 64), (16, 384)])
def test_codes_are_packed_as_tensor_cores_read_them(num_out, num_in):
    """The layout of torch's matrix_to_m16n8k16_Bint4_layout, one code at a time."""
    codes = weight_of(num_out, num_in, 32).codes
    packed = tile_packed(codes)
    run = 128 if num_in % 128 == 0 else num_in
    assert packed.shape == (num_out // 8, num_in // run, 32, run // 32)
    for output in range(num_out):
        for place in range(num_in):
            lane, word = output % 8 * 4 + place % 8 // 2, place % run // 32
            shift = place % 32 // 8 * 4 + place % 2 * 16
            found = int(packed[output // 8, place // run, lane, word]) >> shift & 15
            assert found == codes[output, place]
    assert torch.equal(tile_unpacked(packed), codes.int())


@pytest.mark.parametrize("products", ["skinny", "torch"])
@pytest.mark.parametrize(
    "num_out, num_in, group", [(16, 64, 32), (48, 128, 64), (16, 512, 512), (16, 96, 96)]
)
def test_four_bits_are_multiplied_as_torch_does(
    num_out, num_in, group, products, fused, monkeypatch
):
    """Few rows by either product, many by the restored weight, which is that of the checkpoint in bf16."""
    monkeypatch.setenv("EAGLE_RAY_PRODUCTS", products)
    monkeypatch.setattr(gpu_linears, "int4_product", multiply_on_cpu)
    order = torch.randperm(num_in)
    weight, bias = weight_of(num_out, num_in, group, order), torch.randn(num_out)
    layer = Int4Linear(weight, bias)
    restored = layer.dequantize().float()
    with monkeypatch.context() as patch:
        patch.setenv("EAGLE_RAY_KERNELS", "portable")
        torch.testing.assert_close(layer.dequantize().float(), restored, atol=0, rtol=2**-7)
    steps = weight.scale.float().amax()
    torch.testing.assert_close(restored, weight.dequantize(), atol=float(steps) / 16, rtol=2**-7)
    inputs = torch.randn(SKINNY_ROWS + 1, num_in, dtype=torch.bfloat16)
    expected = inputs.float() @ restored.T + bias
    for rows in (slice(0, 3), slice(0, INT4_ROWS + 1), slice(None)):
        torch.testing.assert_close(
            layer(inputs[rows]).float(), expected[rows], atol=0.03, rtol=2**-6
        )
    some = slice_rows(layer, torch.tensor([7, 0, 12]))
    assert torch.equal(some.weight.float(), restored[[7, 0, 12]]) and torch.equal(
        some.bias, bias[[7, 0, 12]].bfloat16()
    )


def int4_linear(layer: nn.Linear) -> Int4Linear:
    return Int4Linear(int4_weight(layer.weight))


@pytest.mark.parametrize("quantise", [fp8_linear, int4_linear])
def test_a_row_has_the_same_bits_alone_and_in_a_tree(quantise, fused):
    layer = quantise(linear(128, 48))
    rows = torch.randn(SKINNY_ROWS, 128, dtype=torch.bfloat16)
    together = layer(rows)
    for num_rows in (1, 7, 33):
        assert torch.equal(layer(rows[:num_rows]), together[:num_rows])


@torch.inference_mode()
def test_a_layer_of_four_bits_is_as_many_launches_as_a_dense_one(fused, monkeypatch):
    """Few rows: one product each; prompts: one launch more, which restores the weight."""
    monkeypatch.setenv("EAGLE_RAY_PRODUCTS", "torch")
    monkeypatch.setattr(
        gpu_linears,
        "int4_product",
        lambda rows, packed, *_: rows.new_empty(len(rows), 8 * len(packed)),
    )
    layer = Int4Linear(weight_of(16, 64, 32))
    few, many = (
        torch.randn(count, 64, dtype=torch.bfloat16) for count in (INT4_ROWS, INT4_ROWS + 1)
    )
    assert not device_operations(lambda: layer(few))  # but for the product, which is CUDA's
    assert device_operations(lambda: layer(many)) == {"_dequantize_int4": 1, "linear": 1}
    monkeypatch.setenv("EAGLE_RAY_PRODUCTS", "skinny")
    for rows in (few, many):
        assert device_operations(lambda rows=rows: layer(rows)) == {"_skinny_product": 1}


@pytest.mark.parametrize("products", ["skinny", "torch"])
def test_merged_layers_of_four_bits_equal_their_parts(products, fused, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_PRODUCTS", products)
    monkeypatch.setattr(gpu_linears, "int4_product", multiply_on_cpu)
    parts = [Int4Linear(weight_of(size, 128, 32)) for size in (16, 32, 48)]
    inputs = torch.randn(40, 128, dtype=torch.bfloat16)
    for rows in (inputs[:2], inputs):
        expected = torch.cat([part(rows) for part in parts], 1)
        whole = merge_linears(parts)
        assert torch.equal(whole(rows), expected)
        assert torch.equal(torch.cat([part(rows) for part in parts], 1), expected)
    assert isinstance(whole, Int4Linear) and parts[0].packed.data_ptr() == whole.packed.data_ptr()


def test_what_no_kernel_takes_is_restored_and_said_once(messages):
    gpu_linears.log_dense.cache_clear()  # other tests may have met these reasons
    weights = weight_of(12, 64, 32), replace(weight_of(16, 64, 32), bits=8), weight_of(16, 64, 16)
    cpu = torch.device("cpu")
    for weight in (*weights, *weights, fp8_weight(linear(64, 32).weight)):
        layer = gpu_linear(weight, None, torch.bfloat16, cpu)
        assert type(layer) is nn.Linear and torch.equal(
            layer.weight, weight.dequantize().bfloat16()
        )
    reasons = [line for line in messages if "restored to 16 bits" in line]
    assert len(reasons) == len(set(reasons)) == 4
    assert "it is 12 x 64, and the kernel takes multiples of 8 x 32" in reasons[0]
    assert isinstance(gpu_linear(weight_of(16, 64, 32), None, torch.bfloat16, cpu), Int4Linear)


class StoredCheckpoint:
    """A checkpoint of a random Llama whose projections are quantised in memory."""

    def __init__(self, quantise):
        model = llama(hidden_size=64, intermediate_size=96, head_dim=16).bfloat16()
        self.config, self.state = model.config, model.state_dict()
        self.weights = {
            name.removesuffix(".weight"): quantise(weight)
            for name, weight in self.state.items()
            if "_proj." in name
        }

    def tensor_names(self) -> set[str]:
        return set(self.state)

    def names(self) -> list[str]:
        return list(self.weights)

    def projection(self, name: str):
        return self.weights[name]

    def tensor(self, name: str) -> torch.Tensor:
        return self.state[name]


def int4_weight(weight: torch.Tensor) -> QuantizedWeight:
    groups = weight.float().unflatten(1, (-1, 32))
    offset, top = groups.amin(2), groups.amax(2)
    scale = (top - offset) / 15
    codes = ((groups - offset[..., None]) / scale[..., None]).round().to(torch.uint8).flatten(1)
    return QuantizedWeight(codes, scale, offset, 4)


@pytest.mark.parametrize(
    "quantise, kind, atol",
    [
        (fp8_weight, Fp8Linear, 0.5),
        (int4_weight, Int4Linear, 0.1),
        (lambda weight: replace(int4_weight(weight), bits=8), nn.Linear, 0.05),
    ],
    ids=["fp8", "4 bits", "8 bits"],
)
@torch.inference_mode()
def test_a_checkpoint_for_a_gpu_runs_in_our_forward(quantise, kind, atol, monkeypatch):
    """Its layers are made where the weights are, for the GPU to which they move; here they stay."""
    monkeypatch.setattr(gpu_linears, "why_no_fp8", lambda device: None)
    monkeypatch.setattr(gpu_linears, "knows_layout", lambda device: True)
    monkeypatch.setattr(gpu_linears, "int4_product", multiply_on_cpu)
    stored = StoredCheckpoint(quantise)
    model = build_model(stored.config, stored, torch.bfloat16, "cpu", runs_on="cuda")
    dense = build_model(stored.config, stored, torch.bfloat16, "cpu", dequantize=True)
    assert {type(module) for name, module in model.named_modules() if name.endswith("_proj")} == {
        kind
    }
    assert is_llama_shaped(model) and model.lm_head.weight.dtype == torch.bfloat16
    target, reference = target_of(model), target_of(dense)
    expected = prefill(reference, None)
    torch.testing.assert_close(
        prefill(target, None), expected, atol=atol * float(expected.std()), rtol=0.05
    )
    assert (
        type(target.logits_over(torch.arange(5))(torch.zeros(1, 64, dtype=torch.bfloat16)))
        is torch.Tensor
    )
