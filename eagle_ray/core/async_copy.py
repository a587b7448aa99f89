"""Copies between the host and a device that make neither wait.

    slots, lengths = to_device([[3, 0], [17, 24]], device)      # one copy for all of them
    copy = DeviceToHost(record)
    ...                                                         # work that needs no result
    (rows,) = copy.read()

On a GPU both go through pinned memory. `read` returns what the tensors held when the copy was made, and waits for that
work only, not for what was launched since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def to_device(numbers: Numbers, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the numbers as a tensor of the same shape on the device."""
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor's copy on the device; on a CPU the tensor itself. It is contiguous, as kernels read rows."""
    tensor = tensor.contiguous()
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceToHost:
    """A copy of tensors to the host, under way until `read`. All tensors must be on one device."""

    def __init__(self, *tensors: Tensor):
        self._event: torch.cuda.Event | None = None
        self._tensors = tuple(_start_copy(tensor) for tensor in tensors)
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """Return the numbers as nested lists, one for each tensor."""
        return [array.tolist() for array in self.arrays()]

    def arrays(self) -> list[np.ndarray]:
        """Return the numbers as arrays, one for each tensor."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _start_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
