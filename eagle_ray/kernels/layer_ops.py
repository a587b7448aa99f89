"""The small operations of a decoder layer where Triton may run: fused_layer.py, or torch_ops.py where it does not.

Asked at each call, since kernels that fail are turned off while an engine runs.
"""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.kernels import torch_ops
from eagle_ray.kernels.availability import use_triton


def add_rms_norm(
    residual: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, weight: Float[Tensor, " H"], eps: float
) -> Float[Tensor, "R H"]:
    """Add delta to residual in place and return the RMSNorm of the sum."""
    return _ops(residual.device).add_rms_norm(residual, delta, weight, eps)


def silu_mul(gate_up: Float[Tensor, "R 2I"]) -> Float[Tensor, "R I"]:
    """Return SiLU(gate) * up, where each row holds gate and then up."""
    return _ops(gate_up.device).silu_mul(gate_up)


def _ops(device: torch.device) -> ModuleType:
    if not use_triton(device):
        return torch_ops
    from eagle_ray.kernels import fused_layer

    return fused_layer
