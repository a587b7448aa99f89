"""Report on a finished or running run (numbers, table, HTML page), or compare two runs.

Reads what the run has written so far, one file at a time, and writes nothing but ``report.html``.
Needs neither Ray nor torch.

    print(review(StoragePath.of("runs/demo")))      # category   rows  errors  tokens   tau ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

from eagle_ray.batch.driver.status import (
    GROUP_BY,
    state_of,
    stored_summary,
    summarize_run,
    write_report,
)
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.report.comparison import side_by_side
from eagle_ray.report.run_table import run_table, side_by_side_table
from eagle_ray.report.scores import scores_text
from eagle_ray.runs.layout import REPORT, data_of
from eagle_ray.runs.part_files import has_column, read_tables
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath


def review(output: StoragePath, scores: dict[str, Any] | None = None) -> str:
    """Write the run's HTML report and return its table, both with scores if there are any. Raises
    ConfigError without a run.

    A report that cannot be written, as on a read-only file system, is mentioned below the table.
    """
    numbers = load_summary(output)
    table = run_table(numbers) + (f"\n\n{scores_text(scores)}\n" if scores else "")
    place = (output / REPORT).display_path
    try:
        write_report(output, numbers | {"scores": scores})
    except OSError as error:
        return f"{table}\n{place} could not be written: {error.strerror or error}"
    return f"{table}\nreport in {place}"


def review_json(output: StoragePath, scores: dict[str, Any] | None = None) -> str:
    """Return all numbers of the report, and of the scores, as JSON."""
    return dump_json(load_summary(output) | {"scores": scores}, indent=2)


def comparison(run_a: StoragePath, run_b: StoragePath) -> str:
    """Compare two runs over equal rows. Return a table, and where their outputs differ."""
    return f"A: {run_a}, B: {run_b}\n{side_by_side_table(compared(run_a, run_b))}"


def comparison_json(run_a: StoragePath, run_b: StoragePath) -> str:
    """Return all numbers of the comparison, and every row that differs, as JSON."""
    return dump_json(compared(run_a, run_b), indent=2)


def compared(run_a: StoragePath, run_b: StoragePath) -> dict[str, Any]:
    """Compare two runs. Raises ConfigError if either is no run or has no token ids, or if they share no row."""
    records = [state_of(run).record for run in (run_a, run_b)]
    try:
        by = GROUP_BY if all(has_column(data_of(run), GROUP_BY) for run in (run_a, run_b)) else None
        numbers = side_by_side(
            partial(read_tables, data_of(run_a)), partial(read_tables, data_of(run_b)), by
        ).as_json()
    except ValueError as error:
        raise ConfigError(f"{run_a}, {run_b}: {error}") from error
    if not numbers["rows"]["both"]:
        raise ConfigError(
            f"{run_a}, {run_b}: no row is in both: compare two runs over the same input"
        )
    return {
        "runs": {side: record["run_id"] for side, record in zip("ab", records, strict=True)}
    } | numbers


def load_summary(output: StoragePath) -> dict[str, Any]:
    """Return ``_summary.json`` of a finished run, or compute the summary of an unfinished one. Raises ConfigError."""
    state = state_of(output)
    if state.is_complete and (summary := stored_summary(output)):
        return summary
    record = state.record
    return summarize_run(Run(output, record["run_id"], record["attempt"], record["config_hash"]))
