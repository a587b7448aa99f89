"""Products of few rows with weights as they are stored: dense oracles, and equal bits for any number of rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from eagle_ray.kernels import layer_ops
from eagle_ray.kernels.skinny_product import skinny_product
from eagle_ray.kernels.stored_weight import SKINNY_ROWS, ProductCut, StoredWeight, no_arrivals
from eagle_ray.models.gpu_linears import tile_packed
from tests.support.kernels import DEVICE

ROUNDING = 2**-7


@dataclass(frozen=True)
class Case:
    """A weight, and what it stands for in fp32."""

    stored: StoredWeight
    dense: torch.Tensor


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def bf16(num_out: int, num_in: int) -> Case:
    weight = (random(num_out, num_in) / num_in**0.5).bfloat16()
    return Case(StoredWeight.dense(weight), weight.float())


def fp8(num_out: int, num_in: int, rows: int, inputs: int) -> Case:
    """With a scale for each block of outputs and inputs; the last blocks may be smaller."""
    values = random(num_out, num_in).to(torch.float8_e4m3fn)
    scale = random(-(-num_out // rows), -(-num_in // inputs)).abs() / num_in**0.5
    whole = scale.repeat_interleave(rows, 0)[:num_out].repeat_interleave(inputs, 1)[:, :num_in]
    return Case(StoredWeight.fp8(values, scale, (rows, inputs)), values.float() * whole)


def int4(num_out: int, num_in: int, group: int) -> Case:
    codes = random(num_out, num_in).mul(2).add(8).clamp(0, 15).to(torch.uint8)
    scales = (random(num_in // group, num_out, 2) / num_in**0.5).bfloat16()
    scale, zero = (part.T.float().repeat_interleave(group, 1) for part in scales.unbind(-1))
    dense = ((codes.float() - 8) * scale + zero).bfloat16().float()
    return Case(StoredWeight.int4(tile_packed(codes), scales), dense)


CASES: dict[str, Callable[[], Case]] = {
    "bf16": lambda: bf16(72, 640),
    "bf16 of odd sizes": lambda: bf16(40, 208),
    "fp8 by output": lambda: fp8(80, 1088, 1, 1088),
    "fp8 whole": lambda: fp8(48, 512, 48, 512),
    "fp8 in blocks of 128": lambda: fp8(192, 640, 128, 128),
    "fp8 in blocks, the last ones smaller": lambda: fp8(80, 1072, 64, 128),
    "fp8 in blocks of a rank": lambda: fp8(96, 192, 32, 64),
    "int4 in groups of 32": lambda: int4(72, 1152, 32),
    "int4 in groups of 64": lambda: int4(40, 192, 64),
    "int4 in groups of 128": lambda: int4(64, 1024, 128),
    "int4 in groups of 256": lambda: int4(24, 512, 256),
    "int4 of few inputs": lambda: int4(16, 96, 32),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_that_of_the_dense_weight(kind, has_bias):
    case = CASES[kind]()
    num_out, num_in = case.dense.shape
    rows, bias = random(5, num_in).bfloat16(), random(num_out).bfloat16() if has_bias else None
    arrivals = no_arrivals(case.stored)
    expected = rows.float() @ case.dense.T + (0 if bias is None else bias.float())
    for _ in range(2):  # the second one finds the counts as the first one did
        found = skinny_product(rows, case.stored, bias, arrivals)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, atol=ROUNDING, rtol=ROUNDING)
    assert not arrivals.any()


@pytest.mark.parametrize("kind", ["fp8 by output", "fp8 in blocks of 128"])
def test_rows_in_fp8_have_scales_of_their_own(kind):
    case = CASES[kind]()
    rows = layer_ops.scaled_rows(random(7, case.dense.shape[1]).bfloat16())
    found = skinny_product(rows, case.stored, None, no_arrivals(case.stored))
    expected = rows.dequantize() @ case.dense.T
    torch.testing.assert_close(found.float(), expected, atol=ROUNDING, rtol=ROUNDING)


def product_by_rows(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Multiply one row after another."""
    return np.stack([row @ right.astype(dtype) for row in left.astype(dtype)])


@pytest.fixture
def ordered_dots(monkeypatch):
    """Sum the dot products of Triton's interpreter in one order, which a GPU does.

    numpy's BLAS sums in an order that depends on the number of rows on some processors (Intel's Xeons with AMX).
    """
    monkeypatch.setattr(np, "matmul", product_by_rows)


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("kind", CASES)
def test_a_row_has_the_same_bits_among_1_to_64_rows(kind):
    case = CASES[kind]()
    rows = random(SKINNY_ROWS, case.dense.shape[1]).bfloat16()
    arrivals = no_arrivals(case.stored)
    together = skinny_product(rows, case.stored, None, arrivals)
    expected = rows.float() @ case.dense.T
    torch.testing.assert_close(together.float(), expected, atol=ROUNDING, rtol=ROUNDING)
    for num_rows in (1, 2, 15, 16, 17, 31, 33, 48, 63):
        found = skinny_product(rows[:num_rows], case.stored, None, arrivals)
        assert torch.equal(found, together[:num_rows])


@pytest.mark.parametrize("kind", ["bf16", "fp8 in blocks of 128", "int4 in groups of 32"])
@pytest.mark.slow
def test_every_number_of_rows_has_the_numbers_of_the_oracle(kind):
    case = CASES[kind]()
    arrivals = no_arrivals(case.stored)
    rows = random(SKINNY_ROWS, case.dense.shape[1]).bfloat16()
    for num_rows in range(1, SKINNY_ROWS + 1):
        found = skinny_product(rows[-num_rows:], case.stored, None, arrivals)
        expected = rows[-num_rows:].float() @ case.dense.T
        torch.testing.assert_close(found.float(), expected, atol=ROUNDING, rtol=ROUNDING)


def test_numbers_of_fp8_are_taken_apart_by_their_bits():
    """As on GPUs that do not know them: all 254 numbers, those under the normal ones too."""
    octets = torch.arange(256, device=DEVICE).to(torch.uint8)
    values = octets[(octets & 127) != 127].view(torch.float8_e4m3fn)
    weight = torch.zeros(256, 32, device=DEVICE).to(torch.float8_e4m3fn)
    weight[: len(values), 0] = values
    stored = StoredWeight("fp8", weight.view(torch.uint8), torch.ones(1, 1), (256, 32), 256, 32)
    rows = torch.zeros(1, 32, device=DEVICE).bfloat16()
    rows[0, 0] = 1.0
    found = skinny_product(rows, stored, None, no_arrivals(stored))
    assert torch.equal(found[0, : len(values)].float(), values.float())


@pytest.mark.parametrize("kind", CASES)
def test_the_parts_of_a_weight_are_all_of_its_inputs(kind):
    stored = CASES[kind]().stored
    cut = ProductCut.of(stored)
    assert (cut.parts - 1) * cut.steps * cut.inputs < stored.num_inputs
    assert cut.parts * cut.steps * cut.inputs >= stored.num_inputs


def test_published_layers_have_parts_for_all_multiprocessors():
    """q, k, v and down of an 8B: few outputs, so that one program for each tile would leave most of them idle."""
    for num_out, num_in in ((6144, 4096), (4096, 12288)):
        weight = torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn, device="meta")
        stored = StoredWeight("fp8", weight, None, (1, num_in), num_out, num_in)
        cut = ProductCut.of(stored)
        assert cut.parts * cut.num_tiles(num_out) >= 250
