"""Restore FP8 weights to 16 bits in one launch, for products of many rows.

weight = restored_fp8(values, scale, (128, 128), torch.bfloat16)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.fp8 import FP8
from eagle_ray.kernels.jit_functions import fp8_from_bytes

SLICE = 1024  # inputs of an output that one program restores


def restored_fp8(
    values: Float[Tensor, "O I"],
    scales: Float[Tensor, "BO BI"],
    block: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "O I"]:
    """Return values times the scales of their blocks, in 16 bits.

    Args:
        block: outputs and inputs that share a scale.
    """
    assert values.dtype == FP8, "other numbers have other launches"
    num_outputs, num_inputs = values.shape
    out = torch.empty(num_outputs, num_inputs, dtype=dtype, device=values.device)
    launch(_restored_fp8, (num_outputs, triton.cdiv(num_inputs, SLICE)))(
        values.view(torch.uint8),  # which every GPU reads
        scales,
        out,
        scales.stride(0),
        num_inputs,
        SCALED_OUTPUTS=block[0],
        SCALED_INPUTS=block[1],
        BLOCK=SLICE,
    )
    return out


@triton.jit
def _restored_fp8(
    values,
    scales,
    out,
    scales_row,
    num_inputs,
    SCALED_OUTPUTS: tl.constexpr,
    SCALED_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Restore a slice of the inputs of one output."""
    output = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = inputs < num_inputs
    octets = tl.load(values + output * num_inputs + inputs, mask=real, other=0)
    scale_at = scales + output // SCALED_OUTPUTS * scales_row + inputs // SCALED_INPUTS
    scale = tl.load(scale_at, mask=real, other=0.0)
    numbers = fp8_from_bytes(octets) * scale
    tl.store(out + output * num_inputs + inputs, numbers.to(out.dtype.element_ty), mask=real)
