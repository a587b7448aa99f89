"""EngineActor: a worker process, fed by Ray Data.

Several batches are in flight at once, so the engine's slots stay full while a batch waits for its
longest row. The engine runs in a child process; the actor's event loop only awaits. If the engine
crashes, the actor starts another one and runs what was in flight again, in small groups. If the
actor's own process ends, Ray starts it again and resubmits its batches to it.

    dataset.map_batches(EngineActor, fn_constructor_args=(...), compute=ActorPoolStrategy(size=2))
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from eagle_ray.assembly.worker_plan import WorkerPlan, usual_slots
from eagle_ray.batch.worker.crash_isolation import (
    CrashLog,
    Fault,
    Isolation,
    as_config_error,
    classify_error,
)
from eagle_ray.batch.worker.engine_process import (
    COUNTERS_EVERY_S,
    EngineProcess,
    LogLine,
    ProcessEnded,
)
from eagle_ray.batch.worker.job_endpoint import JobEndpoint
from eagle_ray.batch.worker.progress import JobMetrics, WorkerReport
from eagle_ray.batch.worker.sink import nest
from eagle_ray.batch.worker.spare_engine import fork_engine
from eagle_ray.config import JobConfig
from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import EngineError
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")
ACK_TIMEOUT_S = 30
DRIVER_SHUTDOWN_S = 60
RESTART_DELAY_S = 5
UNFIT_DELAY_S = 300  # seconds before a worker starts again whose devices cannot run the engine
REPORT_EVERY_S = 1.0


class ActorEngine(Protocol):
    """What an actor sends its batches to: the process of our own engine, or a worker that asks an endpoint."""

    worker_id: str

    async def answer(self, requests: pa.Table) -> pa.Table: ...

    def counters(self) -> EngineCounters: ...

    def stop_admission(self) -> None: ...

    def close(self) -> None: ...


class EngineActor:
    """One engine of the job as a Ray actor.

    progress is the ProgressActor's handle. spare is the address of a SpareEngine, which may be on
    another machine. endpoint is set if an endpoint answers instead of our own engine. All other
    arguments go to the Worker.
    """

    _report: WorkerReport

    def __init__(
        self,
        config: JobConfig,
        run: Run,
        carried: list[pa.Field],
        plan: WorkerPlan,
        progress: ActorHandle,
        spare: str | None = None,
        endpoint: JobEndpoint | None = None,
    ):
        self._worker_arguments = (config, run, carried, plan)
        self._endpoint = endpoint
        self._spare = spare
        self._progress = ProgressClient(progress, ray.get_runtime_context().get_actor_id() or "")
        crash_log = self._progress.report_start()
        self._use(self._start_engine())
        self._isolation = Isolation(
            self, crash_log, usual_slots(config.execution.slots, on_gpu=False)
        )
        self._num_batches = 0  # batches in flight
        self._is_admitting = True  # until the run stops at a bound
        self._beats: asyncio.Task[None] | None = None  # while batches are in flight

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield one table of nested output rows for the batch; Ray passes it on after the call returns."""
        yield nest(await self.run_batch(batch))

    async def run_batch(self, batch: pa.Table) -> pa.Table:
        """Return the output rows of the batch."""
        self._num_batches += 1
        if self._beats is None or self._beats.done():
            self._beats = asyncio.create_task(self._report_beats())
        try:
            answers = await self._isolation.run_batch(batch)
        finally:
            self._num_batches -= 1
        self._report = self._report.with_batch(answers, self._engine.counters())
        self._publish(answers)
        if self._num_batches == 0:  # perhaps the last one
            self._progress.flush()
        return answers

    async def _report_beats(self) -> None:
        """Report counters while batches are in flight. Errors are logged and do not end it."""
        while self._num_batches:
            await asyncio.sleep(COUNTERS_EVERY_S)
            try:
                self._report = self._report.with_counters(self._engine.counters())
                self._publish(None)
                if self._is_admitting and not await self._progress.is_admitting():
                    self._is_admitting = False
                    self._engine.stop_admission()
            except Exception:
                log.exception("what the engine does cannot be reported now")

    async def answer(self, requests: pa.Table) -> pa.Table:
        return await self._engine.answer(requests)

    async def restart(self, error: EngineError) -> None:
        """Report the error and start another process, without blocking the event loop."""
        self._progress.flush()
        self._use(await asyncio.to_thread(self._replace_engine, error))
        if not self._is_admitting:
            self._engine.stop_admission()

    async def save(self, log: CrashLog) -> None:
        await self._progress.save(log)

    def _replace_engine(self, error: EngineError) -> ActorEngine:
        self._engine.close()
        self._progress.report_exit(self._engine.worker_id, classify_error(error).line)
        self._progress.report_start()
        return self._start_engine()

    def _start_engine(self) -> ActorEngine:
        """Return an engine that is ready. If none starts, end this actor, so that Ray starts it again."""
        if self._endpoint is not None:
            return self._start_endpoint(self._endpoint)
        try:
            engine = EngineProcess(
                *self._worker_arguments, self._progress.log, fork_engine(self._spare)
            )
            engine.wait_until_ready()
        except ProcessEnded as error:
            self._exit(engine.worker_id, error)
        except Exception as error:  # report any error in one line instead of a Ray traceback
            fault = classify_error(error)
            if fault.is_end:
                self._exit(engine.worker_id, error)
            self._cannot_start(as_config_error(error), fault)
        return engine

    def _start_endpoint(self, endpoint: JobEndpoint) -> ActorEngine:
        from eagle_ray.batch.worker.endpoint_worker import EndpointWorker  # httpx2

        config, run, carried, _ = self._worker_arguments
        try:
            return EndpointWorker(config, run, carried, endpoint, self._progress.log)
        except Exception as error:  # as of our own engine
            self._cannot_start(as_config_error(error), classify_error(error))

    def _use(self, engine: ActorEngine) -> None:
        config, run, *_ = self._worker_arguments
        self._engine = engine
        self._metrics = JobMetrics(config.name, run.run_id, engine.worker_id)
        self._report = WorkerReport.of(engine.worker_id, engine.counters())
        self._publish(None)

    def _publish(self, answers: pa.Table | None) -> None:
        self._progress.report(self._report)
        self._metrics.count(self._report, answers)

    def _cannot_start(self, error: Exception, fault: Fault) -> NoReturn:
        """Report the failed start, then end this process. A cause that every worker shares ends the job."""
        try:
            ends_job = self._progress.report_failure(error, fault.is_local)
            again = RESTART_DELAY_S if fault.is_transient or not fault.is_local else UNFIT_DELAY_S
            time.sleep(DRIVER_SHUTDOWN_S if ends_job else again)
        finally:
            os._exit(1)

    def _exit(self, worker_id: str, error: Exception) -> NoReturn:
        """Report the end of one of the engine's processes, wait for the acknowledgement and end this one."""
        try:
            self._progress.report_exit(worker_id, classify_error(error).line)
        finally:
            os._exit(1)


