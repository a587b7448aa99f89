"""What a benchmark asks of the device it runs on, on a CPU and on a GPU alike: clocks, memory, its name."""

from __future__ import annotations

import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable

import torch

GIB = 2**30


def synchronize(device: torch.device) -> None:
    """Until everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call on the device's own clock, after one call that is not counted."""
    function()
    times = [_once(function, device) for _ in range(repeats)]
    return statistics.median(times)


def _once(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def release(device: torch.device) -> None:
    """Free memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """None where nothing is promised: a CPU's memory is not ours alone."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def peak_gib(device: torch.device) -> float:
    """Most memory so far: the device's, or the process's own on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
