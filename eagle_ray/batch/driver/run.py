"""Run a batch job: from a configuration to an output directory that holds every row, and an exit code.

Ray is imported only if rows are missing, and torch only in workers and model checks, so a finished job ends in a
second.

    run_job(load_config("configs/demo.yaml"))      # 0
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.batch.driver.finished import files_key, finished_key, previous_run, record_finished
from eagle_ray.batch.driver.input_plan import (
    InputPlan,
    check_not_empty,
    plan_input,
    request_rows,
    row_settings_line,
    sample_ids,
)
from eagle_ray.batch.driver.path_checks import check_disjoint, check_not_run_output
from eagle_ray.batch.driver.ray_environment import prepare_ray_environment
from eagle_ray.batch.driver.ray_jobs import check_output_outlives_job
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.batch.driver.source_check import check_changes, check_sources
from eagle_ray.batch.reader.fingerprints import check_unchanged
from eagle_ray.batch.reader.parallel_scan import ParallelScan
from eagle_ray.batch.worker.spare_engine import SpareEngine
from eagle_ray.config import JobConfig
from eagle_ray.config.methods import plain_decoding_note
from eagle_ray.config.records import EstimateRecord, ProgressRecord, SummaryRecord
from eagle_ray.core.errors import ConfigError, one_line, shortened
from eagle_ray.core.start_log import configure_logging, print_result
from eagle_ray.report.cost import USAGE, cost
from eagle_ray.report.html import page
from eagle_ray.report.speed_up import SpeedUp
from eagle_ray.report.summary import ReadColumns, budgets, summarise, summary_json
from eagle_ray.report.text import difference_line, run_table
from eagle_ray.report.timeline import timeline
from eagle_ray.requests.row_schema import schema_differences, unread_settings
from eagle_ray.runs.fence import remove_stale_files, wait_for_stale_writers
from eagle_ray.runs.job_errors import (
    DONE,
    EXPECTED_ERRORS,
    INTERRUPTED,
    ROW_ERRORS,
    TOO_MANY_ERRORS,
    FencedError,
    Incomplete,
    OutputMismatch,
    RunResult,
    TooManyErrors,
    WorkerDefect,
)
from eagle_ray.runs.layout import JobShard, claim_output, data_of, read_derived_record, root_of
from eagle_ray.runs.lease import lock_output
from eagle_ray.runs.manifest import (
    ESTIMATE,
    PROGRESS,
    REPORT,
    RUN,
    SUCCESS,
    SUMMARY,
    RunHandle,
    manifest_of,
    open_run,
    output_of,
    read_manifest,
    record_outcome,
)
from eagle_ray.runs.output_index import OutputIndex, error_ids, without_ids
from eagle_ray.runs.part_files import as_stored, has_column, next_schema, part_files, read_tables, stored_schema
from eagle_ray.runs.partitions import Partitions
from eagle_ray.runs.row_index import INDEX, IndexDamaged, free_index_name, remove_index
from eagle_ray.storage.path import StoragePath, json_bytes, parquet_bytes
from eagle_ray.storage.retry_budget import extended_retries

log = logging.getLogger("eagle_ray")
GROUP_BY = "category"  # the table has a line for each of its values, where the input carries such a column
TURN = "turn_index"
ERRORS_SHOWN = 3
RESUME = "Run the same command again to resume."
COUNTED_AGAIN = "the rows are counted again"
NO_PROGRESS = "its numbers are left out until rows are generated again"
NO_ESTIMATE = "it is left out. eagle-ray validate --estimate writes it again"
CHECKS = ("baseline_rows", "verify_rows")  # keys of `report`, and of the summary


def run_job(config: JobConfig, retry_errors: bool = False) -> int:
    """Run the job to its end, print its table and return the exit code. retry_errors: see run_to_completion."""
    return run_to_end(config, retry_errors).outcome.code


def run_to_end(config: JobConfig, retry_errors: bool = False, fail_on_row_errors: bool = False) -> RunResult:
    """Run the job to its end and print its table. fail_on_row_errors: a job with error rows ends with ROW_ERRORS."""
    began = datetime.now(timezone.utc)

    def work() -> str:
        check_output_outlives_job(config)
        summary, output = run_to_completion(config, retry_errors), output_of(config)
        if num_errors := summary["total"]["errors"]:
            _show_errors(output, num_errors)
        return f"{run_table(summary)}\n{_places(config, output)}"

    ending = ending_of(work, config.logging.level)
    rows, errors = _counts(config, ending, began)
    if ending.outcome is DONE and fail_on_row_errors and errors:
        ending = RunResult(ROW_ERRORS, f"{errors} rows ended in errors (--fail-on-row-errors)")
        print(f"eagle-ray: {ending.reason}", file=sys.stderr)
    return replace(ending, rows=rows, errors=errors)


def _places(config: JobConfig, output: StoragePath) -> str:
    """Return where the rows and the numbers of a finished run are, and for a shard what comes next."""
    files = "**/*.parquet" if config.output.partition_by else "*.parquet"
    places = f"rows in {data_of(output).display_path}/{files}, these numbers in {output.display_path}/{SUMMARY}"
    if config.execution.shard is None:
        return places
    shard = JobShard.of(config.execution.shard)
    root = root_of(output).display_path
    return f"{places}\nshard {shard} is complete. Once all {shard.count} are: eagle-ray finish {root}"


def _counts(config: JobConfig, ending: RunResult, began: datetime) -> tuple[int | None, int | None]:
    """Return rows and error rows of the output, if this run has counted them and they can be read at once."""
    with suppress(ConfigError, OSError):
        output = output_of(config)
        if ending.outcome in (DONE, TOO_MANY_ERRORS):
            total = (read_derived_record(output / SUMMARY, SummaryRecord) or {}).get("total", {})
            return total.get("rows"), total.get("errors")
        if output.is_local or not ending.outcome.is_transient:
            progress = read_derived_record(output / PROGRESS, ProgressRecord, NO_PROGRESS) or {}
            if progress and datetime.fromisoformat(progress["written_at"]) >= began.replace(microsecond=0):
                return progress["rows_in_files"], progress["errors"]
    return None, None


def _show_errors(output: StoragePath, num_errors: int) -> None:
    """Log the first few error rows and where all of them are."""
    for row in itertools.islice(_error_rows(data_of(output)), min(num_errors, ERRORS_SHOWN)):
        log.warning("error row %s: %s", shortened(row["request_id"]), row["error_message"])
    log.warning("all of them: the rows of %s with status 'error'", data_of(output).display_path)


def _error_rows(data: StoragePath) -> Iterator[dict[str, str]]:
    for table in read_tables(data, ["request_id", "status", "error_message"]):
        yield from table.filter(pc.equal(table["status"], "error")).to_pylist()


def run_and_report(work: Callable[[], str], log_level: str) -> int:
    """Do the work as ``ending_of`` does and return the exit code."""
    return ending_of(work, log_level).outcome.code


def ending_of(work: Callable[[], str], log_level: str) -> RunResult:
    """Do the work and print its result. An error is logged in one line and becomes the ending."""
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


def run_to_completion(config: JobConfig, retry_errors: bool = False) -> dict[str, Any]:
    """Generate every missing row, count the rows in the files and return what ``_summary.json`` holds.

    Args:
        retry_errors: drop error rows first, so that they are generated again.

    Raises:
        ConfigError: before anything has started.
        JobError: the job cannot be completed.
    """
    try:
        with SpareEngine() as spare:
            return _run_attempt(config, retry_errors, spare)
    except IndexDamaged as error:
        log.warning("the index of %s is built again: %s", config.output.path, error)
    remove_index(output_of(config))
    resumed = config.output.model_copy(update={"if_exists": "resume"})  # what the attempt has made stays
    with SpareEngine() as spare:
        return _run_attempt(config.model_copy(update={"output": resumed}), retry_errors, spare)


def _run_attempt(config: JobConfig, retry_errors: bool, spare: SpareEngine) -> dict[str, Any]:
    """Do what run_to_completion does. Raises IndexDamaged, too."""
    log.info("reading the input")
    output = output_of(config)
    root = root_of(output)
    check_disjoint(config.input.path, root)
    previous = previous_run(output, config)
    plan = plan_input(config, previous, lambda scanner: ParallelScan(scanner, lambda: join_cluster(config)))
    check_not_empty(plan, config)
    if plan.key != previous.finished_key:
        Partitions.of(config.output.partition_by, plan.passthrough_types).check_values(request_rows(plan))
    check_not_run_output(plan.files, root)
    is_overwritten = config.output.if_exists == "overwrite"
    if is_overwritten or retry_errors or (not (output / RUN).exists() and len(plan.rows)):
        _get_ready(config, spare)  # before anything is deleted, and before a mistyped name is on record
    claim_output(config)
    with lock_output(output) as check_lock:
        free_index_name(output)
        check_changes(plan, output)
        run = replace(open_run(config, plan.fingerprints, plan.changes.accepted), check_lock=check_lock)
        with record_outcome(run), extended_retries():
            summary = _complete(config, plan, run, retry_errors, spare)
        if config.report.html:
            store_report(run, summary)
    return summary


def _complete(
    config: JobConfig, plan: InputPlan, run: RunHandle, retry_errors: bool, spare: SpareEngine
) -> dict[str, Any]:
    """Generate the missing rows of an open run, write ``_summary.json`` and ``_SUCCESS``, and return the summary."""
    check_unchanged(plan.files, {})  # a change since the scan
    remove_stale_files(run)
    plan.index.save(run.output / INDEX)
    if retry_errors:
        _drop_error_rows(config, run, plan.rows)
    counted = files_key(run.output)
    is_finished = finished_key(run.output) == plan.key
    if is_finished and (there := stored_summary(run.output)):
        log.info("all ids that are asked for are answered, in %d rows", there["total"]["rows"])
        wait_for_stale_writers(run)
        summary = there | _facts_of_attempt(run, there["total"])
    else:
        with _checking_input(plan):
            _generate_missing(config, plan, run, spare)
            run.check_current()  # an output that was deleted has no manifest to read
            wait_for_stale_writers(run)
            counted = _deduplicate_and_check(config, plan, run)
        there = {} if is_finished else stored_summary(run.output) or {}  # removed before rows are generated
        summary = there | summarize_run(run)
    summary |= _checks(config, plan, run, there)
    run.publish(SUMMARY, json_bytes(summary))
    if config.execution.shard is None:  # a share of few rows says little: `finish` judges all shards together
        check_error_rate(summary["total"], config.execution.max_error_rate)
    run.publish(SUCCESS, b"")
    record_finished(run.output, plan.key, counted)
    return summary


def stored_summary(output: StoragePath) -> dict[str, Any] | None:
    """Return ``_summary.json`` if it has everything that a report shows, else None: it can be made again."""
    file, manifest = output / SUMMARY, read_manifest(output)
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


def store_report(run: RunHandle, summary: dict[str, Any]) -> None:
    """Write the report of a finished run. A failure is logged only, because rows and summary are complete."""
    place = (run.output / REPORT).display_path
    run.check_current()
    try:
        write_report(run.output, summary)
        log.info("report in %s", place)
    except OSError as error:
        log.warning("%s could not be written: %s. eagle-ray report writes it later", place, error.strerror or error)


@contextmanager
def _checking_input(plan: InputPlan) -> Iterator[None]:
    """Raise InputChanged if an input file changed meanwhile, instead of the error that this caused."""
    try:
        yield
    except (ConfigError, Incomplete, WorkerDefect):
        check_unchanged(plan.files, plan.fingerprints)
        raise
    check_unchanged(plan.files, plan.fingerprints)


def write_report(output: StoragePath, summary: dict[str, Any]) -> None:
    """Write ``report.html`` from a summary and the run's manifest."""
    (output / REPORT).write_atomic(page(summary, manifest_of(output)).encode())


