"""Quantised layers on a CPU: the products' values, their bits in any company, and layers made of layers."""

import dataclasses

import pytest
import torch

from eagle_ray.attention.backend import prefill_metadata
from eagle_ray.core.errors import EngineError
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.packed_linear import OutputSlice, merge_linears, pack_linears, slice_rows
from eagle_ray.models.quantized_linear import (
    QuantizedLinear,
    QuantizedWeight,
    pack_weight,
    portable_matmul,
    quantize_linears,
    unpack_weight,
)
from eagle_ray.models.target import PromptBatch, TargetModel
from tests.support.families import config_of, random_model
from tests.support.quantised_weights import weight_of

needs_library = pytest.mark.skipif(
    cpu_ops.best_library() is None, reason="no compiled library for this processor"
)


def slow_product(rows, weight):
    """The definition, in exact arithmetic but for the rounding of inputs."""
    values = torch.zeros_like(rows, dtype=torch.float64)
    for r, row in enumerate(rows.float()):
        for begin in range(0, len(row), 32):
            block = row[begin : begin + 32]
            largest = block.abs().max()
            factor = torch.tensor(127.0) / largest if largest > 0 else torch.tensor(0.0)
            values[r, begin : begin + 32] = (block * factor).round().double() * (
                largest / 127
            ).double()
    return values @ weight.dequantize().double().T


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 96, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_are_those_of_the_definition(bits, group_size, dtype):
    weight = weight_of(40, 192, group_size, bits, dtype)
    rows, bias = torch.randn(19, 192), torch.randn(40)
    found = cpu_ops.quantized_matmul(rows, pack_weight(weight), bias)
    expected = slow_product(rows, weight) + bias
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5, atol=float(expected.abs().max()) * 1e-6
    )
    torch.testing.assert_close(
        portable_matmul(rows, pack_weight(weight), bias), found, rtol=1e-4, atol=1e-3
    )
    halves = cpu_ops.quantized_matmul(rows.bfloat16(), pack_weight(weight), bias.bfloat16())
    wide = cpu_ops.quantized_matmul(
        rows.bfloat16().float(), pack_weight(weight), bias.bfloat16().float()
    )
    assert torch.equal(halves, wide.bfloat16())


def products(library, packed, path, rows):
    """A product by the instructions of a path. Paths are by number: those that a processor lacks are not run."""
    weight = dataclasses.replace(packed)
    weight.descriptor.path = path
    out = torch.empty(len(rows), packed.num_outputs)
    function = library.quantized_matmul_float32
    function.argtypes, function.restype = cpu_ops.CPU_SIGNATURES["quantized_matmul"], None
    function(out.data_ptr(), rows.data_ptr(), None, weight.descriptor, len(rows), 2)
    return out


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_every_processor_makes_the_same_bits(bits, group_size):
    packed = pack_weight(weight_of(48, 128, group_size, bits, torch.float16))
    rows = torch.randn(45, 128) * torch.logspace(-3, 3, 128)
    found = []
    for library in filter(None, map(cpu_ops.library_of, cpu_ops.levels())):
        best = library.quantized_matmul_path()
        found += [products(library, packed, path, rows) for path in range(best + 1)]
    assert len(found) >= 2 and all(torch.equal(other, found[0]) for other in found)
    assert cpu_ops.INSTRUCTIONS[cpu_ops.quantized_path()], "every path has a name"


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_bits_of_a_row_do_not_depend_on_how_many_rows_there_are(bits, group_size):
    packed = pack_weight(weight_of(40, 128, group_size, bits, torch.float16))
    rows = torch.randn(130, 128)
    library = cpu_ops.best_library()
    for path in range(library.quantized_matmul_path() + 1):
        together = products(library, packed, path, rows)
        for num in range(1, len(rows)):
            assert torch.equal(products(library, packed, path, rows[:num]), together[:num])


