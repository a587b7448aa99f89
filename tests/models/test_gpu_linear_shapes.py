"""Layers of published targets in the formats of a GPU: torch's own checks of shapes, by tensors without numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.gpu_linears import INT4_ROWS, Fp8Linear, Int4Linear, int4_product
from eagle_ray.models.quantized_linear import Fp8Weight
from tests.support.published_shapes import TARGETS, layer_shapes
from tests.support.quantised_weights import weight_of

ROWS = (1, 16, 17, 64, 4096)


@pytest.mark.parametrize("target", TARGETS)
def test_torch_takes_every_product_in_fp8(target):
    seen = set()
    with FakeTensorMode():
        for num_ranks, _, num_out, num_in in layer_shapes(target):
            seen.add(num_ranks)
            values = torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn, device="cuda")
            bias = torch.empty(num_out, dtype=torch.bfloat16, device="cuda")
            layer = Fp8Linear(Fp8Weight(values, torch.empty(num_out, 1, device="cuda")), bias)
            for num_rows in ROWS:
                rows = ScaledRows(
                    torch.empty(num_rows, num_in, dtype=torch.float8_e4m3fn, device="cuda"),
                    torch.empty(num_rows, 1, device="cuda"),
                    torch.bfloat16,
                )
                outputs = layer(rows)
                assert outputs.shape == (num_rows, num_out)
                assert (outputs.dtype, outputs.device.type) == (torch.bfloat16, "cuda")
    assert {1, 2, 4} <= seen


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_torch_takes_every_product_of_4_bits(target, group_size):
    checked = 0
    with FakeTensorMode():
        for _, _, num_out, num_in in layer_shapes(target, group_size):
            run = next(size for size in (128, 64, 32) if num_in % size == 0)
            packed = torch.empty(
                num_out // 8, num_in // run, 32, run // 32, dtype=torch.int32, device="cuda"
            )
            scales = torch.empty(
                num_in // group_size, num_out, 2, dtype=torch.bfloat16, device="cuda"
            )
            rows = torch.empty(INT4_ROWS, num_in, dtype=torch.bfloat16, device="cuda")
            assert int4_product(rows, packed, group_size, scales).shape == (INT4_ROWS, num_out)
            checked += 1
    assert checked >= 4 and checked % 4 == 0


def test_a_width_that_fp8_cannot_take_is_seen():
    """Or the two tests above would pass whatever torch checks."""
    with FakeTensorMode():
        values = torch.empty(64, 4100, dtype=torch.float8_e4m3fn, device="cuda")
        layer = Fp8Linear(Fp8Weight(values, torch.empty(64, 1, device="cuda")))
        rows = ScaledRows(
            torch.empty(1, 4100, dtype=torch.float8_e4m3fn, device="cuda"),
            torch.empty(1, 1, device="cuda"),
            torch.bfloat16,
        )
        with pytest.raises(RuntimeError, match="divisible by 16"):
            layer(rows)


def test_layers_of_4_bits_pack_as_torch_reads_them():
    """The tensors that the products above take have the shapes that a layer makes."""
    layer = Int4Linear(weight_of(64, 256, 128, 4, torch.float16))
    assert layer.packed.shape == (8, 2, 32, 4)
    assert layer.scales.shape == (2, 64, 2)
