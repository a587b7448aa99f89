"""The embedded pair at its own size."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn

import eagle_ray
from eagle_ray.models.head_checkpoint import load_head
from eagle_ray.models.loader import load_target

ASSETS = Path(eagle_ray.__file__).parent / "assets" / "tiny"


@cache
def embedded_pair(dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Target and head, loaded once."""
    model = load_target(ASSETS / "target", dtype, str(device))
    return model, load_head(ASSETS / "draft", model.config).to(device, dtype).eval()