def _drop_error_rows(config: JobConfig, run: RunHandle, asked: ExpectedRows) -> None:
    """Rewrite each file without its error rows of these ids. Error rows of other inputs stay."""
    for file in part_files(run.data):
        before, wrong = file.stat().version, error_ids(file)
        if len(wrong := wrong[asked.contains(wrong)]):
            log.info("%d ids with errors will be tried again; taken out of %s", len(wrong), file)
            _rewrite(file, before, without_ids(file, wrong), config, run)


def _output_index(run: RunHandle) -> OutputIndex:
    """Return the index of the files as they are now, which is kept. An output that was deleted stays deleted."""
    run.check_current()
    return OutputIndex.read(run.data, run.output / INDEX)


def _generate_missing(config: JobConfig, plan: InputPlan, run: RunHandle, spare: SpareEngine) -> None:
    """Generate the rows of ids that no file holds yet."""
    check_sources(run, plan)
    found = count_done(plan.rows, _output_index(run))
    num_rows = found.num_rows - found.num_done_rows
    log.info("%d rows asked for, %d already there", found.num_rows, found.num_done_rows)
    if num_rows == 0:
        return
    if (line := row_settings_line(plan)) is not None:
        log.info("%s", line)
    _check_columns(plan, run)
    _get_ready(config, spare)
    if (note := plain_decoding_note(config.speculative.method, config.model.drafts)) is not None:
        log.info("%s: %s", config.model.target, note)
    (run.output / SUMMARY).remove()  # it no longer says what the files hold
    from eagle_ray.batch.driver.pipeline import generate

    generate(config, plan, run, found.done, num_rows, spare.address)


