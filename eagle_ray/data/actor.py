"""EngineActor: a Worker in a process of its own, fed by Ray Data.

Several batches are in flight at once, so that the engine's slots stay full while a batch waits for its longest row.
The engine steps in a thread of its own; this loop only awaits. A dead engine ends the process, because Ray would send
a raised error's retry back to the same broken engine. Does not know rows or files.

    dataset.map_batches(EngineActor, fn_constructor_args=(...), compute=ActorPoolStrategy(size=2))
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from typing import NoReturn

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from eagle_ray.config import ConfigError, JobConfig
from eagle_ray.data.metrics import Metrics
from eagle_ray.data.progress import Report
from eagle_ray.data.record import Run
from eagle_ray.data.stops import ClusterError
from eagle_ray.errors import EngineError

OUT_OF_MEMORY = re.compile("alloc|out of memory", re.IGNORECASE)  # torch says either, in a RuntimeError
SMALLER = "set execution.kv_tokens, execution.slots, speculative.max_nodes or model.max_model_len to less"
LAST_WORDS_S = 10
UNTIL_THE_DRIVER_ENDS_S = 60


class EngineActor:
    """progress: a ProgressActor's handle; the other arguments are the Worker's."""

    def __init__(self, config: JobConfig, run: Run, passthrough: list[pa.Field], threads: int, progress: ActorHandle):
        progress.start.remote()
        self._progress = progress
        try:
            from eagle_ray.data.worker import Worker  # torch and transformers: the driver names this class without them

            self._worker = Worker(config, run, passthrough, threads)
        except Exception as error:  # whatever it is, the next worker would meet it too
            ray.get(progress.fail.remote(_for_the_user(error)), timeout=LAST_WORDS_S)
            time.sleep(UNTIL_THE_DRIVER_ENDS_S)  # raised at once, it would come out as a page of Ray's traceback
            raise
        self._metrics = Metrics(config.name, run.run_id, self._worker.worker_id)
        self._report(None)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """One table for the batch: Ray hands rows on when the call is over."""
        try:
            answers = await self._worker.answer(batch)
        except EngineError as error:
            self._die(error)
        self._report(answers)
        yield answers

    def _report(self, answers: pa.Table | None) -> None:
        report = Report.of(self._worker.worker_id, self._worker.counters(), answers)
        self._progress.report.remote(report)
        self._metrics.count(report, answers)

    def _die(self, error: EngineError) -> NoReturn:
        """Say why, wait until it is heard, and end the process."""
        ray.get(self._progress.note.remote(f"worker {self._worker.worker_id} ends: {error}"), timeout=LAST_WORDS_S)
        os._exit(1)


def _for_the_user(error: Exception) -> Exception:
    """As the driver will raise it: in one line, and of a class that it knows without torch."""
    if isinstance(error, ConfigError):
        return error
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(reason)):
        return ClusterError(f"a worker cannot start, its memory is too small ({reason or 'MemoryError'}): {SMALLER}")
    name = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
    return ClusterError(f"a worker cannot start: {name}{reason}")
