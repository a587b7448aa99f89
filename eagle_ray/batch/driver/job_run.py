"""Run a batch job: from a configuration to an output directory that holds every row, and an exit code.

A job goes through four steps, each a module: ``job_plan``, ``claim``, ``execute`` and ``settle``.
Ray is imported only if rows are missing, and torch only in engines' processes, so a finished job
ends in a second.

    run_to_end(load_config("configs/demo.yaml")).outcome.code      # 0
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from eagle_ray.batch.driver.claim import claim
from eagle_ray.batch.driver.job_draft import with_job_draft
from eagle_ray.batch.driver.job_plan import plan_job
from eagle_ray.batch.driver.ray_jobs import check_output_outlives_job
from eagle_ray.batch.driver.settle import settle
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.batch.driver.status import counted_rows, log_error_rows
from eagle_ray.batch.worker.spare_engine import SpareEngine
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.start_log import configure_logging, print_result
from eagle_ray.publishing.publisher import publish_all, publishing
from eagle_ray.report.run_table import run_table
from eagle_ray.runs.job_errors import (
    DONE,
    EXPECTED_ERRORS,
    INTERRUPTED,
    RESUME,
    ROW_ERRORS,
    TOO_MANY_ERRORS,
    RunResult,
)
from eagle_ray.runs.layout import SUMMARY, JobShard, data_of, output_of, root_of
from eagle_ray.runs.row_index import IndexDamaged
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


def complete_job(config: JobConfig, retry_errors: bool = False) -> dict[str, Any]:
    """Generate every missing row, count the rows in the files and return what ``_summary.json`` holds.

    Args:
        retry_errors: drop error rows first, so that they are generated again.

    Raises:
        ConfigError: before anything has started.
        JobError: the job cannot be completed.
    """
    config = with_job_draft(config)
    try:
        return _run_attempt(config, retry_errors)
    except IndexDamaged as error:
        log.warning("the index of %s is built again: %s", config.output.path, error)
    # What the attempt has made stays.
    resumed = config.output.model_copy(update={"if_exists": "resume"})
    return _run_attempt(
        config.model_copy(update={"output": resumed}), retry_errors, is_index_damaged=True
    )


def _run_attempt(
    config: JobConfig, retry_errors: bool, is_index_damaged: bool = False
) -> dict[str, Any]:
    """Run the four steps of complete_job once. Raises IndexDamaged in addition to complete_job's errors."""
    with (
        SpareEngine() as spare,
        claim(plan_job(config, spare, retry_errors, is_index_damaged)) as claimed,
    ):
        if (missing := claimed.missing()) is not None:
            # This imports Ray, whose environment is ready now.
            from eagle_ray.batch.driver.execute import (
                execute,
            )

            with publishing(claimed.run.output, config.output.publish):
                execute(claimed, missing)
        summary = settle(claimed)
    publish_all(claimed.run.output, config.output.publish)
    return summary


def run_to_end(
    config: JobConfig, retry_errors: bool = False, fail_on_row_errors: bool = False
) -> RunResult:
    """Run the job to its end and print its table.

    Args:
        fail_on_row_errors: a job with error rows ends with ROW_ERRORS.
    """
    began = datetime.now(timezone.utc)

    def work() -> str:
        check_output_outlives_job(config)
        summary = complete_job(config, retry_errors)
        output = output_of(config)
        if num_errors := summary["total"]["errors"]:
            log_error_rows(output, num_errors)
        return f"{run_table(summary)}\n{_locations(config, output)}"

    ending = ending_of(work, config.logging.level)
    rows, errors = _counts(config, ending, began)
    if ending.outcome is DONE and fail_on_row_errors and errors:
        ending = RunResult(ROW_ERRORS, f"{errors} rows ended in errors (--fail-on-row-errors)")
        print(f"eagle-ray: {ending.reason}", file=sys.stderr)
    return replace(ending, rows=rows, errors=errors)


def _locations(config: JobConfig, output: StoragePath) -> str:
    """Return where the rows and the numbers of a finished run are, and for a shard what comes next."""
    files = "**/*.parquet" if config.output.partition_by else "*.parquet"
    locations = f"rows in {data_of(output).display_path}/{files}, these numbers in {output.display_path}/{SUMMARY}"
    if config.execution.shard is None:
        return locations
    shard = JobShard.of(config.execution.shard)
    root = root_of(output).display_path
    return f"{locations}\nshard {shard} is complete. Once all {shard.count} are: eagle-ray finish {root}"


def _counts(config: JobConfig, ending: RunResult, began: datetime) -> tuple[int | None, int | None]:
    """Return rows and error rows of the output, if this run has counted them and they can be read at once."""
    with suppress(ConfigError, OSError):
        output = output_of(config)
        if ending.outcome in (DONE, TOO_MANY_ERRORS):
            return counted_rows(output)
        if output.is_local or not ending.outcome.is_transient:
            return counted_rows(output, began)
    return None, None


def ending_of(work: Callable[[], str], log_level: str) -> RunResult:
    """Run a function and print the text that it returns. An error is logged in one line and becomes the RunResult."""
    configure_logging(log_level)
    try:
        with interruptible():
            result = work()
    except EXPECTED_ERRORS as error:
        log.error("eagle-ray: %s", _line_of(error))
        return RunResult.of(error)
    except Exception as error:
        log.exception("eagle-ray: the job ended with an unknown error; please report it")
        return RunResult.of(error)
    print_result(result)
    return RunResult(DONE)


def _line_of(error: BaseException) -> str:
    outcome = RunResult.of(error).outcome
    if isinstance(error, ConfigError):
        return str(error)
    if outcome is INTERRUPTED:
        return f"interrupted. {RESUME}"
    if isinstance(error, OSError) and outcome.is_transient:
        return f"stopped: {error}. {RESUME}"
    return f"stopped: {error}"
