"""Read the state and the summary of a run from its output directory.

A killed run cannot record its end. On its own machine its process is looked up; elsewhere a run
without a sign of life for long is called silent. The summary, which ``_summary.json`` and
``report.html`` show, is counted from the rows.

    print(status_text(status_of(StoragePath.of("runs/a"))))
    # run 5f0c2a91d3b7 in runs/a: running, attempt 2 (since 2026-11-21T19:02:11+00:00)
    # last sign of life 4 s ago: 40 of 96 rows, 32 in files, 0 errors · 812 tokens/s · tau 4.31 · 17 s left

    summarize_run(run)["total"]["rows"]      # 480
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pyarrow.compute as pc

from eagle_ray.config.records import EstimateRecord, ProgressRecord, SummaryRecord
from eagle_ray.core.errors import ConfigError, one_line, shortened
from eagle_ray.core.json_text import dump_json
from eagle_ray.report.choices import ANSWER_COLUMN, choices_summary
from eagle_ray.report.cost import USAGE, bounds_outcome, cost, money
from eagle_ray.report.documents import documents_summary
from eagle_ray.report.html import page
from eagle_ray.report.promises import promises
from eagle_ray.report.run_table import run_table
from eagle_ray.report.summary import budgets, summarise, summary_json
from eagle_ray.report.text import number, render
from eagle_ray.report.timeline import timeline
from eagle_ray.runs.job_errors import RESUME
from eagle_ray.runs.layout import (
    ESTIMATE,
    PROGRESS,
    REPORT,
    RUN,
    SHARD_PLAN,
    SUCCESS,
    SUMMARY,
    data_of,
    read_derived_record,
    read_shard_plan,
    shard_outputs,
)
from eagle_ray.runs.part_files import has_column, part_files, read_tables
from eagle_ray.runs.process_identity import Process
from eagle_ray.runs.run import Run, RunState, manifest_of
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
LOADING = "loading the models"
INTERRUPTED_OUTCOME = "KeyboardInterrupt"
SILENCE_INTERVALS = 6  # times logging.progress_every_s
NO_TOTAL = "its counts are left out. The run's command makes it again"
MIN_SILENCE_S = 60.0  # loading a model takes as long
Facts = dict[str, Any]  # the fields of ``_progress.json``
# The table has a line for each of its values, where the input carries such a column.
GROUP_BY = "category"
TURN_COLUMN = "turn_index"
ERRORS_SHOWN = 3
COUNTED_AGAIN = "the rows are counted again"
NO_PROGRESS = "its numbers are left out until rows are generated again"
NO_ESTIMATE = "it is left out. eagle-ray validate --estimate writes it again"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of one run.

    Attributes:
        state: done, running, killed (its process is gone from this machine), silent (no sign of
            life for long: probably killed) or stopped.
        outcome: why it stopped.
        quiet_s: seconds since its last sign of life.
        process: the driver's process, if recorded.
        progress: content of ``_progress.json`` of this attempt.
        total: counts in ``_summary.json`` of a finished run.
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
    """Return the status. Raises ConfigError if the directory has no run, OutputDamaged if its
    manifest cannot be read.
    """
    state = state_of(output)
    manifest = state.record
    last = state.last_attempt
    progress = read_derived_record(output / PROGRESS, ProgressRecord, "it is left out")
    if progress and (progress.get("run_id"), progress.get("attempt")) != (
        manifest["run_id"],
        last["attempt"],
    ):
        progress = None  # an earlier attempt's
    last_sign_at = (progress or {}).get("written_at") or last["started_at"]
    quiet_s = (
        (now or datetime.now(timezone.utc)) - datetime.fromisoformat(last_sign_at)
    ).total_seconds()
    driver = state.process
    is_done = state.is_complete
    max_quiet_s = max(
        MIN_SILENCE_S, SILENCE_INTERVALS * manifest["config"]["logging"]["progress_every_s"]
    )
    total = None
    if is_done:
        state_name = "done"
        summary = read_derived_record(output / SUMMARY, SummaryRecord, NO_TOTAL) or {}
        total = summary.get("total")
    elif "outcome" in last:
        state_name = "stopped"
    else:
        state_name = _liveness(driver, quiet_s, max_quiet_s)
    return RunStatus(
        output=str(output),
        run_id=manifest["run_id"],
        state=state_name,
        attempt=last["attempt"],
        started_at=last["started_at"],
        finished_at=last.get("finished_at"),
        outcome=last.get("outcome"),
        quiet_s=max(0.0, quiet_s),
        process=driver,
        progress=progress,
        total=total,
    )


def state_of(output: StoragePath) -> RunState:
    """Return the state of a directory's run. Raises ConfigError if it has none, OutputDamaged if it is damaged."""
    state = Run.inspect(output)
    if state.manifest is not None:
        return state
    if (output / SHARD_PLAN).exists():
        raise ConfigError(
            f"{output}: its shards are not finished: run eagle-ray finish {output.display_path} first"
        )
    if part_files(data_of(output)):
        raise ConfigError(
            f"{output}: its {RUN} is gone, and rows are there: adopt them with eagle-ray repair {output.display_path}, "
            "which needs the run's configuration (-c, --set)"
        )
    raise ConfigError(f"{output} holds no run (no {RUN}): give the output directory of a run")


