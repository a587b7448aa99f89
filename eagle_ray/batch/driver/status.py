"""RunStatus: the state of a run, from the files of its output directory only; and the progress display of a live one.

A killed run cannot record its end. On its own machine its process is looked up; elsewhere a run without a sign of
life for long is called silent. A running job shows the fields of ``_progress.json`` as a log line every few seconds, or
as a bar in a terminal.

    print(status_text(status_of(StoragePath.of("runs/a"))))
    # run 5f0c2a91d3b7 in runs/a: running, attempt 2 (since 2026-11-21T19:02:11+00:00)
    # last sign of life 4 s ago: 40 of 96 rows, 32 in files, 0 errors · 812 tokens/s · tau 4.31 · 17 s left
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from eagle_ray.config.records import ProgressRecord, SummaryRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.report.text import number, render
from eagle_ray.runs.layout import PROGRESS, RUN, SUCCESS, SUMMARY, read_derived_record, read_shard_plan, shard_outputs
from eagle_ray.runs.lease import Process
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
LOADING = "loading the models"
INTERRUPTED_OUTCOME = "KeyboardInterrupt"
SILENCE_INTERVALS = 6  # times logging.progress_every_s
NO_TOTAL = "its counts are left out. The run's command makes it again"
MIN_SILENCE_S = 60.0  # loading a model takes as long
Facts = dict[str, Any]  # the fields of ``_progress.json``


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of one run.

    Attributes:
        state: done, running, killed (its process is gone from this machine), silent (no sign of life for long: probably
            killed) or stopped.
        outcome: why it stopped.
        quiet_s: seconds since its last sign of life.
        process: the driver's, if recorded.
        progress: ``_progress.json`` of this attempt.
        total: the counts of ``_summary.json`` of a finished run.
    """

    output: str
    run_id: str
    state: str
    attempt: int
    started_at: str
    finished_at: str | None
    outcome: str | None
    quiet_s: float
    process: Process | None
    progress: Facts | None
    total: dict[str, Any] | None


def status_of(output: StoragePath, now: datetime | None = None) -> RunStatus:
    """Return the status. Raises ConfigError if the directory has no run, OutputDamaged if its manifest
    cannot be read.
    """
    found = Run.inspect(output)
    manifest = found.manifest
    if manifest is None:
        raise ConfigError(f"{output} holds no run (it has no {RUN}): give a run's output.path")
    last = found.last_attempt
    progress = read_derived_record(output / PROGRESS, ProgressRecord, "it is left out")
    if progress and (progress.get("run_id"), progress.get("attempt")) != (manifest["run_id"], last["attempt"]):
        progress = None  # an earlier attempt's
    last_sign_at = (progress or {}).get("written_at") or last["started_at"]
    quiet_s = ((now or datetime.now(timezone.utc)) - datetime.fromisoformat(last_sign_at)).total_seconds()
    driver = found.process
    is_done = found.is_complete
    max_quiet_s = max(MIN_SILENCE_S, SILENCE_INTERVALS * manifest["config"]["logging"]["progress_every_s"])
    return RunStatus(
        output=str(output),
        run_id=manifest["run_id"],
        state="done" if is_done else "stopped" if "outcome" in last else _liveness(driver, quiet_s, max_quiet_s),
        attempt=last["attempt"],
        started_at=last["started_at"],
        finished_at=last.get("finished_at"),
        outcome=last.get("outcome"),
        quiet_s=max(0.0, quiet_s),
        process=driver,
        progress=progress,
        total=(read_derived_record(output / SUMMARY, SummaryRecord, NO_TOTAL) or {}).get("total") if is_done else None,
    )


def sharded_statuses(root: StoragePath) -> dict[str, RunStatus | None]:
    """Return the status of each shard of an output, None for one that has not started. Without shards: none."""
    plan = read_shard_plan(root)
    outputs = shard_outputs(root, plan["count"]) if plan else {}
    return {str(shard): status_of(output) if (output / RUN).exists() else None for shard, output in outputs.items()}


def sharded_status_text(root: StoragePath) -> str:
    """Return one line for each shard, and what comes next."""
    statuses = sharded_statuses(root)
    lines = [[shard, *_shard_cells(status)] for shard, status in statuses.items()]
    table = render(["shard", "state", "attempts", "rows", "errors"], lines)
    done = sum(status is not None and status.state == "done" for status in statuses.values())
    if (root / SUCCESS).exists():
        end = "finished"
    elif done == len(statuses):
        end = f"not finished. Run eagle-ray finish {root.display_path}"
    else:
        end = "run the others with their --shard"
    return f"{table}\n{root}: {done} of {len(statuses)} shards complete, {end}"


def sharded_status_json(root: StoragePath) -> str:
    """Return the status of each shard as JSON."""
    statuses = {shard: asdict(status) if status else None for shard, status in sharded_statuses(root).items()}
    facts = {"state": "done" if (root / SUCCESS).exists() else "not finished", "shards": statuses}
    return json.dumps(facts, indent=2, ensure_ascii=False)


