"""The small operations of a decoder layer: one launch each by fused_layer.py where Triton runs, elsewhere by torch.

kernels/cpu_ops.py computes these in C++ on a CPU. Whether Triton runs is asked at each call, since kernels that fail
are turned off while an engine runs.

add_rms_norm and silu_mul have a second form, which returns FP8 rows with a scale each for a projection that reads
those. The rounding is part of the launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import FP8_MAX, ScaledRows, to_fp8


def add_rms_norm(
    residual: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, weight: Float[Tensor, " H"], eps: float
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum."""
    if use_triton(residual.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.add_rms_norm(residual, delta, weight, eps)
    if delta is not None:
        residual += delta
    return F.rms_norm(residual, weight.shape, weight, eps)


def add_rms_norm_fp8(
    residual: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, weight: Float[Tensor, " H"], eps: float
) -> ScaledRows:
    """Do what add_rms_norm does, and return the norm in FP8."""
    if use_triton(residual.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.add_rms_norm_fp8(residual, delta, weight, eps)
    return scaled_rows(add_rms_norm(residual, delta, weight, eps))


def silu_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return SiLU(gate) * up, where each row holds gate and then up."""
    if use_triton(gate_up.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_mul_fp8(gate_up: Float[Tensor, "R 2I"]) -> ScaledRows:
    """Do what silu_mul does, and return the product in FP8."""
    if use_triton(gate_up.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.silu_mul_fp8(gate_up)
    return scaled_rows(silu_mul(gate_up))


def scaled_rows(rows: Float[Tensor, "R I"]) -> ScaledRows:
    """Return the rows in FP8."""
    if use_triton(rows.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.scaled_rows(rows)
    largest = rows.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return ScaledRows(to_fp8(rows.float() / scale), scale, rows.dtype)


def rotated(
    x: Float[Tensor, "R heads d"], cosine: Float[Tensor, "R half"], sine: Float[Tensor, "R half"]
) -> Float[Tensor, "R heads d"]:
    """Rotate pairs (i, i + d/2) of each head by the row's angles, in fp32."""
    a, b = x.float().chunk(2, -1)
    c, s = cosine[:, None], sine[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)