def sharded_statuses(root: StoragePath) -> dict[str, RunStatus | None]:
    """Return the status of each shard of an output, None for a shard that has not started. The list
    is empty without shards."""
    plan = read_shard_plan(root)
    outputs = shard_outputs(root, plan["count"]) if plan else {}
    return {
        str(shard): status_of(output) if (output / RUN).exists() else None
        for shard, output in outputs.items()
    }


def sharded_status_text(root: StoragePath) -> str:
    """Return a line for each shard, and the command to run next."""
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
    statuses = {
        shard: asdict(status) if status else None
        for shard, status in sharded_statuses(root).items()
    }
    facts = {"state": "done" if (root / SUCCESS).exists() else "not finished", "shards": statuses}
    return dump_json(facts, indent=2, ensure_ascii=False)


def _shard_cells(status: RunStatus | None) -> list[str]:
    if status is None:
        return ["not started", "0", number(None), number(None)]
    progress = status.progress or {}
    total = status.total or {
        "rows": progress.get("rows_in_files"),
        "errors": progress.get("errors"),
    }
    return [status.state, str(status.attempt), number(total["rows"]), number(total["errors"])]


def status_json(status: RunStatus) -> str:
    """Return the status as JSON."""
    return dump_json(asdict(status), indent=2, ensure_ascii=False)


def status_text(status: RunStatus) -> str:
    """Return the status in a few plain lines."""
    head = f"run {status.run_id} in {status.output}: "
    if status.state == "done":
        return f"{head}done, {status.finished_at or 'just now'}{_totals_text(status.total)}"
    if status.state == "stopped":
        why = _stop_reason(status.outcome)
        hint = "" if "same command" in why else f". {RESUME}"
        lines = [f"{head}stopped, attempt {status.attempt} at {status.finished_at}: {why}{hint}"]
    else:
        lines = [f"{head}{status.state}, attempt {status.attempt} (since {status.started_at})"]
    if status.state == "killed" and status.process is not None:
        process = f"process {status.process.pid} is gone from {status.process.host}"
        lines.append(f"{process} and recorded no outcome (killed, or its disk was full). {RESUME}")
    if status.state == "silent":
        lines.append(f"no sign of life for {status.quiet_s:,.0f} s. If it was killed: {RESUME}")
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
    return (
        f"\n{total['rows']:,} rows, {total['errors']:,} errors, {total['output_tokens']:,} tokens"
    )


