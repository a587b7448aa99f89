"""The operations between a layer's products: in one launch each they compute what torch does in several."""

import pytest
import torch

from eagle_ray.attention.metadata import AttentionShape, Rotary
from eagle_ray.kernels import fused_layer, layer_ops
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.target import TargetModel
from tests.support.families import (
    CHUNKS,
    COVERED,
    FAMILIES,
    assert_trees_equal,
    plain_copy,
    random_model,
    target_of,
)
from tests.support.kernels import DEVICE
from tests.support.operations import device_operations, tree_pass
from tests.support.toy_models import llama

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MAX_LAUNCHES = 14


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        DEVICE, dtype
    )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows, width", [(1, 64), (5, 100), (3, 5000)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm(rows, width, has_delta, dtype):
    residual, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    delta = random(rows, width + 1, dtype=dtype)[:, 1:].contiguous() if has_delta else None
    sums = residual.clone()
    expected = layer_ops.add_rms_norm(sums, delta, weight, 1e-5)
    found = fused_layer.add_rms_norm(residual, delta, weight, 1e-5)
    torch.testing.assert_close(
        residual, sums, atol=0, rtol=ROUNDING[dtype]
    )  # the interpreter cuts bf16 off
    torch.testing.assert_close(found, expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows, width", [(1, 8), (3, 1024), (2, 2500)])
def test_silu_mul(rows, width, dtype):
    both = 4 * random(rows, 2 * width, dtype=dtype)
    expected = layer_ops.silu_mul(both)
    torch.testing.assert_close(
        fused_layer.silu_mul(both), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
    )


FP8_STEP = 2.0**-3  # of neighbouring numbers in FP8, relative to them


def assert_same_rows(found: ScaledRows, expected: ScaledRows, dtype: torch.dtype) -> None:
    """Equal but for numbers that sums in another order round to a neighbour."""
    torch.testing.assert_close(found.scale, expected.scale, atol=0, rtol=ROUNDING[dtype])
    smallest = float(expected.scale.max()) / 2**9
    torch.testing.assert_close(
        found.dequantize(), expected.dequantize(), atol=smallest, rtol=FP8_STEP + ROUNDING[dtype]
    )
    assert found.dtype == expected.dtype == dtype
    assert (found.values.float() != expected.values.float()).float().mean() < (
        0.01 if dtype == torch.float32 else 0.3
    )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows, width", [(1, 64), (5, 100), (3, 5000)])
def test_fp8_rows_are_those_of_the_plain_operations_rounded(rows, width, dtype):
    """Three operations in the launches that compute them, and rows of zeros."""
    residual, delta, weight = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype),
        random(width),
    )
    both = 40 * random(rows, 2 * width, dtype=dtype)
    both[0] = 0.0
    weight = weight.to(dtype)
    sums = residual.clone()
    expected = layer_ops.add_rms_norm_fp8(sums, delta, weight, 1e-5), layer_ops.silu_mul_fp8(both)
    found = (
        fused_layer.add_rms_norm_fp8(residual, delta, weight, 1e-5),
        fused_layer.silu_mul_fp8(both),
    )
    torch.testing.assert_close(residual, sums, atol=0, rtol=ROUNDING[dtype])
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_rows(ours, theirs, dtype)
    assert not found[1].values[0].float().any() and found[1].scale[0] == 1.0
    assert_same_rows(
        fused_layer.scaled_rows(both[:, 1:]), layer_ops.scaled_rows(both[:, 1:]), dtype
    )


def test_fp8_rounds_a_row_by_itself_and_to_the_nearest_number():
    rows = 100 * random(7, 300)
    together = fused_layer.scaled_rows(rows)
    for i, row in enumerate(rows):
        alone = fused_layer.scaled_rows(row[None])
        assert torch.equal(alone.values.view(torch.uint8)[0], together.values.view(torch.uint8)[i])
        assert torch.equal(alone.scale[0], together.scale[i])
    torch.testing.assert_close(together.dequantize().abs().amax(1), rows.abs().amax(1))
    torch.testing.assert_close(
        together.dequantize(), rows, atol=float(together.scale.max()) / 2**9, rtol=FP8_STEP / 2
    )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (3, 1, 24), (8, 8, 128)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotate_and_write(heads, kv_heads, dim, has_norm, dtype):
    rows, cells = 5, torch.tensor([7, 2, 9, 0, 3], device=DEVICE)
    qkv = random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = random(rows, dim // 2)
    rotary = Rotary(angles.cos(), angles.sin())
    norms = (random(dim, dtype=dtype), random(dim + 1, dtype=dtype)[1:], 1e-6) if has_norm else ()
    expected = AttentionShape(0, heads, kv_heads, dim, 1.0, None, *norms).split(qkv, rotary)
    given = qkv.clone()
    keys, values = (
        torch.full((11, kv_heads, dim), 5.0, device=DEVICE, dtype=dtype) for _ in range(2)
    )
    fused_layer.rotate_and_write(qkv, keys, values, cells, rotary.cosine, rotary.sine, *norms)
    found = qkv.view(rows, -1, dim)[:, :heads], keys[cells], values[cells]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    rounded = [
        torch.full((11, kv_heads, dim), 5.0, device=DEVICE).to(torch.float8_e4m3fn)
        for _ in range(2)
    ]
    given[0, -1] = 1000.0
    fused_layer.rotate_and_write(given, *rounded, cells, rotary.cosine, rotary.sine, *norms)
    for ours, theirs in zip(rounded, found[1:], strict=True):
        bound = theirs.clone().float()
        bound[0, -1, -1] = 448.0 if theirs is found[2] else bound[0, -1, -1]
        torch.testing.assert_close(
            ours[cells].float(), bound, atol=2**-9, rtol=FP8_STEP / 2 + ROUNDING[dtype]
        )
    assert torch.equal(given.view(rows, -1, dim)[:, :heads], found[0])
    others = [1, 4, 5, 6, 8, 10]
    assert keys[others].eq(5).all() and values[others].eq(5).all()


@pytest.mark.parametrize(
    "name",
    [
        "llama3 rope",
        "mistral",
        "qwen2",
        "qwen3",
        "one kv head",
        "gemma2",
        "gemma3_text",
        "glm4",
        "olmo3",
        "granite",
        "gpt_oss",
    ],
)
@torch.inference_mode()
def test_a_whole_model_equals_transformers_own(name, fused):
    """Prompts in chunks, then trees, in fp32. Those with soft-caps or sinks attend as chains and have their layers."""
    model = random_model((COVERED | FAMILIES)[name]).to(DEVICE)
    assert_trees_equal(plain_copy(model), target_of(model), CHUNKS, atol=1e-4)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "trees"])
@torch.inference_mode()
def test_a_layer_is_a_few_launches(plain, fused):
    """A layer's share of a pass, whatever a pass computes once; 57 operations before they were fused."""
    counts = {}
    for num_layers in (1, 3):
        target = TargetModel(llama(num_hidden_layers=num_layers).to(DEVICE), 4, 64)
        counts[num_layers] = device_operations(lambda target=target: tree_pass(target, plain))
    two_layers = counts[3] - counts[1]
    assert two_layers["_rotate_and_write"] == two_layers["attend"] == two_layers["_silu_mul"] == 2
    assert two_layers.total() / 2 <= MAX_LAUNCHES, two_layers
