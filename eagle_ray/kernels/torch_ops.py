"""Run the small operations of a decoder layer with torch: what kernels/cpu_ops.py computes, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def add_rms_norm(
    residual: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, weight: Float[Tensor, " H"], eps: float
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum."""
    if delta is not None:
        residual += delta
    return F.rms_norm(residual, weight.shape, weight, eps)


def silu_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return SiLU(gate) * up, where each row holds gate and then up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotated(
    x: Float[Tensor, "R heads d"], cosine: Float[Tensor, "R half"], sine: Float[Tensor, "R half"]
) -> Float[Tensor, "R heads d"]:
    """Rotate pairs (i, i + d/2) of each head by the row's angles, in fp32."""
    a, b = x.float().chunk(2, -1)
    c, s = cosine[:, None], sine[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)