def format_progress(facts: Facts) -> list[str]:
    """Return the known facts as text, the rows first."""
    waiting = [f"waiting for {facts['waiting_for']}"] if facts.get("waiting_for") else []
    if not facts["workers_ready"]:
        return waiting or [f"{LOADING}: {facts['starting']}" if facts.get("starting") else LOADING]
    done = facts["rows_done"]
    wanted = facts["rows_to_do"]
    parts = [
        f"{done} of {wanted} rows, {facts['rows_in_files']} in files, {facts['errors']} errors"
    ]
    if facts["tokens_per_s"]:
        parts.append(f"{facts['tokens_per_s']:,.0f} tokens/s")
    if facts["mean_acceptance_length"]:
        parts.append(f"tau {facts['mean_acceptance_length']:.2f}")
    if facts["tokens_per_s"] and facts["busy_slots"]:
        parts.append(f"slots {facts['busy_slots']:.0%} busy")
    if facts["seconds_left"]:
        parts.append(f"{facts['seconds_left']:,.0f} s left")
    return parts + _bounds_parts(facts.get("forecast")) + waiting


def _bounds_parts(forecast: Mapping[str, Any] | None) -> list[str]:
    """Return the end that is foreseen next to the deadline, and the dollars next to their limit."""
    if forecast is None:
        return []
    parts = []
    if forecast["finish_by"] is not None and forecast["ends_at"] is not None:
        parts.append(
            f"ends {_clock(forecast['ends_at'])}{_sure_end(forecast)}, by {_clock(forecast['finish_by'])} wanted"
        )
    if forecast["max_dollars"] is not None and forecast["spent"] is not None:
        parts.append(f"{money(forecast['spent'])} of {money(forecast['max_dollars'])} spent")
    return parts


def _sure_end(forecast: Mapping[str, Any]) -> str:
    """Return the end in 95 % of cases, where it is known."""
    moment = forecast.get("surely_at")
    return f" (95 %: {_clock(moment)})" if moment else ""


def _clock(moment: str) -> str:
    """Return a moment of a record in this machine's zone: 11-30 06:00."""
    return datetime.fromisoformat(moment).astimezone().strftime("%m-%d %H:%M")


def stored_summary(output: StoragePath) -> dict[str, Any] | None:
    """Return ``_summary.json`` if it has all that a report needs, else None."""
    file = output / SUMMARY
    manifest = Run.inspect(output).manifest
    summary = read_derived_record(file, SummaryRecord, COUNTED_AGAIN)
    if summary is None or manifest is None:
        return None
    try:
        run_table(summary)
        page(summary, manifest)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.warning(
            "%s is damaged (%s: %s): %s", file, type(error).__name__, one_line(error), COUNTED_AGAIN
        )
        return None
    return summary


def summarize_run(run: Run, parts: Sequence[StoragePath] = ()) -> dict[str, Any]:
    """Compute the content of ``_summary.json`` from the rows in the files.

    Args:
        parts: outputs of shards, as in facts_of_attempt.
    """
    columns = manifest_of(run.output)["config"]["input"].get("columns", {})
    counts = summarize_rows(run.data, bool(columns.get("turns")))
    return counts | facts_of_attempt(run, counts["total"], parts)


def summarize_rows(data: StoragePath, has_turns: bool) -> dict[str, Any]:
    """Return the part of ``_summary.json`` that is counted from the rows.

    Args:
        has_turns: whether the rows are turns of conversations.
    """
    by = GROUP_BY if has_column(data, GROUP_BY) else None
    read = partial(read_tables, data)
    over_time = {"timeline": timeline(read), "budget": budgets(read)}
    choices = choices_summary(read, has_column(data, ANSWER_COLUMN))
    documents = documents_summary(read)
    scored = {} if choices is None else {"choices": choices}
    scored |= {} if documents is None else {"documents": documents}
    counts = summary_json(summarise(read, by), by)
    turns = (
        {"turns": {turn: each.as_json() for turn, each in summarise(read, TURN_COLUMN).items()}}
        if has_turns
        else {}
    )
    return counts | turns | scored | over_time


def facts_of_attempt(
    run: Run, total: dict[str, Any], parts: Sequence[StoragePath] = ()
) -> dict[str, Any]:
    """Return the facts of the summary that do not follow from the rows, such as time, cost and versions.

    Args:
        total: counts of the run's rows.
        parts: outputs of the shards that made the rows, if the run itself did not.
    """
    estimate = read_derived_record(run.output / ESTIMATE, EstimateRecord, NO_ESTIMATE)
    is_same = (
        estimate is not None
        and estimate["config_hash"] == run.config_hash
        and estimate["rows"] == total["rows"]
    )
    price = manifest_of(run.output)["config"]["execution"].get("price_per_hour")
    last_work = _progress_of(run.output)
    work = {output: _progress_of(output) for output in parts} or {run.output: last_work}
    spent = cost(total, _usage(work), price)
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config_hash": run.config_hash,
        "last_work": last_work,
        "cost": spent,
        "bounds": _bounds(last_work, spent),
        "estimate": estimate if is_same else None,
    }


