"""DeviceToHost: tensors on their way to the host, so that it can do something else until it needs them.

    copy = DeviceToHost(record)
    ...                              # what needs no result: the device is still at work
    (rows,) = copy.read()

What is read is what they held when they were sent. On a GPU they go to pinned memory behind the work that makes them,
and `read` waits for that alone, not for what was launched since. Does not know what the numbers mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DeviceToHost:
    """tensors: of one device."""

    def __init__(self, *tensors: Tensor):
        self._arrived: torch.cuda.Event | None = None
        self._tensors = tuple(_sent(tensor) for tensor in tensors)
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Any]:
        """Their numbers as nested lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


def _sent(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
