"""Settings of the process for inference: heap, huge pages and threads of a CPU, its name, and torch's choices on a GPU.

A pass over many long contexts makes tensors of tens of megabytes. By default glibc returns such
memory to the system as soon as it is free, and the next layer gets it zeroed page by page: a pass
over 64 sequences of 440 tokens took 494 ms instead of 181 with the 230M pair of
`jobs/bench/widening.py` on two cores (measured 2026-11-22).

A second thread gains little for a small model on an idle machine and loses a multiple on a busy
one, where every operation waits for the thread that is not running.

    tune_malloc()           # keep freed memory in the process
    use_huge_pages()        # back weights with huge pages
    tune_num_threads(...)   # as many threads as gain something
    release_memory()        # return what a dropped engine took
    cpu_name()              # 'AMD EPYC 9R14': part of the key of measured costs
    pin_cuda_numerics(...)  # sums that do not depend on the batch
"""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from eagle_ray.kernels import cpu_ops

# Constants of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Constants of linux/mman.h.
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE = 2 << 20  # bytes
MIN_REGION = 16 << 20  # bytes: weights and caches, and not the stacks of threads
MAX_HEAP_BLOCK = 1 << 30  # bytes; what is larger still comes from the system and goes back to it


@cache
def tune_malloc() -> bool:
    """Set malloc's thresholds for this process. Return whether that is possible: only with glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        [
            mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK),
            mallopt(M_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK - 1),
        ]
    )


def release_memory() -> None:
    """Collect dropped objects that refer to each other, and return free memory to the system (with glibc)."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def use_huge_pages() -> int:
    """Move the large private memory of this process into huge pages now, and return for how many
    bytes that was requested.

    A pass reads every weight once, and with pages of 4 KiB much of that time goes into finding
    them: with 230M packed parameters in fp32, linear layers of one row took 21 to 28 ms instead of
    29 to 36 (two cores of an AMD EPYC, 2026-11-25, four pairs of runs by turns). Call it once the
    weights are in their final memory; it takes about 2 s per GB. Returns 0 if the system has no
    huge pages.
    """
    if not HUGE_PAGES.is_file() or "[never]" in HUGE_PAGES.read_text():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = 0
    for begin, end in _large_regions():
        madvise(begin, end - begin, MADV_HUGEPAGE)
        madvise(begin, end - begin, MADV_COLLAPSE)  # kernels before 6.1 refuse, and do it by and by
        num_bytes += end - begin
    return num_bytes


def _large_regions() -> list[tuple[int, int]]:
    """Return the addresses of private memory, in whole huge pages, of MIN_REGION bytes or more."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin = -(-begin // HUGE_PAGE) * HUGE_PAGE
        end = end // HUGE_PAGE * HUGE_PAGE
        is_heap = inode == "0" and name in ([], ["[heap]"])
        if access == "rw-p" and is_heap and end - begin >= MIN_REGION:
            regions.append((begin, end))
    return regions


MIN_SPEEDUP = 1.2  # times faster that twice the threads must be, where they are OpenMP's
# Threads of the team (kernels/team.h) yield to other processes, so more of them stay unless fewer are
# faster: what another process takes while the choice is made would otherwise count for the whole run.
MIN_TEAM_SPEEDUP = 0.95
RUN_REPLAYS = 7
LONG_RUN_S = 0.05  # runs this long are timed once: their difference is no accident
Result = TypeVar("Result")


def tune_num_threads(run: Callable[[], object], min_speedup: float = MIN_SPEEDUP) -> int:
    """Halve torch's number of threads as long as twice as many gain little. Return the number that is set.

    Args:
        run: runs a typical pass, such as one over as many tokens as there are slots.
        min_speedup: factor by which twice the threads must be faster.
    """
    threads = torch.get_num_threads()
    while threads > 1:
        seconds = _seconds(run, (threads, threads // 2))
        if seconds[threads // 2] > min_speedup * seconds[threads]:
            break
        threads //= 2
    torch.set_num_threads(threads)
    return threads


def run_in_temporary_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread of its own and return its result or raise its error. For work before
    the engine's thread starts.

    OpenMP keeps helper threads for every thread that ever computed in parallel. If they outnumber
    the cores, GNU's library puts the computing thread's helpers to sleep after each operation, and
    passes take 1.4 times as long (107M parameters, 16 rows, 2 threads on 2 cores). A thread's
    helpers end with it.
    """
    with ThreadPoolExecutor(1, "eagle-ray-start") as passing:
        return passing.submit(work).result()


@torch.inference_mode()
def _seconds(run: Callable[[], object], numbers: tuple[int, int]) -> dict[int, float]:
    """Return the best of a few runs with each number of threads, in turn; the first turn is a warm-up."""
    best = dict.fromkeys(numbers, torch.inf)
    for replay in range(1 + RUN_REPLAYS):
        for number in numbers:
            torch.set_num_threads(number)
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
            best[number] = min(best[number], seconds) if replay else torch.inf
        if replay and max(best.values()) > LONG_RUN_S:
            break
    return best


INFO = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """Return the processor's name from the system. Python's own function returns an empty name on Linux."""
    lines = INFO.read_text().splitlines() if INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def quantized_instructions() -> str:
    """Return the name of the instructions by which this processor multiplies quantised weights."""
    return cpu_ops.INSTRUCTIONS[cpu_ops.quantized_path()]


def pin_cuda_numerics(device: torch.device) -> None:
    """Choose flash or memory-efficient attention, and fp32 sums in 16-bit products. A CPU has no such settings.

    cuDNN's scaled-dot-product attention builds a plan for every prompt length, 23 to 37 ms each;
    flash and memory-efficient attention build none. Reduced-precision reductions of bf16 and fp16
    products would make a row's sum depend on how the product was split, and so on the batch.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
