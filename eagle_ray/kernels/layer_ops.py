"""The small operations of a decoder layer: one launch each by fused_layer.py where Triton runs, elsewhere by torch.

kernels/cpu_ops.py computes them in C++ on a CPU. Each call checks whether Triton runs, since
kernels that fail are turned off while an engine runs.

add_rms_norm and silu_mul have a second form for projections with FP8 inputs: it returns FP8 rows
with a scale each, rounded in the same launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import FP8_MAX, ScaledRows, to_fp8


def add_rms_norm(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    eps: float,
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum."""
    if use_triton(residual.device):
        from eagle_ray.kernels import fused_layer

        return fused_layer.add_rms_norm(residual, delta, weight, eps)
    if delta is not None:
        residual += delta
    return rms_norm(residual, weight, eps)


def rms_norm(
    rows: Float[Tensor, "*rows W"], weight: Float[Tensor, " W"], eps: float
) -> Float[Tensor, "*rows W"]:
    """Compute RMSNorm by torch. With a weight in fp32, the product is computed before the result is
    rounded to the rows' dtype."""
    if weight.dtype is rows.dtype:
        return F.rms_norm(rows, weight.shape, weight, eps)
    return F.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)


def add_rms_norm_fp8(
    residual: Float[Tensor, "R H"],
    delta: Float[Tensor, "R H"] | None,
    weight: Float[Tensor, " H"],
    eps: float,
) -> ScaledRows:
    """Compute add_rms_norm and return the norm in FP8."""
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


def gelu_tanh_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return GELU(gate) * up with tanh's approximation, where each row holds gate and then up."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def silu_mul_fp8(gate_up: Float[Tensor, "R 2I"]) -> ScaledRows:
    """Compute silu_mul and return the product in FP8."""
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
    c = cosine[:, None]
    s = sine[:, None]
    first = a * c - b * s
    second = b * c + a * s
    return torch.cat([first, second], -1).to(x.dtype)