def _check_columns(plan: InputPlan, run: RunHandle) -> None:
    """Refuse an input whose columns differ from those in the files, because no reader could read both."""
    there = stored_schema(run.data)
    if unread := plan.row_settings.intersection(unread_settings(there)):
        raise OutputMismatch(
            f"{run.output}: its rows were made by a version that did not read the input's {', '.join(sorted(unread))}. "
            "Choose another output.path, or --overwrite."
        )
    if there.names and (columns := schema_differences(there, as_stored(next_schema(run.data, plan.passthrough)))):
        raise OutputMismatch(
            f"{run.output} has rows of other columns than this input carries: {', '.join(columns)}: choose another "
            "output.path, or --overwrite"
        )


def join_cluster(config: JobConfig) -> None:
    log.info("getting Ray ready")
    address = prepare_ray_environment(config.execution.ray_address)
    from eagle_ray.batch.driver.cluster import connect  # Ray takes seconds to import

    connect(address)


def _get_ready(config: JobConfig, spare: SpareEngine) -> None:
    """Join the cluster, and meanwhile refuse models that cannot work here, in one line, and not in every worker."""
    if not spare.is_checked:
        spare.start(config)
        join_cluster(config)
        spare.check_models()


def _deduplicate_and_check(config: JobConfig, plan: InputPlan, run: RunHandle) -> str:
    """Recount the ids in the files and return their key. Remove duplicates; raise Incomplete if ids are missing."""
    counted = files_key(run.output)
    found = count_done(plan.rows, _output_index(run))
    for file, ids in found.excess.items():
        log.warning("%d ids stand twice and are taken out of %s: %s", len(ids), file, sample_ids(ids, plan))
        before = file.stat().version
        _rewrite(file, before, without_ids(file, ids), config, run)
    if found.num_missing:
        names = sample_ids(found.missing, plan)
        raise Incomplete(f"{found.num_missing} of {len(plan.rows)} ids are missing: {names}; run the job again")
    return _deduplicate_and_check(config, plan, run) if found.excess else counted


