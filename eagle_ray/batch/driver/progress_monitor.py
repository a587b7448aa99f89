"""ProgressMonitor: log a running job's progress, and stop the job if it cannot end well.

Every few seconds it writes the rows that engines have finished, and separately the rows in files,
to ``_progress.json`` and to the log, or to a progress bar in a terminal.

    with ProgressMonitor(progress, run, num_rows=96, every_s=10, limits=limits, workers=plan):
        dataset.write_datasink(sink)
    # [   12 s] 40 of 96 rows, 32 in files, 0 errors · 812 tokens/s · tau 4.31 · slots 93% busy · 17 s left
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.cluster import ray_messages
from eagle_ray.batch.driver.cluster_watch import (
    GcsWatch,
    RayletWatch,
    check_alive,
    gcs_address,
    raylet_socket,
)
from eagle_ray.batch.driver.foresight import Foresight
from eagle_ray.batch.driver.history import History
from eagle_ray.batch.driver.run_bounds import DRAIN_ROWS, NO_BOUNDS, Pace, RunBounds
from eagle_ray.batch.driver.scaler import Scaler
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.batch.driver.status import LOADING, Facts, format_progress
from eagle_ray.batch.worker.progress import Progress
from eagle_ray.config.records import ProgressRecord
from eagle_ray.report.cost import USAGE
from eagle_ray.report.run_table import FALLBACK_NAMES
from eagle_ray.runs.job_errors import RESUME, ClusterError, JobError, TooManyErrors
from eagle_ray.runs.layout import PROGRESS, RUN, read_derived_record
from eagle_ray.runs.part_files import open_part
from eagle_ray.runs.run import Run, now_text
from eagle_ray.scaling.work import SURE
from eagle_ray.storage.path import StoragePath, json_bytes
from eagle_ray.storage.retries import disable_extended_retries

log = logging.getLogger("eagle_ray")
PROGRESS_POLL_S = 1.0
MIN_RATE_WINDOW_S = 1.0  # a speed over less time says nothing
MIN_ROWS_FOR_ERROR_RATE = 100  # an error rate over fewer rows says little
MIN_ROWS_FOR_FORECAST = 32  # done rows before a run is called late, or a tenth of a smaller run's
# States without an answered row, by what is waited for.
STALL_LIMITS_S = {
    "memory": 600.0,
    "workers to start": 7200.0,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop the job.

    Attributes:
        max_error_rate: share of rows that may be errors.
        max_starts: worker starts in a row without a successful row between them.
    """

    max_error_rate: float
    max_starts: int

    def exceeded_by(self, progress: Progress) -> Exception | None:
        if progress.fatal is not None:
            return progress.fatal
        if (
            progress.rows >= MIN_ROWS_FOR_ERROR_RATE
            and progress.errors > self.max_error_rate * progress.rows
        ):
            return TooManyErrors(f"{progress.errors} of {progress.rows} rows are errors")
        if progress.consecutive_starts > self.max_starts:
            last = progress.notes[-1] if progress.notes else "none of them left a word"
            return ClusterError(
                f"workers die again and again: {progress.consecutive_starts} were started "
                f"and no row was answered ({last})"
            )
        return None


def waited_for(progress: Progress, lacks_memory: bool) -> str | None:
    """Return what a job without progress waits for, a key of STALL_LIMITS_S; None if it waits for nothing."""
    if lacks_memory:
        return "memory"
    return None if progress.starts else "workers to start"


def stall_error(waiting_for: str | None, seconds: float) -> ClusterError | None:
    """Return the error that ends the job if it has waited longer than the limit, else None."""
    if waiting_for is None or seconds <= STALL_LIMITS_S[waiting_for]:
        return None
    why = {
        "memory": "Ray ends workers because a node's memory is nearly full. End other programs there, or set "
        "execution.actors or execution.slots to less",
        "workers to start": "the cluster has not started any worker. Another job may hold its GPUs or memory: see "
        "`ray status`",
    }
    return ClusterError(f"no row was answered for {seconds:.0f} s: {why[waiting_for]}. {RESUME}")


