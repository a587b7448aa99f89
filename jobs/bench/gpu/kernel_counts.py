"""Kernels that a call launches, counted and timed by torch.profiler; on a CPU aten operations are counted instead.

counts = count_kernels(lambda: engine.step(), device)
counts.num, counts.seconds, counts.top(5)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jobs.bench.gpu.device import synchronize

COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """Calls and microseconds by name.

    Attributes:
        unit: what is counted: kernels, or aten operations on a CPU, nested ones included.
        num_copies: copies and fills of memory, which are no kernels; 0 on a CPU.
    """

    unit: str
    calls: Counter[str]
    microseconds: Counter[str]
    num_copies: int

    @property
    def num(self) -> int:
        return self.calls.total()

    @property
    def seconds(self) -> float:
        return sum(self.microseconds.values()) / 1e6

    def top(self, count: int) -> list[tuple[str, int, float]]:
        """Return name, calls and microseconds of what takes the most time."""
        return [
            (name[:80], self.calls[name], round(us, 1))
            for name, us in self.microseconds.most_common(count)
        ]


def count_kernels(function: Callable[[], object], device: torch.device) -> KernelCounts:
    """Run the function once under the profiler. Run it before, so that nothing is compiled here."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    synchronize(device)
    with profile(activities=activities) as profiler:
        function()
        synchronize(device)
    calls, microseconds, num_copies = Counter(), Counter(), 0
    for event in profiler.events():
        if on_cuda:
            if event.device_type != DeviceType.CUDA:
                continue
            if event.name.startswith(COPIES):
                num_copies += 1
                continue
            calls[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us()
        elif event.name.startswith("aten::"):
            calls[event.name] += 1
            microseconds[event.name] += event.self_cpu_time_total
    return KernelCounts(
        "kernels" if on_cuda else "aten operations (on a CPU)", calls, microseconds, num_copies
    )