def _checks(config: JobConfig, plan: InputPlan, run: RunHandle, there: dict[str, Any]) -> dict[str, Any]:
    """Return the results of CHECKS that are asked for and not in this summary already."""
    wanted = {name: number for name in CHECKS if (number := getattr(config.report, name))}
    if all(name in there and there[name]["asked"] == number for name, number in wanted.items()):
        return {}
    join_cluster(config)
    from eagle_ray.batch.driver.verification import run_checks

    found = run_checks(config, plan, run, plan.rows, wanted)
    if turns := found.get("baseline_rows", {}).pop("turns", None):
        found["baseline_rows"] |= SpeedUp.of(turns).as_json()
    for row in found.get("verify_rows", {}).get("differing", []):
        log.warning("%s", difference_line(row))
    return found


def summarize_run(run: RunHandle) -> dict[str, Any]:
    """Return the content of ``_summary.json`` for what the files hold now."""
    by = GROUP_BY if has_column(run.data, GROUP_BY) else None
    read = partial(read_tables, run.data)
    over_time = {"timeline": timeline(read), "budget": budgets(read)}
    counts = summary_json(summarise(read, by), by)
    return counts | _turns(run, read) | over_time | _facts_of_attempt(run, counts["total"])


def _facts_of_attempt(run: RunHandle, total: dict[str, Any]) -> dict[str, Any]:
    """Return what the summary says of the attempt, which may differ although the files are the same."""
    facts = {"run_id": run.run_id, "attempt": run.attempt, "config_hash": run.config_hash}
    last_work = read_derived_record(run.output / PROGRESS, ProgressRecord, NO_PROGRESS)
    return facts | {"last_work": last_work} | _cost(run, total, last_work)


