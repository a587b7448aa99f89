"""Multiply up to SKINNY_ROWS rows by a weight in its stored form, in one launch.

    weight = StoredWeight.fp8(values, scale, (128, 128))        # or in bf16, or in words of 4 bits
    out = skinny_product(rows, weight, bias, no_arrivals(weight))       # rows @ weight.T + bias

Such a product is bound by reading the weight. A program reads BLOCK_O outputs of it over one part
of the inputs, converts them to bf16 in registers, and multiplies all rows by them:

    inputs     |-- part 0 --|-- part 1 --|-- part 2 --|
    outputs    a program for each part of each tile; the last one to arrive adds the parts in their order

Parts and tiles depend on the shape of the weight and on its form alone (`ProductCut.of`), so a
row's bits do not depend on how many rows there are. kernels/flash_decoding.py explains how the last
program knows that all parts are written, and why its reads come after these writes.

An FP8 scale for all inputs of an output is applied once, at the end; a block's scale after the
block's sum. GPUs older than FP8_CAPABILITY decode FP8 by its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from eagle_ray.kernels.availability import is_interpreting, launch
from eagle_ray.kernels.fp8 import ScaledRows, readable
from eagle_ray.kernels.jit_functions import fp8_from_bytes
from eagle_ray.kernels.stored_weight import SKINNY_ROWS, ProductCut, StoredWeight

ROW_TILES = (16, 32, 64)  # rows of a product, rounded up


def skinny_product(
    rows: Float[Tensor, "R I"] | ScaledRows,
    weight: StoredWeight,
    bias: Float[Tensor, " O"] | None,
    arrivals: Int32[Tensor, " tiles"],
) -> Float[Tensor, "R O"]:
    """Return rows @ weight.T + bias in the rows' dtype.

    Args:
        rows: up to SKINNY_ROWS input rows, each contiguous.
        arrivals: counters from `no_arrivals`, which are zero before and after.
    """
    values, row_scales = (rows.values, rows.scale) if isinstance(rows, ScaledRows) else (rows, None)
    num_rows = len(rows)
    assert num_rows <= SKINNY_ROWS, "more rows have products of their own"
    cut = ProductCut.of(weight)
    num_tiles = cut.num_tiles(weight.num_outputs)
    row_tile = next(size for size in ROW_TILES if size >= num_rows)
    out = torch.empty(num_rows, weight.num_outputs, dtype=rows.dtype, device=values.device)
    parts = torch.empty(
        num_tiles * cut.parts if cut.parts > 1 else 0,
        cut.outputs,
        row_tile,
        dtype=torch.float32,
        device=values.device,
    )
    scales = weight.scales
    if scales is not None and weight.form == "int4":
        scales = scales.view(torch.int32)
    launch(_skinny_product, (num_tiles, cut.parts))(
        readable(values),
        row_scales,
        readable(weight.numbers),
        scales,
        bias,
        parts,
        arrivals,
        out,
        num_rows,
        values.stride(0),
        0 if scales is None else scales.stride(0),
        FORM=weight.form,
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        SCALED_OUTPUTS=weight.block[0],
        SCALED_INPUTS=weight.block[1],
        STEPS=cut.steps,
        PARTS=cut.parts,
        BLOCK_R=row_tile,
        BLOCK_O=cut.outputs,
        BLOCK_I=cut.inputs,
        WIDE=is_interpreting(),
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_product(
    rows,
    row_scales,  # None if rows are not in FP8
    weight,
    scales,
    bias,  # None without one
    parts,  # [tiles, PARTS, BLOCK_O, BLOCK_R]
    arrivals,  # [tiles]
    out,
    num_rows,
    rows_row,
    scales_row,
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALED_OUTPUTS: tl.constexpr,
    SCALED_INPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply all rows by a tile of outputs over one part of the inputs."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    outputs = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_R)
    rows_at = rows + row.to(tl.int64)[:, None] * rows_row
    # Both sides in FP8 are exact in fp16, which takes fewer conversions.
    dtype: tl.constexpr = out.dtype.element_ty if row_scales is None else tl.float16
    HAS_BLOCKS: tl.constexpr = FORM == "fp8" and SCALED_INPUTS < INPUTS
    IS_WHOLE: tl.constexpr = INPUTS % (BLOCK_I * STEPS) == 0

    total = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
    for step in range(STEPS):
        begin = (part * STEPS + step) * BLOCK_I
        inputs = begin + tl.arange(0, BLOCK_I)
        known = (row < num_rows)[:, None]
        if not IS_WHOLE:
            known = known & (inputs < INPUTS)[None, :]
        numbers = tl.load(rows_at + inputs[None, :], mask=known, other=0.0)
        numbers = _as_dtype(numbers, dtype, WIDE)

        if FORM == "int4":
            own = _int4(
                weight, scales, tile, begin, scales_row,
                OUTPUTS, INPUTS, SCALED_INPUTS, BLOCK_O, BLOCK_I, dtype, WIDE,
            )  # fmt: skip
        else:
            own = _as_dtype(
                _stored(weight, outputs, inputs, OUTPUTS, INPUTS, IS_WHOLE), dtype, WIDE
            )

        if HAS_BLOCKS:
            scale_at = scales + outputs // SCALED_OUTPUTS * scales_row + begin // SCALED_INPUTS
            scale = tl.load(scale_at, mask=(outputs < OUTPUTS) & (begin < INPUTS), other=0.0)
            total += tl.dot(own, tl.trans(numbers), input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(own, tl.trans(numbers), total, input_precision="ieee")

    is_last = True
    if PARTS > 1:
        number = tl.arange(0, BLOCK_O)[:, None] * BLOCK_R + row[None, :]
        parts += tile.to(tl.int64) * (PARTS * BLOCK_O * BLOCK_R)
        tl.store(parts + part * (BLOCK_O * BLOCK_R) + number, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        is_last = arrived == PARTS - 1
        if is_last:
            tl.store(arrivals + tile, 0)
            total = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
            for each in range(PARTS):
                part_at = parts + each * (BLOCK_O * BLOCK_R) + number
                total += tl.load(part_at, cache_modifier=".cg")

    if is_last:
        if FORM == "fp8" and not HAS_BLOCKS:
            scale_at = scales + outputs // SCALED_OUTPUTS * scales_row
            total *= tl.load(scale_at, mask=outputs < OUTPUTS, other=0.0)[:, None]
        if row_scales is not None:
            total *= tl.load(row_scales + row, mask=row < num_rows, other=0.0)[None, :]
        if bias is not None:
            own_bias = tl.load(bias + outputs, mask=outputs < OUTPUTS, other=0.0)
            total += own_bias.to(tl.float32)[:, None]
        out_at = out + row.to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
        real = (row < num_rows)[None, :] & (outputs < OUTPUTS)[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _as_dtype(numbers, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Return numbers as they are multiplied: in fp32 if WIDE, since Triton's interpreter cannot multiply bf16.

    4 bits are rounded to the rows' dtype first, as a restored weight is.
    """
    if numbers.dtype == tl.uint8:
        numbers = fp8_from_bytes(numbers)
    if WIDE:
        wide = numbers.to(tl.float32)
        rounded = wide if numbers.dtype.is_fp8() else wide.to(dtype).to(tl.float32)
    else:
        rounded = numbers.to(dtype)
    return rounded


