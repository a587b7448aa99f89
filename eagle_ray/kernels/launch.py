"""Launch a kernel on the device of its arguments.

    launch(kernel, (rows, parts))(logits, out, BLOCK=2048)      # kernel[(rows, parts)](logits, out, BLOCK=2048)

Triton launches on CUDA's current device, whatever device the arguments are on. So on a GPU other than the first, or
with a target on several GPUs, a kernel could run on one device with another's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Launch on the device of the first tensor argument. On a CPU, where Triton interprets, nothing changes."""

    def launched(*args: Any, **constants: Any) -> None:
        device = next(arg.get_device() for arg in args if isinstance(arg, Tensor))
        if device < 0 or device == torch.cuda.current_device():
            kernel[grid](*args, **constants)
            return
        with torch.cuda.device(device):
            kernel[grid](*args, **constants)

    return launched