@needs_library
def test_inputs_are_rounded_to_the_nearest_step_and_ties_to_even():
    """A weight of ones on its diagonal shows the rounded inputs themselves."""
    ones = QuantizedWeight(
        torch.eye(64, dtype=torch.uint8), torch.ones(64, 2), torch.zeros(64, 2), 8
    )
    rows = torch.randn(5000, 64)
    rows[:100] = torch.randint(-254, 255, (100, 64)) / 2.0  # with halves of a step
    rows[:100, ::32] = 127.0
    blocks = rows.unflatten(1, (2, 32))
    peaks = blocks.abs().amax(2, keepdim=True)
    most = torch.tensor(127.0)  # a number divided by a tensor is its reciprocal times the number
    expected = ((blocks * (most / peaks)).round() * (peaks / most)).flatten(1)
    for library in filter(None, map(cpu_ops.library_of, cpu_ops.levels())):
        assert torch.equal(products(library, pack_weight(ones), 0, rows), expected)


@needs_library
def test_the_smallest_inputs_there_are_round_to_zero():
    packed = pack_weight(weight_of(16, 64, 32, 8))
    out = cpu_ops.quantized_matmul(torch.full((1, 64), 1e-45), packed, None)
    assert torch.equal(out, torch.zeros(1, 16))


@needs_library
def test_row_has_equal_bits_in_any_batch_and_thread_count():
    packed, rows = pack_weight(weight_of(96, 256, 32, 4)), torch.randn(300, 256)
    together = cpu_ops.quantized_matmul(rows, packed, None)
    alone = torch.cat([cpu_ops.quantized_matmul(rows[i : i + 1], packed, None) for i in range(300)])
    torch.set_num_threads(2)
    try:
        threads = cpu_ops.quantized_matmul(rows, packed, None)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together) and torch.equal(threads, together)


@needs_library
def test_largest_codes_and_inputs_do_not_overflow():
    codes = torch.full((16, 64), 255, dtype=torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(16, 2), torch.zeros(16, 2), 8)
    for path in range(cpu_ops.quantized_path() + 1):
        for sign in (1.0, -1.0):
            out = products(
                cpu_ops.best_library(),
                pack_weight(weight),
                path,
                torch.full((20, 64), sign * 127.0),
            )
            assert torch.equal(out, torch.full((20, 16), sign * 64 * 255 * 127.0))