class UsageMeter:
    """Measures the elapsed time and the worker time of a run over all attempts, from which its cost follows.

    A worker counts from its start, loading included, until the job ends, because it occupies its
    GPU for as long. The number of workers is that of the ready ones, within the minimum and maximum
    of the job's plan. An attempt that was killed counts up to its last ``_progress.json``.

    Args:
        earlier: content of ``_progress.json`` after earlier attempts, or None.
        now: seconds of any steady clock.
    """

    def __init__(
        self,
        min_workers: int,
        max_workers: int,
        num_gpus: float,
        earlier: Mapping[str, Any] | None,
        now: float,
    ):
        self._min_workers = min_workers
        self._max_workers = max_workers
        self._num_gpus = num_gpus
        self._now = now
        before = {"elapsed_s": 0.0, "worker_s": 0.0} if earlier is None else earlier.get(USAGE)
        self._is_known = before is not None  # not after an attempt of a version that did not count
        self._elapsed_s = before["elapsed_s"] if before else 0.0
        self._worker_s = before["worker_s"] if before else 0.0
        self._spot_s = before.get("spot_s", 0.0) if before else 0.0

    def update(self, num_ready: int, now: float, fleet: tuple[int, int] | None = None) -> None:
        """Count the time since the last update.

        Args:
            num_ready: workers that have reported, restarted ones included.
            fleet: workers that are paid for, and those of them on spot nodes, if their number changes
                while the job runs.
        """
        seconds = now - self._now
        self._now = now
        self._elapsed_s += seconds
        if fleet is None:
            self._worker_s += seconds * self.num_paid(num_ready)
            return
        number, num_spot = fleet
        self._worker_s += seconds * number
        self._spot_s += seconds * num_spot

    def num_paid(self, num_ready: int) -> int:
        """Return the number of workers whose time is counted: the ready ones, within the minimum
        and maximum of the plan."""
        return min(max(num_ready, self._min_workers), self._max_workers)

    def usage(self) -> dict[str, float] | None:
        """Return the elapsed and worker seconds so far, or None if those of an earlier attempt are unknown."""
        if not self._is_known:
            return None
        usage = {
            "elapsed_s": round(self._elapsed_s, 1),
            "worker_s": round(self._worker_s, 1),
            "gpus_per_worker": self._num_gpus,
        }
        if self._spot_s:
            usage["spot_s"] = round(self._spot_s, 1)
        return usage


