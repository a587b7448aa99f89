"""Several ranks of one engine in threads of this process, and what leaves no process behind."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import PreTrainedModel, initialization

from eagle_ray.assembly.assemble import build_rank
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.tensor_parallel import Commands, Rank
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.engine.engine import Engine
from eagle_ray.parallel.lockstep import Follower, Leader
from eagle_ray.parallel.rank_group import RankGroup

Result = TypeVar("Result")
NAME = "eagle-ray-rank-"


def on_ranks(size: int, directory: Path, work: Callable[[RankGroup], Result]) -> list[Result]:
    """Return what each rank's work returns, by rank. Raises what the first to fail raises; the others learn of it."""
    meeting = str(directory / "meeting")
    errors: list[BaseException] = []

    def run(ranks: RankGroup) -> Result:
        try:
            return work(ranks)
        except BaseException as error:
            errors.append(error)
            ranks.close()
            raise

    with loading_undone(), ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, RankGroup(rank, size, meeting)) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@contextmanager
def loading_undone() -> Iterator[None]:
    """Restore at the end what transformers replaces while it loads a model: the default dtype, and functions.

    It restores them itself, but if threads load at a time, one restores what another has replaced.
    """
    dtype = torch.get_default_dtype()
    modules = [
        sys.modules[name] for name in initialization.TORCH_MODULES_TO_PATCH if name in sys.modules
    ]
    places = [(PreTrainedModel, "tie_weights"), (PreTrainedModel, "init_weights")]
    places += [(module, name) for module in modules for name in initialization.TORCH_INIT_FUNCTIONS]
    functions = [
        (place, name, getattr(place, name)) for place, name in places if hasattr(place, name)
    ]
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for place, name, function in functions:
            setattr(place, name, function)


def with_ranks(
    size: int,
    directory: Path,
    model: ModelConfig,
    speculative: SpeculativeConfig,
    args: EngineArgs,
    work: Callable[[Engine], Result],
) -> tuple[Result, list[Engine]]:
    """Return what work with rank 0's engine returns, and all engines; every other rank follows in a thread."""
    pipes = [Pipe() for _ in range(size - 1)]

    def run(ranks: RankGroup) -> tuple[Result | None, Engine]:
        if ranks.rank == 0:
            try:
                lockstep = Leader([here for here, _ in pipes], lambda seconds: None, lambda: None)
                engine = build_rank(model, speculative, args, Rank(ranks, lockstep)).engine
                return work(engine), engine
            finally:
                for here, _ in pipes:
                    here.close()
        follower = Follower(ranks.rank, pipes[ranks.rank - 1][1])
        engine = build_rank(model, speculative, args, Rank(ranks, follower)).engine
        with suppress(EOFError):
            Commands(engine, follower).run()
        return None, engine

    results = on_ranks(size, directory, run)
    result = results[0][0]
    assert result is not None
    return result, [engine for _, engine in results]


class CountedSlice:
    """A slice of a file's tensor that counts the numbers it is asked for."""

    def __init__(self, stored: Any, name: str, counts: Counter[str]):
        self._stored, self._name, self._counts = stored, name, counts

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._stored[index]
        self._counts[self._name] += part.numel()
        return part


def followers_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the other ranks that a process has started, those that have ended and stay included."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if is_follower(child)]
    return []


def is_follower(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        names = [process.name(), *process.cmdline()]  # a forked one has its parent's command line
        return process.status() == psutil.STATUS_ZOMBIE or any(
            name.startswith(NAME) for name in names
        )
    return False


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Return whether something is so within this time."""
    ends_at = time.monotonic() + seconds
    while not (now := is_so()) and time.monotonic() < ends_at:
        time.sleep(0.05)
    return now
