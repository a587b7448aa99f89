"""EngineActor: a worker process, fed by Ray Data.

Several batches are in flight at once, so the engine's slots stay full while a batch waits for its longest row. The
engine runs in a child process; the actor's event loop only awaits. If the engine crashes, the actor ends its own
process: Ray would otherwise send the retry to the broken engine. Ray restarts the actor and resubmits its batches.

    dataset.map_batches(EngineActor, fn_constructor_args=(...), compute=ActorPoolStrategy(size=2))
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NoReturn

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from eagle_ray.batch.worker.crash_isolation import Isolation
from eagle_ray.batch.worker.crash_tracker import CrashRecord
from eagle_ray.batch.worker.engine_process import EngineProcess, LogLine, ProcessEnded
from eagle_ray.batch.worker.error_classifier import classify_error
from eagle_ray.batch.worker.metrics import JobMetrics
from eagle_ray.batch.worker.nested_rows import nest
from eagle_ray.batch.worker.progress import WorkerReport
from eagle_ray.batch.worker.spare_engine import adopt
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.slot_limits import usual_slots
from eagle_ray.runs.job_errors import ClusterError, ModelUnusable
from eagle_ray.runs.manifest import RunHandle

ACK_TIMEOUT_S = 30
DRIVER_SHUTDOWN_S = 60
RESTART_DELAY_S = 5
UNFIT_DELAY_S = 300  # before a worker starts again whose devices cannot run the engine
FLUSH_S = 1.0


class EngineActor:
    """One engine of the job as a Ray actor. progress is the ProgressActor's handle; the rest goes to the Worker.

    spare: the address of a SpareEngine on the driver's machine, or None.
    """

    def __init__(
        self,
        config: JobConfig,
        run: RunHandle,
        passthrough: list[pa.Field],
        threads: int,
        progress: ActorHandle,
        spare: str | None = None,
    ):
        self._progress = ProgressClient(progress, ray.get_runtime_context().get_actor_id() or "")
        self._progress.report_start()
        try:
            self._worker = EngineProcess(config, run, passthrough, threads, self._progress.log, adopt(spare))
            self._worker.wait_until_ready()
        except ProcessEnded as error:
            self._exit(error)
        except Exception as error:  # report any error in one line instead of a Ray traceback
            self._cannot_start(error)
        slots = usual_slots(config.execution.slots, on_gpu=False)
        self._isolation = Isolation(self._worker.answer, self._progress, slots)
        self._metrics = JobMetrics(config.name, run.run_id, self._worker.worker_id)
        self._report = WorkerReport.of(self._worker.worker_id, self._worker.counters())
        self._num_batches = 0  # in flight
        self._publish(None)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield one table of nested output rows for the batch; Ray passes it on after the call returns."""
        self._num_batches += 1
        try:
            answers = await self._isolation.run_batch(batch)
        except EngineError as error:
            self._exit(error)
        self._num_batches -= 1
        self._report = self._report.with_batch(answers, self._worker.counters())
        self._publish(answers)
        if self._num_batches == 0:  # perhaps the last one
            self._progress.flush()
        yield nest(answers)

    def _publish(self, answers: pa.Table | None) -> None:
        self._progress.report(self._report)
        self._metrics.count(self._report, answers)

    def _cannot_start(self, error: Exception) -> NoReturn:
        """Report the failed start, then end this process. A cause that every worker shares ends the job."""
        fault = classify_error(error)
        try:
            ends_job = self._progress.report_failure(as_config_error(error), fault.is_local)
            again = RESTART_DELAY_S if fault.is_transient or not fault.is_local else UNFIT_DELAY_S
            time.sleep(DRIVER_SHUTDOWN_S if ends_job else again)
        finally:
            os._exit(1)

    def _exit(self, error: EngineError) -> NoReturn:
        """Report the reason, wait for the acknowledgement and end the process."""
        try:
            self._progress.report_exit(self._worker.worker_id, classify_error(error).line)
        finally:
            os._exit(1)


@dataclass(slots=True)
class ProgressClient:
    """Reports of one actor to the ProgressActor, under an id that stays when Ray restarts the actor.

    Finished rows and totals wait for the call that begins the next rows, at most FLUSH_S. So a batch is one call, and
    one ProgressActor keeps up with a thousand workers.
    """

    progress: ActorHandle
    actor_id: str
    _finished: list[str] = field(default_factory=list)
    _report: WorkerReport | None = None
    _flush_timer: asyncio.TimerHandle | None = None

    def report_start(self) -> None:
        self._acknowledged(self.progress.start.remote, self.actor_id)

    def report_failure(self, error: Exception, is_local: bool) -> bool:
        """Report a failed start; return whether it ends the job."""
        return bool(self._acknowledged(self.progress.fail.remote, self.actor_id, error, is_local))

    def report_exit(self, worker_id: str, reason: str) -> None:
        self.flush()
        self._acknowledged(self.progress.report_exit.remote, self.actor_id, worker_id, reason)

    def log(self, line: LogLine) -> None:
        self.progress.log.remote(line.level, line.text)

    def report(self, report: WorkerReport) -> None:
        """Report the totals: at once before the first row, else with the next call or after FLUSH_S."""
        self._report = report
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._flush_timer is None:
            self._flush_timer = loop.call_later(FLUSH_S, self.flush)

    async def begin(self, ids: list[str]) -> dict[str, CrashRecord]:
        return await self.progress.begin.remote(self.actor_id, ids, *self._take_pending())

    async def begin_suspects(self, ids: list[str]) -> None:
        await self.progress.begin_suspects.remote(self.actor_id, ids, *self._take_pending())

    def finish(self, ids: list[str]) -> None:
        self._finished += ids

    def flush(self) -> None:
        """Send what waits."""
        finished, report = self._take_pending()
        if finished or report is not None:
            self.progress.update.remote(self.actor_id, finished, report)

    def _take_pending(self) -> tuple[list[str], WorkerReport | None]:
        pending = self._finished, self._report
        self._finished, self._report = [], None
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        return pending

    def _acknowledged(self, call: Callable[..., ray.ObjectRef], *args: object) -> object:
        return ray.get(call(*args), timeout=ACK_TIMEOUT_S)


def as_config_error(error: Exception) -> Exception:
    """Return the error as the driver raises it: one line, of a class that does not need torch."""
    if isinstance(error, ConfigError):
        return error
    fault = classify_error(error)
    kind = ClusterError if fault.is_transient else ModelUnusable
    return kind(f"a worker cannot start: {fault.line}")
