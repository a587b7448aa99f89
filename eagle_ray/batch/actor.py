"""EngineActor: a worker's process, fed by Ray Data.

Several batches are in flight at once, so that the engine's slots stay full while a batch waits for its longest row.
The engine lives in a process beside this one; this loop only awaits. A dead engine ends this process, and with it the
engine's, because Ray would send a raised error's retry back to the same broken engine; Ray starts the actor again, and
it answers what it had.

    dataset.map_batches(EngineActor, fn_constructor_args=(...), compute=ActorPoolStrategy(size=2))
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from eagle_ray.batch.crash_isolation import Isolation
from eagle_ray.batch.crash_tracker import CrashRecord
from eagle_ray.batch.error_classifier import classify_error
from eagle_ray.batch.job_errors import ClusterError, ModelUnusable
from eagle_ray.batch.metrics import JobMetrics
from eagle_ray.batch.output.manifest import RunHandle
from eagle_ray.batch.output.nested_rows import nest
from eagle_ray.batch.progress import WorkerReport
from eagle_ray.batch.worker_process import LogLine, ProcessEnded, WorkerProcess
from eagle_ray.config import ConfigError, JobConfig
from eagle_ray.errors import EngineError

ACK_TIMEOUT_S = 30
UNTIL_THE_DRIVER_ENDS_S = 60
RESTART_DELAY_S = 5


class EngineActor:
    """progress: a ProgressActor's handle; the other arguments are the Worker's."""

    def __init__(
        self, config: JobConfig, run: RunHandle, passthrough: list[pa.Field], threads: int, progress: ActorHandle
    ):
        self._line = ProgressClient(progress, ray.get_runtime_context().get_actor_id())
        self._line.started()
        try:
            self._worker = WorkerProcess(config, run, passthrough, threads, self._line.log)
            self._worker.wait_until_ready()
        except ProcessEnded as error:
            self._end(error)
        except Exception as error:  # whatever it is, it is said in one line and not in a page of Ray's traceback
            self._cannot_start(error)
        self._isolation = Isolation(self._worker.answer, self._line, config.execution.slots)
        self._metrics = JobMetrics(config.name, run.run_id, self._worker.worker_id)
        self._report = WorkerReport.of(self._worker.worker_id, self._worker.counters())
        self._tell(None)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """One table of bundles for the batch: Ray hands rows on when the call is over."""
        try:
            answers = await self._isolation.answer(batch)
        except EngineError as error:
            self._end(error)
        self._report = self._report.after(answers, self._worker.counters())
        self._tell(answers)
        yield nest(answers)

    def _tell(self, answers: pa.Table | None) -> None:
        self._line.report(self._report)
        self._metrics.count(self._report, answers)

    def _cannot_start(self, error: Exception) -> NoReturn:
        """The job ends with what any worker would meet; what may be this one's own ends this process alone."""
        try:
            ends_job = self._line.failed(_for_the_user(error), classify_error(error).is_own)
            time.sleep(UNTIL_THE_DRIVER_ENDS_S if ends_job else RESTART_DELAY_S)
        finally:
            os._exit(1)

    def _end(self, error: EngineError) -> NoReturn:
        """Say why, wait until it is heard, and end the process."""
        try:
            self._line.last_words(self._worker.worker_id, classify_error(error).line)
        finally:
            os._exit(1)


@dataclass(frozen=True, slots=True)
class ProgressClient:
    """One actor's line to the ProgressActor, under the name that it keeps when Ray starts it again."""

    progress: ActorHandle
    actor_id: str

    def started(self) -> None:
        self._heard(self.progress.start.remote, self.actor_id)

    def failed(self, error: Exception, is_own: bool) -> bool:
        """Whether the job ends with this error."""
        return self._heard(self.progress.fail.remote, self.actor_id, error, is_own)

    def last_words(self, worker_id: str, reason: str) -> None:
        self._heard(self.progress.last_words.remote, self.actor_id, worker_id, reason)

    def log(self, line: LogLine) -> None:
        self.progress.log.remote(line.level, line.text)

    def report(self, report: WorkerReport) -> None:
        self.progress.report.remote(report)

    async def take(self, ids: list[str]) -> dict[str, CrashRecord]:
        return await self.progress.take.remote(self.actor_id, ids)

    async def risk(self, ids: list[str]) -> None:
        await self.progress.risk.remote(self.actor_id, ids)

    def answered(self, ids: list[str]) -> None:
        self.progress.answered.remote(self.actor_id, ids)

    def _heard(self, call: Callable[..., ray.ObjectRef], *args: object) -> object:
        return ray.get(call(*args), timeout=ACK_TIMEOUT_S)


def _for_the_user(error: Exception) -> Exception:
    """As the driver will raise it: in one line, and of a class that it knows without torch."""
    if isinstance(error, ConfigError):
        return error
    fault = classify_error(error)
    kind = ClusterError if fault.is_transient else ModelUnusable
    return kind(f"a worker cannot start: {fault.line}")