def _shard_cells(status: RunStatus | None) -> list[str]:
    if status is None:
        return ["not started", "0", number(None), number(None)]
    progress = status.progress or {}
    total = status.total or {"rows": progress.get("rows_in_files"), "errors": progress.get("errors")}
    return [status.state, str(status.attempt), number(total["rows"]), number(total["errors"])]


def status_json(status: RunStatus) -> str:
    """Return the status as JSON."""
    return json.dumps(asdict(status), indent=2, ensure_ascii=False)


def status_text(status: RunStatus) -> str:
    """Return the status in a few plain lines."""
    head = f"run {status.run_id} in {status.output}: "
    again = "Run the same command again to resume."
    if status.state == "done":
        return f"{head}done, {status.finished_at or 'just now'}{_totals_text(status.total)}"
    if status.state == "stopped":
        why = _stop_reason(status.outcome)
        hint = "" if "same command" in why else f". {again}"
        lines = [f"{head}stopped, attempt {status.attempt} at {status.finished_at}: {why}{hint}"]
    else:
        lines = [f"{head}{status.state}, attempt {status.attempt} (since {status.started_at})"]
    if status.state == "killed" and status.process is not None:
        process = f"process {status.process.pid} is gone from {status.process.host}"
        lines.append(f"{process} and recorded no outcome (killed, or its disk was full). {again}")
    if status.state == "silent":
        lines.append(f"no sign of life for {status.quiet_s:,.0f} s. If it was killed: {again}")
    return "\n".join([*lines, _progress_line(status)])


def _progress_line(status: RunStatus) -> str:
    """Return the attempt's progress when it last wrote it, and for a live run the time since then."""
    if not status.progress:
        return "this attempt has recorded no progress yet"
    progress_text = " · ".join(format_progress(status.progress))
    ended = status.state == "stopped"
    return (
        f"its last progress: {progress_text}"
        if ended
        else f"last sign of life {status.quiet_s:,.0f} s ago: {progress_text}"
    )


def _liveness(process: Process | None, quiet_s: float, max_quiet_s: float) -> str:
    if process is not None and process.is_gone():
        return "killed"
    return "running" if quiet_s <= max_quiet_s else "silent"


def _stop_reason(outcome: str | None) -> str:
    return "interrupted" if outcome == INTERRUPTED_OUTCOME else outcome or "no reason given"


def _totals_text(total: dict[str, Any] | None) -> str:
    if total is None:
        return ""
    return f"\n{total['rows']:,} rows, {total['errors']:,} errors, {total['output_tokens']:,} tokens"


class Display(Protocol):
    def show(self, facts: Facts) -> None:
        """Show the current facts; called about once a second."""

    def show_last(self, facts: Facts) -> None:
        """Show the final facts."""


@contextmanager
def display(every_s: float) -> Iterator[Display]:
    """Return a progress bar if stderr is a terminal, else a log line every every_s seconds."""
    if sys.stderr.isatty():
        with bar() as shown:
            yield shown
    else:
        yield Lines(every_s, time.monotonic() + every_s)


@dataclass(slots=True)
class Lines:
    """A log line every every_s seconds, the first at next_at."""

    every_s: float
    next_at: float

    def show(self, facts: Facts) -> None:
        if time.monotonic() >= self.next_at:
            self.show_last(facts)
            self.next_at += self.every_s

    def show_last(self, facts: Facts) -> None:
        log.info(line_of(facts))


@contextmanager
def bar() -> Iterator[Display]:
    """Show a progress bar on stderr; log lines scroll past above it."""
    from rich.console import Console  # half a second of imports that only a terminal needs
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress, _log_above():
        yield Bar(progress, progress.add_task(LOADING, total=None))


@dataclass(frozen=True, slots=True)
class Bar:
    """progress: rich's. task: its one task, with a text of two lines of at most 80 columns."""

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
def _log_above() -> Iterator[None]:
    """Make stderr log handlers write above the bar."""
    handlers = [handler for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:  # None: it wrote there already
                handler.setStream(stream)


def line_of(facts: Facts) -> str:
    return f"[{facts['elapsed_s']:5.0f} s] {' · '.join(format_progress(facts))}"


def format_progress(facts: Facts) -> list[str]:
    """Return the known facts as text, the rows first."""
    waiting = [f"waiting for {facts['waiting_for']}"] if facts.get("waiting_for") else []
    if not facts["workers_ready"]:
        return waiting or [f"{LOADING}: {facts['starting']}" if facts.get("starting") else LOADING]
    done, wanted = facts["rows_done"], facts["rows_to_do"]
    parts = [f"{done} of {wanted} rows, {facts['rows_in_files']} in files, {facts['errors']} errors"]
    if facts["tokens_per_s"]:
        parts.append(f"{facts['tokens_per_s']:,.0f} tokens/s")
    if facts["mean_acceptance_length"]:
        parts.append(f"tau {facts['mean_acceptance_length']:.2f}")
    if facts["tokens_per_s"] and facts["busy_slots"]:
        parts.append(f"slots {facts['busy_slots']:.0%} busy")
    if facts["seconds_left"]:
        parts.append(f"{facts['seconds_left']:,.0f} s left")
    return parts + waiting
