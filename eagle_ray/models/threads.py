"""CPU threads: how many a model is worth, and how no others are left standing beside them.

A second thread on a small model gains little on an idle machine and loses a multiple on a busy one, where every
operation waits for the thread that is not running. Does not know what else runs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

WORTH = 1.25  # times faster that twice the threads must be
REPLAYS = 5
LONG_S = 0.2  # a pass this long is not replayed: its time is no accident
Result = TypeVar("Result")


def settle_threads(model: nn.Module, num_rows: int) -> int:
    """Sets torch's number of threads, at most the present one, by passes over num_rows tokens; returns it."""
    threads = torch.get_num_threads()
    seconds = _seconds(model, num_rows)
    while threads > 1:
        torch.set_num_threads(threads // 2)
        fewer = _seconds(model, num_rows)
        if fewer > WORTH * seconds:
            break
        threads, seconds = threads // 2, fewer
    torch.set_num_threads(threads)
    return threads


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done in a thread that is over then. For what comes before an engine's own thread.

    OpenMP keeps helpers for every thread that ever computed in parallel. Once they are more than the cores, the GNU
    library puts those of the thread that computes now to sleep after each operation, and passes take 1.4 times as long
    (107M parameters, 16 rows, 2 threads on 2 cores). A thread takes its helpers with it when it ends.
    """
    with ThreadPoolExecutor(1, "eagle-ray-start") as passing:
        return passing.submit(work).result()


@torch.inference_mode()
def _seconds(model: nn.Module, num_rows: int) -> float:
    """The quickest of a few passes; the first one is for what is made once."""
    tokens = torch.zeros(1, num_rows, dtype=torch.int64)
    best = torch.inf
    for replay in range(1 + REPLAYS):
        started = time.perf_counter()
        model.base_model(input_ids=tokens, use_cache=False)
        seconds = time.perf_counter() - started
        best = min(best, seconds) if replay else best
        if seconds > LONG_S and replay:
            break
    return best