@dataclass(slots=True)
class ProgressClient:
    """One actor's connection to the ProgressActor, under an id that stays when Ray restarts the actor.

    No call waits for an answer while all is well, and totals are sent every REPORT_EVERY_S at most.
    So one ProgressActor can serve a thousand workers.
    """

    progress: ActorHandle
    actor_id: str
    _report: WorkerReport | None = None
    _flush_timer: asyncio.TimerHandle | None = None

    def report_start(self) -> CrashLog:
        """Report that an engine starts; return the crash log that this actor saved last."""
        return cast(CrashLog, self._acknowledged(self.progress.start.remote, self.actor_id))

    def report_failure(self, error: Exception, is_local: bool) -> bool:
        """Report a failed start; return whether this ends the job."""
        return bool(self._acknowledged(self.progress.fail.remote, self.actor_id, error, is_local))

    def report_exit(self, worker_id: str, reason: str) -> None:
        self._acknowledged(self.progress.report_exit.remote, worker_id, reason)

    def log(self, line: LogLine) -> None:
        self.progress.log.remote(line.level, line.text)

    async def save(self, log: CrashLog) -> None:
        await self.progress.save.remote(self.actor_id, log)

    async def is_admitting(self) -> bool:
        """Return whether this worker may start further rows."""
        return cast(bool, await self.progress.is_admitting.remote())

    def report(self, report: WorkerReport) -> None:
        """Send the totals: at once before the first row, then at most every REPORT_EVERY_S."""
        self._report = report
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._flush_timer is None:
            self._flush_timer = loop.call_later(REPORT_EVERY_S, self.flush)

    def flush(self) -> None:
        """Send totals that were not sent yet."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._report is not None:
            self.progress.report.remote(self._report)
            self._report = None

    def _acknowledged(self, call: Callable[..., ray.ObjectRef], *args: object) -> object:
        return ray.get(call(*args), timeout=ACK_TIMEOUT_S)
