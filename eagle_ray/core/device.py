"""Copies between host and device that make neither wait, and timers for the parts of a step.

    slots, lengths = to_device([[3, 0], [17, 24]], device)      # one copy for all of them
    copy = DeviceToHost(record)
    ...                                                         # work that needs no result
    (rows,) = copy.read()

On a GPU both go through pinned memory. `read` returns what the tensors held when the copy was made,
and waits for that work only, not for what was launched since.

StepTimer tells the seconds of the parts of one step, on the device that ran them. On a CPU the
host's clock is used. On a GPU events are recorded up to the step's copy to the host and read once
that has arrived, so that nothing waits for them. A step that is launched ahead begins when the
previous step's copy was started; what the host does about that step meanwhile does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def to_device(
    numbers: Numbers, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return nested lists of numbers as a tensor on the device."""
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to the device, contiguous as kernels need it; on a CPU return the tensor itself."""
    tensor = tensor.contiguous()
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceToHost:
    """An asynchronous copy of tensors to the host, which `read` waits for. All tensors must be on one device."""

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
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of a step.

    Attributes:
        draft: seconds for reading pending pairs and drafting.
        verify: seconds of the target's pass.
        overhead: seconds of everything else.
    """

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


class StepTimer:
    """Times the parts of a step by marks, in this order: start, drafted, allocated, verified, sent.

    Args:
        behind: timer of the previous step.
    """

    def __init__(self, device: torch.device | str, behind: StepTimer | None = None):
        self._on_cuda = torch.device(device).type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()
        self._begin = self._marks[0] if behind is None else behind._marks[-1]

    def mark(self) -> None:
        self._host = time.perf_counter()
        if not self._on_cuda:
            self._marks.append(self._host)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds that the host spent on other work since the last mark."""
        self._host += seconds

    def arrived(self) -> None:
        """Record that the step's copy has arrived on the host."""
        if self._on_cuda:
            self._host = time.perf_counter()

    def read(self, followed: bool = False) -> StepTimes:
        """Return the seconds, after the last mark and `arrived`.

        Args:
            followed: whether another step was launched after this one.
        """
        start, drafted, allocated = self._marks[:3]
        # A verify pass that was run again has left more marks between them.
        verified, sent = self._marks[-2:]
        draft = self._between(start, drafted)
        verify = self._between(allocated, verified)
        total = self._between(self._begin, sent)
        if not followed:
            total += time.perf_counter() - self._host
        return StepTimes(draft, verify, total - draft - verify)

    def _between(self, a: Any, b: Any) -> float:
        """Return the seconds between two marks: host times, or CUDA events."""
        if not self._on_cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1000
