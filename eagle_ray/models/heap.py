"""The C library's heap: what a pass frees is kept for the next one.

A pass over many long contexts makes tensors of tens of megabytes. glibc hands such memory back to the system as soon as
it is free, and the next layer has it cleared page by page: 64 sequences behind 440 tokens took 494 ms instead of 181
with the 230M pair of `jobs/bench_engine.py` on two cores (measured 2026-11-22).

    keep_freed_memory()
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST = 1 << 30  # bytes; what is larger still comes from the system and goes back to it


@cache
def keep_freed_memory() -> bool:
    """For this process and for good. Returns whether it could be done: there is nothing to do but on glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_THRESHOLD, LARGEST), mallopt(M_TRIM_THRESHOLD, 2 * LARGEST - 1)])
