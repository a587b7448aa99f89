"""RunStatus: the state of a run, from the files of its output directory only.

A killed run cannot record its end. On its own machine its process is looked up; elsewhere a run without a sign of
life for long is called silent.

    print(status_text(status_of(StoragePath.of("runs/a"))))
    # run 5f0c2a91d3b7 in runs/a: running, attempt 2 (since 2026-11-21T19:02:11+00:00)
    # last sign of life 4 s ago: 40 of 96 rows, 32 in files, 0 errors · 812 tokens/s · tau 4.31 · 17 s left
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from typing import Any

from eagle_ray.batch.driver.display import Facts, format_progress
from eagle_ray.config.records import ProgressRecord, SummaryRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.report.text import number, render
from eagle_ray.runs.layout import read_derived_record
from eagle_ray.runs.manifest import PROGRESS, RUN, SUCCESS, SUMMARY, read_manifest
from eagle_ray.runs.process_id import Process
from eagle_ray.runs.sharding import read_shard_plan, shard_outputs
from eagle_ray.storage.path import StoragePath

INTERRUPTED_OUTCOME = "KeyboardInterrupt"
SILENCE_INTERVALS = 6  # times logging.progress_every_s
NO_TOTAL = "its counts are left out. The run's command makes it again"
MIN_SILENCE_S = 60.0  # loading a model takes as long


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
    manifest = read_manifest(output)
    if manifest is None:
        raise ConfigError(f"{output} holds no run (it has no {RUN}): give a run's output.path")
    last = manifest["attempts"][-1]
    progress = read_derived_record(output / PROGRESS, ProgressRecord, "it is left out")
    if progress and (progress.get("run_id"), progress.get("attempt")) != (manifest["run_id"], last["attempt"]):
        progress = None  # an earlier attempt's
    last_sign_at = (progress or {}).get("written_at") or last["started_at"]
    quiet_s = ((now or datetime.now(timezone.utc)) - datetime.fromisoformat(last_sign_at)).total_seconds()
    process = last.get("process")
    is_known = isinstance(process, dict)  # a number in older records
    driver = Process(**{each.name: process[each.name] for each in fields(Process)}) if is_known else None
    is_done = (output / SUCCESS).exists()
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