def _bounds(work: dict[str, Any] | None, spent: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the bounds of a run, what happened, and what was promised on the way."""
    outcome = bounds_outcome(work, spent)
    if outcome is None or work is None:
        return None
    history = work.get("history") or []
    return outcome | {"history": history, "promises": promises(history)}


def usage_of(output: StoragePath) -> tuple[dict[str, float] | None, bool]:
    """Return the seconds of the run and its workers over all attempts so far, and whether they are known.

    The seconds are None for a run that has recorded no progress yet (known), and for one whose
    record is damaged (unknown).
    """
    progress = _progress_of(output)
    if progress is None:
        return None, not (output / PROGRESS).exists()
    usage = progress.get(USAGE)
    return usage, usage is not None


def _progress_of(output: StoragePath) -> dict[str, Any] | None:
    return read_derived_record(output / PROGRESS, ProgressRecord, NO_PROGRESS)


def _usage(work: Mapping[StoragePath, Mapping[str, Any] | None]) -> dict[str, float] | None:
    """Return the longest time of any output, and the sum of all workers' times.

    None if no progress is known, or if outputs had workers with different numbers of GPUs.

    Args:
        work: progress by output.
    """
    usages = [
        progress[USAGE]
        for output, progress in work.items()
        if progress
        and progress.get(USAGE)
        and progress.get("run_id") == manifest_of(output)["run_id"]
    ]
    if len({usage["gpus_per_worker"] for usage in usages}) != 1:
        return None
    return {
        "elapsed_s": max(usage["elapsed_s"] for usage in usages),
        "worker_s": sum(usage["worker_s"] for usage in usages),
        "gpus_per_worker": usages[0]["gpus_per_worker"],
    }


def store_report(run: Run, summary: dict[str, Any]) -> None:
    """Write the report of a finished run. A failure is logged only, because rows and summary are complete."""
    place = (run.output / REPORT).display_path
    run.check_current()
    try:
        write_report(run.output, summary)
        log.info("report in %s", place)
    except OSError as error:
        log.warning(
            "%s could not be written: %s. eagle-ray report writes it later",
            place,
            error.strerror or error,
        )


def write_report(output: StoragePath, summary: dict[str, Any]) -> None:
    """Write ``report.html`` from a summary and the run's manifest."""
    (output / REPORT).write_atomic(page(summary, manifest_of(output)).encode())


def counted_rows(
    output: StoragePath, since: datetime | None = None
) -> tuple[int | None, int | None]:
    """Return the rows and the error rows that the summary counts, or None for each if unknown.

    Args:
        since: read them from the last progress report instead, if it is not older than this.
    """
    if since is None:
        total = (read_derived_record(output / SUMMARY, SummaryRecord) or {}).get("total", {})
        return total.get("rows"), total.get("errors")
    progress = _progress_of(output)
    if progress and datetime.fromisoformat(progress["written_at"]) >= since.replace(microsecond=0):
        return progress["rows_in_files"], progress["errors"]
    return None, None


def log_error_rows(output: StoragePath, num_errors: int) -> None:
    """Log the first few error rows and where all of them are."""
    for row in itertools.islice(_error_rows(data_of(output)), min(num_errors, ERRORS_SHOWN)):
        log.warning("error row %s: %s", shortened(row["request_id"]), row["error_message"])
    log.warning("all of them: the rows of %s with status 'error'", data_of(output).display_path)


def _error_rows(data: StoragePath) -> Iterator[dict[str, str]]:
    for table in read_tables(data, ["request_id", "status", "error_message"]):
        yield from table.filter(pc.equal(table["status"], "error")).to_pylist()