def _cost(run: RunHandle, total: dict[str, Any], work: dict[str, Any] | None) -> dict[str, Any]:
    """Return the run's cost, and the estimate that was made for its configuration and rows, or None for each."""
    config = (read_manifest(run.output) or {}).get("config", {})
    price = config.get("execution", {}).get("price_per_hour")
    usage = work.get(USAGE) if work and work.get("run_id") == run.run_id else None
    estimate = read_derived_record(run.output / ESTIMATE, EstimateRecord, NO_ESTIMATE)
    is_same = estimate is not None and estimate["config_hash"] == run.config_hash and estimate["rows"] == total["rows"]
    return {"cost": cost(total, usage, price), "estimate": estimate if is_same else None}


def _turns(run: RunHandle, read: ReadColumns) -> dict[str, Any]:
    """Return the counts of each turn, if the run's rows are conversations."""
    config = (read_manifest(run.output) or {}).get("config", {})
    if not config.get("input", {}).get("columns", {}).get("turns"):
        return {}
    return {"turns": {turn: counts.as_json() for turn, counts in summarise(read, TURN).items()}}


def check_error_rate(counts: dict[str, Any], most: float) -> None:
    codes = ", ".join(f"{code} {count}" for code, count in counts["error_codes"].items())
    if counts["rows"] and counts["errors"] == counts["rows"]:
        raise TooManyErrors(
            f"all {counts['rows']} rows are errors ({codes}). error_message names each cause. Write corrected rows, "
            "with the same ids, to another file, and run the command with -i THAT_FILE --retry-errors."
        )
    if counts["errors"] > most * counts["rows"]:
        raise TooManyErrors(
            f"{counts['errors']} of {counts['rows']} rows are errors ({codes}); execution.max_error_rate is {most:g}"
        )


def _rewrite(file: StoragePath, before: int | str, table: pa.Table, config: JobConfig, run: RunHandle) -> None:
    """Replace a part file. before: the version from which the table was read."""
    if table.num_rows:
        data = parquet_bytes(table, config.output.compression)
        if file.replace(data, before, run.check_current) is None:
            raise FencedError(f"{file} was rewritten by another driver")
    else:
        run.check_current()
        file.remove()
