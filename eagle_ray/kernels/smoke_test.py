"""The smallest kernel: it fails if Triton is installed but cannot work, for example without a C compiler."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle_ray.kernels.launch import launch


@triton.jit
def _double(numbers, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) * 2)


def failure_reason(device: torch.device) -> str | None:
    """Compile and run the kernel; return the error, or None."""
    numbers = torch.ones(16, device=device)
    try:
        launch(_double, (1,))(numbers, SIZE=16)
    except Exception as error:  # whatever Triton, its compilers or the driver raise
        text = str(error).strip() or type(error).__name__
        return f"Triton {triton.__version__} fails here: {text.splitlines()[-1]}"
    return None if numbers.sum().item() == 32 else f"Triton {triton.__version__} computes wrong numbers here"
