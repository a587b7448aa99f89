"""CPU threads: how many a model is worth, and how no others are left standing beside them.

A second thread on a small model gains little on an idle machine and loses a multiple on a busy one, where every
operation waits for the thread that is not running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MIN_SPEEDUP = 1.2  # times faster that twice the threads must be
REPLAYS = 7
LONG_S = 0.05  # runs this long are timed once: their difference is no accident
Result = TypeVar("Result")


def tune_num_threads(run: Callable[[], object]) -> int:
    """Set torch's number of threads, at most the present one, and return it.

    run: takes the time of a pass, such as one over as many tokens as there are slots.
    """
    threads = torch.get_num_threads()
    while threads > 1:
        seconds = _seconds(run, (threads, threads // 2))
        if seconds[threads // 2] > MIN_SPEEDUP * seconds[threads]:
            break
        threads //= 2
    torch.set_num_threads(threads)
    return threads


def run_in_temporary_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done in a thread that is over then. For what comes before an engine's own thread.

    OpenMP keeps helpers for every thread that ever computed in parallel. Once they are more than the cores, the GNU
    library puts those of the thread that computes now to sleep after each operation, and passes take 1.4 times as long
    (107M parameters, 16 rows, 2 threads on 2 cores). A thread takes its helpers with it when it ends.
    """
    with ThreadPoolExecutor(1, "eagle-ray-start") as passing:
        return passing.submit(work).result()


@torch.inference_mode()
def _seconds(run: Callable[[], object], numbers: tuple[int, int]) -> dict[int, float]:
    """The quickest of a few runs with each number of threads, by turns; the first turn is for what is made once."""
    best = dict.fromkeys(numbers, torch.inf)
    for replay in range(1 + REPLAYS):
        for number in numbers:
            torch.set_num_threads(number)
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
            best[number] = min(best[number], seconds) if replay else torch.inf
        if replay and max(best.values()) > LONG_S:
            break
    return best
