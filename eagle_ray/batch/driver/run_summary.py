"""The summary of a run: what ``_summary.json`` and ``report.html`` say, counted from its files.

summarize_run(run)["total"]["rows"]      # 480
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import pyarrow.compute as pc

from eagle_ray.config.records import EstimateRecord, ProgressRecord, SummaryRecord
from eagle_ray.core.errors import one_line, shortened
from eagle_ray.report.cost import USAGE, cost
from eagle_ray.report.html import page
from eagle_ray.report.summary import ReadColumns, budgets, summarise, summary_json
from eagle_ray.report.text import run_table
from eagle_ray.report.timeline import timeline
from eagle_ray.runs.layout import ESTIMATE, PROGRESS, REPORT, SUMMARY, data_of, read_derived_record
from eagle_ray.runs.part_files import has_column, read_tables
from eagle_ray.runs.run import Run, manifest_of
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
GROUP_BY = "category"  # the table has a line for each of its values, where the input carries such a column
TURN = "turn_index"
ERRORS_SHOWN = 3
COUNTED_AGAIN = "the rows are counted again"
NO_PROGRESS = "its numbers are left out until rows are generated again"
NO_ESTIMATE = "it is left out. eagle-ray validate --estimate writes it again"


def stored_summary(output: StoragePath) -> dict[str, Any] | None:
    """Return ``_summary.json`` if it has everything that a report shows, else None: it can be made again."""
    file, manifest = output / SUMMARY, Run.inspect(output).manifest
    summary = read_derived_record(file, SummaryRecord, COUNTED_AGAIN)
    if summary is None or manifest is None:
        return None
    try:
        run_table(summary)
        page(summary, manifest)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.warning("%s is damaged (%s: %s): %s", file, type(error).__name__, one_line(error), COUNTED_AGAIN)
        return None
    return summary


def summarize_run(run: Run, parts: Sequence[StoragePath] = ()) -> dict[str, Any]:
    """Return the content of ``_summary.json`` for what the files hold now. parts: as of facts_of_attempt."""
    by = GROUP_BY if has_column(run.data, GROUP_BY) else None
    read = partial(read_tables, run.data)
    over_time = {"timeline": timeline(read), "budget": budgets(read)}
    counts = summary_json(summarise(read, by), by)
    return counts | _turns(run, read) | over_time | facts_of_attempt(run, counts["total"], parts)


def facts_of_attempt(run: Run, total: dict[str, Any], parts: Sequence[StoragePath] = ()) -> dict[str, Any]:
    """Return what the summary says of the attempt, which may differ although the files are the same.

    total: the run's counts. parts: outputs of shards that made the rows, if the run itself did not.
    """
    estimate = read_derived_record(run.output / ESTIMATE, EstimateRecord, NO_ESTIMATE)
    is_same = estimate is not None and estimate["config_hash"] == run.config_hash and estimate["rows"] == total["rows"]
    price = manifest_of(run.output)["config"]["execution"].get("price_per_hour")
    last_work = _progress_of(run.output)
    work = {output: _progress_of(output) for output in parts} or {run.output: last_work}
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config_hash": run.config_hash,
        "last_work": last_work,
        "cost": cost(total, _usage(work), price),
        "estimate": estimate if is_same else None,
    }


def _progress_of(output: StoragePath) -> dict[str, Any] | None:
    return read_derived_record(output / PROGRESS, ProgressRecord, NO_PROGRESS)


def _usage(work: Mapping[StoragePath, Mapping[str, Any] | None]) -> dict[str, float] | None:
    """Return the longest time of any output, and the sum of all workers' times.

    None if no progress is known, or if outputs had workers with different numbers of GPUs. work: progress by output.
    """
    usages = [
        progress[USAGE]
        for output, progress in work.items()
        if progress and progress.get(USAGE) and progress.get("run_id") == manifest_of(output)["run_id"]
    ]
    if len({usage["gpus_per_worker"] for usage in usages}) != 1:
        return None
    return {
        "elapsed_s": max(usage["elapsed_s"] for usage in usages),
        "worker_s": sum(usage["worker_s"] for usage in usages),
        "gpus_per_worker": usages[0]["gpus_per_worker"],
    }


def _turns(run: Run, read: ReadColumns) -> dict[str, Any]:
    """Return the counts of each turn, if the run's rows are conversations."""
    if not manifest_of(run.output)["config"]["input"].get("columns", {}).get("turns"):
        return {}
    return {"turns": {turn: counts.as_json() for turn, counts in summarise(read, TURN).items()}}


def store_report(run: Run, summary: dict[str, Any]) -> None:
    """Write the report of a finished run. A failure is logged only, because rows and summary are complete."""
    place = (run.output / REPORT).display_path
    run.check_current()
    try:
        write_report(run.output, summary)
        log.info("report in %s", place)
    except OSError as error:
        log.warning("%s could not be written: %s. eagle-ray report writes it later", place, error.strerror or error)


def write_report(output: StoragePath, summary: dict[str, Any]) -> None:
    """Write ``report.html`` from a summary and the run's manifest."""
    (output / REPORT).write_atomic(page(summary, manifest_of(output)).encode())


def counted_rows(output: StoragePath, since: datetime | None = None) -> tuple[int | None, int | None]:
    """Return rows and error rows of the summary; with `since`, those that workers have reported after that time.

    Both are None if they are not known.
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