@needs_library
def test_non_finite_inputs_make_nan_rows_and_zeros_make_zeros():
    packed, rows = pack_weight(weight_of(16, 64, 32, 4)), torch.randn(4, 64)
    rows[0, 3], rows[1, 40], rows[2] = torch.nan, torch.inf, 0.0
    out = cpu_ops.quantized_matmul(rows, packed, None)
    assert (
        out[:2].isnan().all() and torch.equal(out[2], torch.zeros(16)) and out[3].isfinite().all()
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_loses_nothing(bits):
    weight = weight_of(40, 96, 32, bits, torch.float16)
    found = unpack_weight(pack_weight(weight))
    assert torch.equal(found.codes, weight.codes) and torch.equal(found.scale, weight.scale)
    assert torch.equal(found.offset, weight.offset) and found.bits == bits


def test_layers_merge_and_slice_without_a_change_of_bits():
    parts = [QuantizedLinear(weight_of(n, 64, 32, 4, seed=n), torch.randn(n)) for n in (32, 16, 8)]
    rows, whole = torch.randn(2, 3, 64), QuantizedLinear.merged(parts)
    assert QuantizedLinear.can_merge(parts) and torch.equal(
        whole(rows), torch.cat([part(rows) for part in parts], -1)
    )
    index = torch.tensor([55, 0, 17, 17])
    assert torch.equal(slice_rows(whole, index)(rows), whole(rows)[..., index])
    assert not QuantizedLinear.can_merge([parts[2], parts[0]])  # whose outputs end within a tile
    assert torch.equal(
        merge_linears(parts[::-1])(rows), torch.cat([part(rows) for part in parts[::-1]], -1)
    )


def test_inputs_in_another_order_are_read_in_it():
    weight, order = weight_of(16, 64, 32, 4), torch.randperm(64)
    layer = QuantizedLinear(dataclasses.replace(weight, order=order))
    rows = torch.randn(5, 64)
    assert torch.equal(layer(rows), QuantizedLinear(weight)(rows[:, order]))
    assert torch.equal(layer.quantized_weight().dequantize()[:, order], weight.dequantize())
    twice = QuantizedLinear.merged([layer, layer]).quantized_weight().dequantize()
    assert torch.equal(twice, torch.cat([layer.quantized_weight().dequantize()] * 2))
    assert QuantizedLinear.can_merge([layer, layer]) and not QuantizedLinear.can_merge(
        [layer, QuantizedLinear(weight)]
    )


def test_merged_projections_stay_in_the_module_tree():
    class LlamaMLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (
                QuantizedLinear(weight_of(32, 64, 32, 4, seed=n)) for n in (1, 2)
            )
            self.down_proj = QuantizedLinear(weight_of(64, 32, 32, 4))

    model, rows = LlamaMLP(), torch.randn(3, 64)
    before = model.gate_proj(rows), model.up_proj(rows)
    pack_linears(model)
    assert isinstance(model.up_proj, OutputSlice) and model.up_proj.whole is model.gate_proj.whole
    assert torch.equal(model.gate_proj(rows), before[0]) and torch.equal(
        model.up_proj(rows), before[1]
    )
    assert merge_linears([model.gate_proj, model.up_proj]) is model.gate_proj.whole


@pytest.mark.parametrize(("inputs", "group_size"), [(48, 16), (96, 24)])
def test_sizes_that_the_kernel_does_not_take_are_named(inputs, group_size):
    with pytest.raises(EngineError, match=rf"{inputs} inputs in groups of {group_size}"):
        QuantizedLinear(weight_of(16, inputs, group_size, 4))


@needs_library
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_all_layers_in_one_call_have_the_bits_of_layer_by_layer(family, kv_dtype):
    model = random_model(
        config_of(family, hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    )
    quantize_linears(model)
    pack_linears(model)
    outputs = []
    for is_fused in (True, False):
        target = TargetModel(model, 2, 64, feature_layers=(0, 1), kv_dtype=kv_dtype)
        decoder = Decoder.of(model, (0, 1))
        assert decoder.quantized is not None
        decoder.quantized = decoder.quantized if is_fused else None
        for slot in (0, 1):
            target.cache.blocks.reserve(slot, 20)
        prompts = PromptBatch.of([0, 1], [list(range(1, 8)), list(range(3, 15))])
        layout = prefill_metadata(target.cache, [0, 1], [0, 0], [0, 0], [7, 12])
        outputs.append(
            (*decoder(prompts.tokens, prompts.positions, layout), target.cache.keys.clone())
        )
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("num_outputs", [3, 16, 40, 1037])
def test_the_highest_output_is_found_without_writing_any(bits, group_size, num_outputs):
    weight = weight_of(num_outputs, 256, group_size, bits)
    weight.codes[1::3], weight.scale[1::3], weight.offset[1::3] = (
        part[:1].clone() for part in (weight.codes, weight.scale, weight.offset)
    )  # many outputs are equal
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(130, 256, generator=torch.Generator().manual_seed(2))
    rows[3], rows[5, 7] = 0.0, torch.nan
    for each in (None, torch.zeros(num_outputs), bias):
        layer = QuantizedLinear(weight, each)
        wanted = layer(rows).argmax(-1)
        for path in range(cpu_ops.quantized_path() + 1):
            layer.packed.descriptor.path = path
            for count in (1, 2, 7, 8, 9, 64, 130):
                assert torch.equal(layer.argmax(rows[:count]), wanted[:count])


@needs_library
def test_infinite_and_missing_numbers_are_ranked_as_by_argmax():
    """The first NaN is the highest, and of equal outputs, infinite ones too, the first."""
    layer = QuantizedLinear(weight_of(70, 64, 32, 4), torch.zeros(70))
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    for at, number in [
        ([], 0.0),
        ([69], torch.inf),
        ([33, 40], torch.inf),
        ([50, 17], torch.nan),
        (list(range(70)), -torch.inf),
    ]:
        layer.bias.zero_()
        layer.bias[at] = number
        assert torch.equal(layer.argmax(rows), layer(rows).argmax(-1))


@needs_library
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_the_highest_output_does_not_depend_on_threads(num_threads):
    layer = QuantizedLinear(weight_of(3000, 512, 32, 4))
    rows = torch.randn(20, 512, generator=torch.Generator().manual_seed(2))
    wanted = layer(rows).argmax(-1)
    torch.set_num_threads(num_threads)
    try:
        with cpu_ops.team():
            assert torch.equal(layer.argmax(rows), wanted)
        assert torch.equal(layer.argmax(rows), wanted)
    finally:
        torch.set_num_threads(1)
