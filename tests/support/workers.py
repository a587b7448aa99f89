"""Workers in this process and in one of their own, one that dies on demand, and an engine that follows a script."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import torch

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.worker import engine_process
from eagle_ray.batch.worker.engine_process import EngineProcess, LogLine
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.errors import EngineError, UnfitDevice
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.row_schema import request_schema, table_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

CLASS = f"{__name__}:FragileWorker"  # as the engine's process finds it
TOO_LARGE, TOO_SMALL, CRASHES, IS_BUGGY, LOGS = (
    "too large",
    "too small",
    "crashes",
    "is buggy",
    "logs",
)  # names of jobs
LASTS = "lasts"  # likewise: its rows end once LAST_WORD is in its output
LAST_WORD = "_last_word"
LOGGED = "measuring the cost of steps: for up to 5 s"
ACTOR_PID = "FRAGILE_ACTOR_PID"  # an environment variable
KILLER, ORPHAN, GREEDY = [7, 7, 7], [8, 8, 8], [9, 9, 9]  # prompts


class FragileWorker(Worker):
    """The real one, but it dies as it loads for the first time, with its actor over one prompt, over others alone."""

    def __init__(self, config: JobConfig, run: Run, carried: list[pa.Field], plan: WorkerPlan):
        if config.name == TOO_LARGE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if config.name == TOO_SMALL:
            raise UnfitDevice("the GPU has 24 GB")
        if config.name == CRASHES and _is_first(Path(str(run.output / "_loaded_once"))):
            os.kill(os.getpid(), signal.SIGKILL)
        if config.name == LOGS:
            logging.getLogger("eagle_ray").info(LOGGED)
        self._is_buggy = config.name == IS_BUGGY
        self._lasts_until = run.output / LAST_WORD if config.name == LASTS else None
        if config.name == LASTS:
            engine_process.COUNTERS_EVERY_S = 0.02
        super().__init__(config, run, carried, plan)

    async def answer(self, requests: pa.Table) -> pa.Table:
        prompts = [
            row["prompt_token_ids"] for row in requests.to_pylist() if row["error_code"] is None
        ]
        if self._is_buggy:
            raise KeyError("a bug")
        if KILLER in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if ORPHAN in prompts:
            os.kill(int(os.environ[ACTOR_PID]), signal.SIGKILL)
            await asyncio.Event().wait()  # for ever, if nothing else ends it
        if GREEDY in prompts:
            raise EngineError("the engine failed") from torch.OutOfMemoryError("CUDA out of memory")
        while self._lasts_until is not None and not self._lasts_until.exists():
            await super().answer(requests)  # its tokens are made, and no row is done
        return await super().answer(requests)


def _is_first(mark: Path) -> bool:
    """Whether no other process has left the mark, however many look at once."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class ScriptedEngine:
    """ids: end with an EOS. engine: answers everything else."""

    def __init__(
        self, engine: Any, ids: list[int], eos_ids: frozenset[int], tokens_per_step: int = 3
    ):
        self._engine, self._ids, self._eos_ids, self._size = engine, ids, eos_ids, tokens_per_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, sequence: Sequence) -> Sequence:
        async for _ in self.stream(sequence):
            pass
        return sequence

    async def stream(self, sequence: Sequence) -> AsyncIterator[int]:
        sequence.max_tokens = sequence.sampling.max_tokens
        sequence.stats = AcceptanceStats.empty(0)
        sequence.arrived_at = sequence.admitted_at = sequence.first_token_at = time.monotonic()
        for start in range(0, len(self._ids), self._size):
            if sequence.finish_reason is None:
                sequence.append(self._ids[start : start + self._size], self._eos_ids)
                sequence.finished_at = time.monotonic()
                yield len(sequence.output_ids)


def answers(config: JobConfig, batch_size: int = 100, backwards: bool = False) -> list[dict]:
    """All rows of the job, answered by one worker in batches that are in flight together."""
    plan = plan_input(config)
    requests = list(request_rows(plan))
    requests = requests[::-1] if backwards else requests
    schema = request_schema(plan.carried_fields)
    batches = [
        table_of(requests[i : i + batch_size], schema) for i in range(0, len(requests), batch_size)
    ]
    worker = Worker(
        config, Run(StoragePath.of("out"), "run", 1, "hash"), plan.carried_fields, WorkerPlan()
    )

    async def all_at_once() -> list[pa.Table]:
        return await asyncio.gather(*(worker.answer(batch) for batch in batches))

    try:
        return [row for table in asyncio.run(all_at_once()) for row in table.to_pylist()]
    finally:
        worker.close()


def outputs(rows: list[dict]) -> dict[tuple[str, int], list[int]]:
    return {(row["request_id"], row["sample_index"]): row["output_token_ids"] for row in rows}


PATIENCE_S = 60


def batches_of(config: JobConfig, batch_size: int = 100) -> list[pa.Table]:
    plan = plan_input(config)
    requests, schema = list(request_rows(plan)), request_schema(plan.carried_fields)
    return [
        table_of(requests[i : i + batch_size], schema) for i in range(0, len(requests), batch_size)
    ]


def arguments_of(config: JobConfig) -> tuple:
    output = StoragePath.of(config.output.path)
    return config, Run(output, "run", 1, "hash"), plan_input(config).carried_fields, WorkerPlan()


def answers_or_errors(worker: EngineProcess, *batches: pa.Table) -> list:
    """Of each batch its answers or the error; all in flight together."""

    async def all_at_once() -> list:
        return await asyncio.gather(
            *(worker.answer(batch) for batch in batches), return_exceptions=True
        )

    return asyncio.run(all_at_once())


def ignore_line(line: LogLine) -> None:
    """Show no line of a start."""


def pid_of(worker_id: str) -> int:
    return int(worker_id.rpartition(":")[2])


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
