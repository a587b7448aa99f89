"""Runs in the place of ``Worker``: one whose process does not bear every start and every prompt."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pyarrow as pa
import torch

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import EngineError, UnfitDevice
from eagle_ray.runs.run import Run

CLASS = f"{__name__}:FragileWorker"  # as the engine's process finds it
TOO_LARGE, TOO_SMALL, CRASHES, IS_BUGGY, LOGS = "too large", "too small", "crashes", "is buggy", "logs"  # names of jobs
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
        mark = run.output / "_loaded_once"
        if config.name == CRASHES and not mark.exists():
            mark.write_atomic(b"")
            os.kill(os.getpid(), signal.SIGKILL)
        if config.name == LOGS:
            logging.getLogger("eagle_ray").info(LOGGED)
        self._is_buggy = config.name == IS_BUGGY
        super().__init__(config, run, carried, plan)

    async def answer(self, requests: pa.Table) -> pa.Table:
        prompts = [row["prompt_token_ids"] for row in requests.to_pylist() if row["error_code"] is None]
        if self._is_buggy:
            raise KeyError("a bug")
        if KILLER in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if ORPHAN in prompts:
            os.kill(int(os.environ[ACTOR_PID]), signal.SIGKILL)
            await asyncio.Event().wait()  # for ever, if nothing else ends it
        if GREEDY in prompts:
            raise EngineError("the engine failed") from torch.OutOfMemoryError("CUDA out of memory")
        return await super().answer(requests)
