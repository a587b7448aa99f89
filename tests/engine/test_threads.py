"""The engine's thread computes with the threads that were set, whatever OpenMP was told at the start of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_TASKS = """
import os, threading, torch
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.parallel.lockstep import ALONE

class OneProduct:
    has_work, lockstep = True, ALONE
    def step(self):
        before = len(os.listdir("/proc/self/task"))
        torch.randn(64, 2048) @ torch.randn(2048, 2048)
        print(len(os.listdir("/proc/self/task")) - before, flush=True)
        raise SystemExit

torch.set_num_threads({threads})
engine = AsyncEngine(OneProduct())
[thread.join() for thread in threading.enumerate() if thread.name == "eagle-ray-engine"]
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts the process's threads in /proc"
)
@pytest.mark.parametrize(("told", "threads"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_the_engines_thread_uses_what_was_set(told, threads):
    env = os.environ | {"OMP_NUM_THREADS": str(told)}
    script = COUNT_TASKS.format(threads=threads)
    out = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert int(out) == threads - 1
