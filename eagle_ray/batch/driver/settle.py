"""Settle: recount the rows of a run, remove duplicates, run the checks, write the summary and ``_SUCCESS``.

It returns what ``_summary.json`` holds:

    settle(claimed)["total"]["rows"]      # 480
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.input_plan import sample_ids
from eagle_ray.batch.driver.job_manifest import files_key, record_finished
from eagle_ray.batch.driver.job_plan import join_cluster
from eagle_ray.batch.driver.status import (
    facts_of_attempt,
    store_report,
    stored_summary,
    summarize_run,
)
from eagle_ray.config import JobConfig
from eagle_ray.port.spend import drop_answers, spend_summary
from eagle_ray.runs.job_errors import Incomplete, TooManyErrors
from eagle_ray.runs.layout import SUMMARY
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import json_bytes

log = logging.getLogger("eagle_ray")
CHECKS = ("baseline_rows", "verify_rows")  # keys of `report`, and of the summary


def settle(claimed: Claim) -> dict[str, Any]:
    """Complete the output and return what ``_summary.json`` holds. Raises Incomplete, TooManyErrors, InputChanged."""
    config = claimed.plan.config
    plan = claimed.plan.input
    run = claimed.run
    run.check_current()  # an output that was deleted has no manifest to read
    run.settle()
    there = stored_summary(run.output) or {}  # removed before rows are generated
    counted = None
    if claimed.is_finished and there:
        log.info("all ids that are asked for are answered, in %d rows", there["total"]["rows"])
        summary = there | facts_of_attempt(run, there["total"])
    else:
        counted = remove_duplicates(claimed)
        plan.check_unchanged()
        summary = there | summarize_run(run)
    summary |= _checks(claimed, there)
    if not config.engine.is_own:
        summary["spend"] = spend_summary(run)
    end_run(config, run, summary, claimed.at_end)
    if not config.engine.is_own:
        drop_answers(run)
    if counted is not None:
        record_finished(run.output, plan.key, counted)
    return summary


def end_run(config: JobConfig, run: Run, summary: dict[str, Any], at_end: ExitStack) -> None:
    """Write the summary of counted rows, then ``_SUCCESS``, and the report last.

    Raises TooManyErrors if too many rows are errors. A shard is not judged by itself, since it may
    have few rows: ``finish`` judges all shards together.
    """
    run.publish(SUMMARY, json_bytes(summary))
    if config.execution.shard is None:
        check_error_rate(summary["total"], config.execution.max_error_rate)
    run.commit({})
    if config.report.html:
        at_end.callback(store_report, run, summary)


def remove_duplicates(claimed: Claim) -> str:
    """Count the ids in the files and remove second copies of rows. Return files_key of the files that were counted.

    Raises Incomplete if ids are missing.
    """
    plan = claimed.plan.input
    run = claimed.run
    while True:
        counted = files_key(run.output)
        there = claimed.count()
        for file, ids in there.excess.items():
            log.warning(
                "%d ids stand twice and are taken out of %s: %s",
                len(ids),
                file,
                sample_ids(ids, plan),
            )
            run.remove_rows(file, ids, claimed.plan.config.output.compression)
        if there.num_missing:
            names = sample_ids(there.missing, plan)
            raise Incomplete(
                f"{there.num_missing} of {len(plan.rows)} ids are missing: {names}; run the job again"
            )
        if not there.excess:
            return counted


def _checks(claimed: Claim, there: dict[str, Any]) -> dict[str, Any]:
    """Make the CHECKS that the configuration asks for, and return their results; none if the summary has them all."""
    config = claimed.plan.config
    wanted = {}
    for name in CHECKS:
        number = getattr(config.report, name)
        if number:
            wanted[name] = number
    if all(name in there and there[name]["asked"] == number for name, number in wanted.items()):
        return {}
    join_cluster(config)
    from eagle_ray.batch.driver.verification import run_checks  # imports Ray

    return run_checks(config, claimed.plan.input, claimed.run, wanted)


def check_error_rate(counts: dict[str, Any], max_error_rate: float) -> None:
    """Raise TooManyErrors if a run's counts have a larger share of error rows than allowed."""
    codes = ", ".join(f"{code} {count}" for code, count in counts["error_codes"].items())
    if counts["rows"] and counts["errors"] == counts["rows"]:
        raise TooManyErrors(
            f"all {counts['rows']} rows are errors ({codes}). error_message names each cause. Write corrected rows, "
            "with the same ids, to another file, and run the command with -i THAT_FILE --retry-errors."
        )
    if counts["errors"] > max_error_rate * counts["rows"]:
        raise TooManyErrors(
            f"{counts['errors']} of {counts['rows']} rows are errors ({codes}); execution.max_error_rate is "
            f"{max_error_rate:g}"
        )