@triton.jit
def _stored(
    weight,
    outputs,
    inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Load a tile of a weight that has a number for each element."""
    weight_at = weight + outputs.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    real = (outputs < OUTPUTS)[:, None]
    if not IS_WHOLE:
        real = real & (inputs < INPUTS)[None, :]
    return tl.load(weight_at, mask=real, other=0.0)


@triton.jit
def _int4(
    packed,
    scales,
    tile,
    begin,
    scales_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    dtype: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Dequantise a run of inputs of a tile of outputs, from where models/gpu_linears.tile_packed puts their codes."""
    # An output has four lanes in a run, which lie one after the other.
    WORDS: tl.constexpr = BLOCK_I // 32
    outputs = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    real = ((outputs < OUTPUTS) & (begin < INPUTS))[:, None]
    run = outputs // 8 * (INPUTS // BLOCK_I) + begin // BLOCK_I
    first = (run.to(tl.int64) * 32 + outputs % 8 * 4) * WORDS
    word = tl.arange(0, 4 * WORDS)
    words = tl.load(packed + first[:, None] + word[None, :], mask=real, other=0)

    # A word holds inputs of one group, whose scale and zero are the halves of one number.
    if GROUP < BLOCK_I:
        group = (begin + word % WORDS * 32) // GROUP
        pair = tl.load(scales + group[None, :] * scales_row + outputs[:, None], mask=real, other=0)
    else:
        pair_at = scales + begin // GROUP * scales_row + outputs
        pair = tl.load(pair_at[:, None], mask=real, other=0)
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero = (pair & -65536).to(tl.float32, bitcast=True)

    codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    numbers = (codes - 8).to(tl.float32) * scale[:, :, None] + zero[:, :, None]

    # Output, pair, word, odd, quarter; inputs are in the order word, quarter, pair, odd.
    lanes = tl.reshape(_as_dtype(numbers, dtype, WIDE), (BLOCK_O, 4, WORDS, 2, 4))
    return tl.reshape(tl.permute(lanes, (0, 2, 4, 1, 3)), (BLOCK_O, BLOCK_I))