class ProgressMonitor:
    """While it is open, it logs progress and writes ``_progress.json`` every few seconds.

    A job that cannot end well is stopped: the main thread is interrupted, and leaving the context
    raises the reason: the error that keeps workers from starting, TooManyErrors once
    MIN_ROWS_FOR_ERROR_RATE rows are done, ClusterError if workers crash repeatedly, OutputDamaged
    or FencedError if ``_run.json`` is deleted or names another attempt.
    """

    def __init__(
        self,
        actor: ActorHandle,
        run: Run,
        num_rows: int,
        every_s: float,
        limits: Limits,
        workers: WorkerPlan,
        bounds: RunBounds = NO_BOUNDS,
        foresight: Foresight | None = None,
        scaler: Scaler | None = None,
        on_warning: Callable[[str, str], None] | None = None,
    ):
        self._on_warning = on_warning
        self._foresight = foresight
        self._scaler = scaler
        self._history = History.after(_progress_before(run))
        self.bound_reached: str | None = None  # the key of `execution` at which no row begins
        self._bounds = bounds
        self._num_gpus = workers.num_gpus
        self._actor = actor
        self._run = run
        self._num_rows = num_rows
        self._every_s = every_s
        self._limits = limits
        self._closing = threading.Event()
        self._num_notes = 0
        self._rows_in_files = 0
        self._num_start_lines = 0
        self._logged: set[tuple[str, str]] = set()  # lines that were logged about workers
        self._started = time.monotonic()
        self._ready_at = None
        self._latest = Progress()  # the workers' last reports
        self._num_rows_seen = 0
        self._advanced_at = self._started
        self._meter = UsageMeter(
            workers.min_workers,
            workers.max_workers,
            workers.num_gpus,
            _progress_before(run),
            self._started,
        )
        self._gcs = GcsWatch(gcs_address())
        self._stop_reason: Exception | None = None
        self._write_error = ""  # why the latest progress file could not be written
        self._thread = threading.Thread(
            target=self._monitor_loop, name="eagle-ray-progress", daemon=True
        )

    def __enter__(self) -> ProgressMonitor:
        self._thread.start()
        self._raylet = RayletWatch(raylet_socket(), self._stop_without_raylet)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._closing.set()
        self._raylet.close()
        self._thread.join()
        if self._stop_reason is not None:
            if not is_interrupted():
                accept_interrupt()
            raise self._stop_reason from None
        if self._write_error and error is None:
            log.warning("%s cannot be written: %s", PROGRESS, self._write_error)

    def _monitor_loop(self) -> None:
        disable_extended_retries()
        next_file = self._started
        with display(self._every_s) as progress_display:
            while not self._closing.wait(min(PROGRESS_POLL_S, self._every_s)):
                if (progress := self._poll()) is None:
                    progress = self._latest
                    self._check_limits(progress)
                self._latest = progress
                self._rows_in_files = progress.rows_in_files
                if is_due := time.monotonic() >= next_file:
                    next_file += self._every_s
                facts = self._facts(progress, progress.made_tokens)
                self._watch_bounds(progress, facts)
                progress_display.show(facts)
                if is_due:
                    self._write(facts)
            if self._stop_reason is None and (progress := self._poll()) is not None:
                self._count_files()
                facts = self._facts(progress, progress.output_tokens)
                self._watch_bounds(progress, facts)
                progress_display.show_last(facts)
                self._write(facts)

    def _poll(self) -> Progress | None:
        """Return the workers' progress, after logging their notes and checking the limits."""
        try:
            check_alive()
            self._gcs.check()
            # The check is a request on S3, so it is made only where the progress file is written.
            if self._run.output.is_local:
                self._run.check_current()
            progress = cast(Progress, ray.get(self._actor.snapshot.remote(), timeout=30))
        except JobError as error:
            self._stop(error)
            return None
        except OSError as error:  # the rows matter, not this
            log.debug("%s cannot be read now: %s", RUN, error)
            return None
        except ray.exceptions.RayError:
            # The cluster is ending, or too busy; the next look will tell.
            return None
        for level, line in progress.start_lines[self._num_start_lines :]:
            log.log(level, line)
        self._num_start_lines = len(progress.start_lines)
        for note in progress.notes[self._num_notes :]:
            log.warning(note)
        # There are fewer than before if the actor itself was started again.
        self._num_notes = len(progress.notes)
        self._log_workers(progress)
        if self._ready_at is None:
            self._ready_at = progress.ready_at
        self._check_limits(progress)
        return progress

    def _log_workers(self, progress: Progress) -> None:
        """Log once that a worker's planner failed, that the head does not fit, and each kernel or CUDA graph that does
        not run on a CUDA device.
        """
        for name, error in progress.planner_errors.items():
            line = f"worker {name} drafts nothing from now on: its planner failed ({error})"
            self._log_once(logging.WARNING, (name, "planner"), line)
        for warning in progress.draft_warnings.values():
            self._log_once(logging.WARNING, ("all", "head"), f"model.draft: {warning}")
        for name, reasons in progress.fallbacks.items():
            for part, reason in reasons.items():
                # In other cases the worker warned at its start.
                if not any(reason in line for _, line in progress.start_lines):
                    line = f"worker {name} runs without {FALLBACK_NAMES[part]}: {reason}"
                    self._log_once(logging.WARNING, (part, reason), line)

    def _log_once(self, level: int, key: tuple[str, str], line: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log.log(level, "%s", line)

    def _count_files(self) -> None:
        """Count the rows in the files themselves, since reports are lost if the ProgressActor is."""
        try:
            reported = cast(dict[str, int], ray.get(self._actor.files.remote(), timeout=30))
            self._rows_in_files = count_rows(self._run.data, self._run.attempt, reported)
        except (OSError, JobError, ray.exceptions.RayError) as error:  # the rows matter, not this
            log.debug("the files cannot be counted now: %s", error)

    def _write(self, facts: Facts) -> None:
        """Write the progress file. A failure is logged once the job is done: a failed write of rows says more."""
        try:
            self._run.publish(PROGRESS, json_bytes(facts))
            self._write_error = ""
        except JobError as error:
            self._stop(error)
        except OSError as error:  # the rows matter, not this
            self._write_error = str(error)
            log.debug("%s cannot be written: %s", PROGRESS, error)

    def _facts(self, progress: Progress, num_tokens: int) -> Facts:
        """Return the facts that are logged and written to ``_progress.json``.

        Args:
            num_tokens: tokens whose rate is tokens_per_s: while the job runs those that engines
                made, since rows in flight are work, and at its end those of answered rows.
        """
        now = time.monotonic()
        waiting_for = waited_for(progress, ray_messages.lacks_memory(now))
        running = now - (self._ready_at or now)
        fleet = None
        if self._scaler is not None:
            fleet = (self._scaler.paid.total, self._scaler.paid.spot)
        self._meter.update(len(progress.workers), now, fleet)
        rows_left = max(0, self._num_rows - progress.rows)
        return {
            "run_id": self._run.run_id,
            "attempt": self._run.attempt,
            "written_at": now_text(),
            "elapsed_s": round(now - self._started, 1),
            "working_s": round(running, 1),  # since the first worker was ready
            "workers_started": progress.starts,
            "workers_ready": len(progress.workers),
            "starting": progress.starting,
            "waiting_for": waiting_for,
            "rows_to_do": self._num_rows,
            "rows_done": min(
                progress.rows, self._num_rows
            ),  # a lost worker's rows are made, and counted, again
            "rows_in_files": self._rows_in_files,
            "errors": progress.errors,
            "output_tokens": progress.output_tokens,
            "tokens_per_s": num_tokens / running if running >= MIN_RATE_WINDOW_S else None,
            "mean_acceptance_length": progress.mean_acceptance_length,
            "busy_slots": progress.busy_slots,
            "engine_s": round(progress.engine_s, 1),
            "engine_busy": progress.engine_s / running
            if running >= MIN_RATE_WINDOW_S
            else None,  # CPUs that the pipeline leaves
            "engine": progress.work,
            "planner_errors": progress.planner_errors,
            "draft_warnings": progress.draft_warnings,
            "fallbacks": progress.fallbacks,
            USAGE: self._meter.usage(),  # the time of all attempts
            "seconds_left": rows_left * running / progress.rows
            if progress.rows and running >= MIN_RATE_WINDOW_S
            else None,
        }

    def _watch_bounds(self, progress: Progress, facts: Facts) -> None:
        """Add the forecast to the facts, log once what will be missed, and stop admission at a bound."""
        if self._bounds == NO_BOUNDS:
            return
        forecast = self._bounds.forecast(self._pace(progress, facts), datetime.now(timezone.utc))
        facts["forecast"] = forecast.as_json()
        usage = self._meter.usage() or {"elapsed_s": facts["elapsed_s"]}
        self._history.add(usage["elapsed_s"], facts, self._num_workers(progress))
        facts["history"] = self._history.points
        if progress.rows >= min(MIN_ROWS_FOR_FORECAST, self._num_rows // 10 + 1):
            for warning, line in self._bounds.warnings(forecast).items():
                if self._on_warning is not None and (warning, "bound") not in self._logged:
                    self._on_warning(warning, line)
                self._log_once(logging.WARNING, (warning, "bound"), line)
        if self.bound_reached is None:
            self.bound_reached = self._bounds.reason_to_stop(forecast)
            if self.bound_reached is not None:
                log.warning(
                    "execution.%s is reached: rows in engines end, no further row begins",
                    self.bound_reached,
                )
        if self.bound_reached is not None:  # again, since the actor may have been started again
            self._actor.stop_admission.remote()
            if self._scaler is not None:
                self._scaler.stop_admission()

    def _num_workers(self, progress: Progress) -> int:
        """Return the workers that are paid for now."""
        if self._scaler is not None:
            return self._scaler.paid.total
        return self._meter.num_paid(len(progress.workers))

    def _pace(self, progress: Progress, facts: Facts) -> Pace:
        """Observe the run, let the fleet follow, and return how it goes."""
        usage = self._meter.usage()
        has_rows_left = facts["rows_done"] < self._num_rows
        drain_s = DRAIN_ROWS * progress.row_s if has_rows_left else 0.0
        seconds_left = facts["seconds_left"]
        likely_left = None
        surely_left = None
        if self._foresight is not None:
            now = time.monotonic()
            if self._scaler is not None:
                num_ready = self._scaler.step(self._foresight, progress, now, has_rows_left)
            else:
                num_ready = min(len(progress.workers), self._meter.num_paid(len(progress.workers)))
            self._foresight.observe(progress, num_ready, now)
            outlook = self._foresight.outlook
            foreseen = outlook.seconds_left(num_ready) if progress.rows else None
            if foreseen is not None and has_rows_left:
                seconds_left = foreseen.expected
                likely_left = foreseen.likely
                surely_left = foreseen.sure
                drain_s = max(drain_s, outlook.drain_s(SURE))
                facts["seconds_left"] = seconds_left
        return Pace(
            seconds_left=seconds_left,
            drain_s=drain_s,
            worker_s=None if usage is None else usage["worker_s"],
            num_workers=self._num_workers(progress),
            gpus_per_worker=self._num_gpus,
            spot_s=0.0 if usage is None else usage.get("spot_s", 0.0),
            num_spot=0 if self._scaler is None else self._scaler.paid.spot,
            likely_left=likely_left,
            surely_left=surely_left,
        )

    def _check_limits(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.rows > self._num_rows_seen:
            self._num_rows_seen = progress.rows
            self._advanced_at = now
        waiting_for = waited_for(progress, ray_messages.lacks_memory(now))
        reason = self._limits.exceeded_by(progress) or stall_error(
            waiting_for, now - self._advanced_at
        )
        if reason is not None:
            self._stop(reason)

    def _stop_without_raylet(self, reason: ClusterError) -> None:
        """Stop, and log the reason before: Ray's core may end this process before the main thread reports it."""
        if not self._closing.is_set():
            log.error("eagle-ray: %s", reason)
        self._stop(reason)

    def _stop(self, reason: Exception) -> None:
        # Ray is ending, which is not why the job ends.
        if not self._closing.is_set() and not is_interrupted():
            self._stop_reason = reason
            self._closing.set()
            interrupt()


def _progress_before(run: Run) -> Facts | None:
    """Return the contents of ``_progress.json`` from earlier attempts of this run, or None."""
    with suppress(OSError):
        facts = read_derived_record(run.output / PROGRESS, ProgressRecord)
        return facts if facts and facts.get("run_id") == run.run_id else None
    return None


def count_rows(data: StoragePath, attempt: int, reported: Mapping[str, int]) -> int:
    """Return the rows in the part files of an attempt.

    Args:
        reported: rows of files that writers have reported, by path below data/; these files are not
            opened.
    """
    total = 0
    for file in data.glob(f"**/part-{attempt:03d}-*.parquet"):
        name = file.relative_to(data)
        if name is not None and name in reported:
            total += reported[name]
        else:
            with open_part(file) as parquet:
                total += parquet.metadata.num_rows
    return total


@contextmanager
def display(every_s: float) -> Iterator[Lines | Bar]:
    """Return a progress bar if stderr is a terminal, else a log line every every_s seconds."""
    if sys.stderr.isatty():
        with bar() as shown:
            yield shown
    else:
        yield Lines(every_s, time.monotonic() + every_s)


@dataclass(slots=True)
class Lines:
    """Progress as log lines: one every every_s seconds, the first at next_at."""

    every_s: float
    next_at: float

    def show(self, facts: Facts) -> None:
        """Show the current facts; called about once a second."""
        if time.monotonic() >= self.next_at:
            self.show_last(facts)
            self.next_at += self.every_s

    def show_last(self, facts: Facts) -> None:
        """Show the final facts."""
        log.info(progress_line(facts))


@contextmanager
def bar() -> Iterator[Bar]:
    """Show a progress bar on stderr; log lines scroll past above it."""
    from rich.console import Console  # half a second of imports that only a terminal needs
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with (
        Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress,
        log_above(),
    ):
        yield Bar(progress, progress.add_task(LOADING, total=None))


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar.

    Attributes:
        progress: rich's progress display.
        task: the display's only task, whose text has two lines of at most 80 columns.
    """

    progress: Any
    task: int

    def show(self, facts: Facts) -> None:
        rows, *rest = format_progress(facts)
        loaded = facts["workers_ready"] > 0
        self.progress.update(
            self.task,
            description=f"{rows}\n{' · '.join(rest)}",
            completed=facts["rows_done"],
            total=facts["rows_to_do"] if loaded else None,  # None: a bar that only moves
        )

    def show_last(self, facts: Facts) -> None:
        self.show(facts)


@contextmanager
def log_above() -> Iterator[None]:
    """Make stderr log handlers write above the bar."""
    handlers = [handler for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:  # None: it wrote there already
                handler.setStream(stream)


def progress_line(facts: Facts) -> str:
    return f"[{facts['elapsed_s']:5.0f} s] {' · '.join(format_progress(facts))}"
