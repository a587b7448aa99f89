"""The C library's heap: what a pass frees is kept for the next one, and weights lie in huge pages.

A pass over many long contexts makes tensors of tens of megabytes. glibc hands such memory back to the system as soon as
it is free, and the next layer has it cleared page by page: 64 sequences behind 440 tokens took 494 ms instead of 181
with the 230M pair of `jobs/bench/engine.py` on two cores (measured 2026-11-22).

    tune_malloc()
    use_huge_pages()
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of linux/mman.h
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE = 2 << 20  # bytes
MIN_REGION = 16 << 20  # bytes: weights and caches, and not the stacks of threads
MAX_HEAP_BLOCK = 1 << 30  # bytes; what is larger still comes from the system and goes back to it


@cache
def tune_malloc() -> bool:
    """For this process and for good. Returns whether it could be done: there is nothing to do but on glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK), mallopt(M_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK - 1)])


def use_huge_pages() -> int:
    """Move the large private memory of this process into huge pages now, and return how many bytes were asked for.

    A pass reads every weight once, and with pages of 4 KiB much of that time goes into finding them: with 230M packed
    parameters in fp32, linear layers of one row took 21 to 28 ms instead of 29 to 36 (two cores of an AMD EPYC,
    2026-11-25, four pairs of runs by turns). Call it once the weights are where they stay; it takes about 2 s a GB.
    Returns 0 where the system has no huge pages to give.
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
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        is_heap = inode == "0" and name in ([], ["[heap]"])
        if access == "rw-p" and is_heap and end - begin >= MIN_REGION:
            regions.append((begin, end))
    return regions
