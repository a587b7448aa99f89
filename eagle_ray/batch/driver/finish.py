"""Complete an output that shards have written: verify all of them, then write its summary, report and ``_SUCCESS``.

It holds the lock of the output and of every shard, so that no row changes between the count and ``_SUCCESS``. The input
is read, because it says which ids there must be.

    print(finish_text(finish_shards(StoragePath.of("runs/a"))))
    # shard  ids  rows  errors  attempts  finished
    # 1/3    167   167       0         1  2026-11-26T08:01:10+00:00
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.input_plan import InputPlan, plan_input, sample_ids
from eagle_ray.batch.driver.run import NO_PROGRESS, check_error_rate, store_report, summarize_run
from eagle_ray.batch.driver.status import status_of
from eagle_ray.batch.reader.fingerprints import check_unchanged
from eagle_ray.config import JobConfig, upgrade_config
from eagle_ray.config.records import ProgressRecord, SummaryRecord
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.report.cost import USAGE, cost
from eagle_ray.report.text import number, render, run_table
from eagle_ray.runs.job_errors import Incomplete, JobError, OutputDamaged, OutputLocked, OutputMismatch
from eagle_ray.runs.layout import SHARD_PLAN, JobShard, data_of, read_derived_record, read_shard_plan, shard_outputs
from eagle_ray.runs.lease import CheckLock, lock_output
from eagle_ray.runs.manifest import (
    PROGRESS,
    RUN,
    SUCCESS,
    SUMMARY,
    RunHandle,
    begin_attempt,
    new_manifest,
    read_manifest,
    record_outcome,
    version_of,
)
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import part_files, read_tables
from eagle_ray.runs.recorded_inputs import Fingerprint, read_inputs, what_changed
from eagle_ray.runs.row_index import num_ranges
from eagle_ray.storage.path import StoragePath, json_bytes
from eagle_ray.storage.retry_budget import extended_retries

log = logging.getLogger("eagle_ray")
INPUT_KEYS = ("path", "limit")  # of `input`; they decide which ids are expected, and shards may differ in them
Outputs = dict[JobShard, StoragePath]


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """What was counted in one shard.

    Attributes:
        ids: the shard's ids in the input; each is there once, with all its rows.
        rows: its rows in the files.
        others: ids in the files that the input does not have, as after a run with another input.
        attempts: starts of the shard.
    """

    shard: str
    ids: int
    rows: int
    errors: int
    others: int
    attempts: int
    finished_at: str | None

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def finish_shards(root: StoragePath, input_path: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """Verify every shard, complete the output and return what ``_summary.json`` holds.

    Args:
        root: output.path.
        input_path, limit: replace the shards' own input.path and input.limit.

    Raises:
        ConfigError: there are no shards, or they name different inputs.
        OutputLocked: a shard is running; the message names its process.
        Incomplete: a shard has not finished, or its rows are not complete.
        OutputMismatch: files that no shard has made, or a changed input.
    """
    plan = read_shard_plan(root)
    if plan is None:
        raise ConfigError(
            f"{root} is not written in shards (it has no {SHARD_PLAN}): a run without --shard ends itself"
        )
    outputs = shard_outputs(root, plan["count"])
    with ExitStack() as held:
        locks = [held.enter_context(lock_output(root))]
        manifests = _lock_finished(outputs, held, locks)
        config = _config_of(root, plan["config"], manifests, input_path, limit)
        return _finish(root, outputs, manifests, config, partial(_check_all, locks))


def finish_text(summary: dict[str, Any]) -> str:
    """Return the counts of each shard, and the table of a run."""
    names = ("ids", "rows", "errors", "attempts")
    lines = [[s["shard"], *(number(s[name]) for name in names), s["finished_at"] or ""] for s in summary["shards"]]
    return f"{render(['shard', *names, 'finished'], lines)}\n\n{run_table(summary)}"


def _check_all(locks: Iterable[CheckLock]) -> None:
    for check in locks:
        check()


def _lock_finished(outputs: Outputs, held: ExitStack, locks: list[CheckLock]) -> dict[JobShard, dict[str, Any]]:
    """Hold the lock of every shard, append their checks to locks, and return the manifests.

    Raises for all unfinished shards together.
    """
    manifests: dict[JobShard, dict[str, Any]] = {}
    problems: list[str] = []
    is_running = False
    for shard, output in outputs.items():
        manifest = read_manifest(output)
        if manifest is None:
            problems.append(f"shard {shard} has not started")
            continue
        try:
            locks.append(held.enter_context(lock_output(output)))
        except OutputLocked as error:
            is_running = True
            problems.append(f"shard {shard} is running: {error}")
            continue
        if not (output / SUCCESS).exists():
            problems.append(f"shard {shard} is not complete: {_reason(output)}")
        manifests[shard] = read_manifest(output) or manifest
    if problems:
        kind: type[JobError] = OutputLocked if is_running else Incomplete
        raise kind("; ".join(problems) + f". Run each with its --shard, then finish again ({len(outputs)} shards).")
    return manifests


def _reason(output: StoragePath) -> str:
    status = status_of(output)
    return f"attempt {status.attempt} ended with {status.outcome}" if status.outcome else f"it is {status.state}"


def _config_of(
    root: StoragePath,
    recorded: dict[str, Any],
    manifests: dict[JobShard, dict[str, Any]],
    input_path: str | None,
    limit: int | None,
) -> JobConfig:
    """Return the configuration of the whole output: the shards', without a shard. Raises ConfigError."""
    try:
        config = JobConfig.model_validate(upgrade_config(recorded))
    except ValueError as error:
        raise OutputDamaged(
            f"{root / SHARD_PLAN} is damaged (its configuration is not valid: {one_line(error)}): delete it, and run "
            "one of the shards again, which writes it again"
        ) from None
    given = {"path": input_path, "limit": limit}
    chosen: dict[str, Any] = {}
    for key in INPUT_KEYS:
        values = {shard: manifest["config"]["input"].get(key) for shard, manifest in manifests.items()}
        first_shard, first = next(iter(values.items()))
        differing = [f"{value!r} in {shard}" for shard, value in values.items() if value != first]
        if given[key] is None and differing:
            flag = "-i IN" if key == "path" else "--limit N"
            raise ConfigError(
                f"input.{key}: {first!r} in shard {first_shard}, but {', '.join(differing[:3])}. Run the shards with "
                f"one input, or give {flag} to finish."
            )
        chosen[key] = first if given[key] is None else given[key]
    return config.model_copy(
        update={
            "input": config.input.model_copy(update=chosen),
            "execution": config.execution.model_copy(update={"shard": None}),
            "output": config.output.model_copy(update={"path": str(root)}),
        }
    )


def _finish(
    root: StoragePath,
    outputs: Outputs,
    manifests: dict[JobShard, dict[str, Any]],
    config: JobConfig,
    check_lock: CheckLock,
) -> dict[str, Any]:
    log.info("reading the input")
    plan = plan_input(config)  # without an index: every row is read
    check_unchanged(plan.files, {})  # a change since the scan
    files = plan.fingerprints
    for shard in outputs:
        _check_same_input(shard, read_inputs(outputs[shard], manifests[shard]), files)
    old_version = version_of(root / RUN)
    manifest = read_manifest(root) or new_manifest(config, attempt=0)
    run = replace(begin_attempt(manifest, old_version, config, files), check_lock=check_lock)
    with record_outcome(run), extended_retries():
        _check_only_shards(run, outputs)
        shards = [_verify(shard, output, manifests[shard], plan) for shard, output in outputs.items()]
        summary = summarize_run(run)
        summary |= {"shards": [shard.as_json() for shard in shards], "cost": _cost(config, outputs, summary["total"])}
        run.publish(SUMMARY, json_bytes(summary))
        check_error_rate(summary["total"], config.execution.max_error_rate)
        run.publish(SUCCESS, b"")
    if config.report.html:
        store_report(run, summary)
    return summary


def _check_same_input(shard: JobShard, read: dict[str, Fingerprint], files: dict[str, Fingerprint]) -> None:
    """Raise OutputMismatch if a file is not the one that the shard has read; new files are added."""
    changes = {path: what_changed(read.get(path, found), found) for path, found in files.items()}
    if changed := ", ".join(f"{path} ({change})" for path, change in changes.items() if change):
        raise OutputMismatch(
            f"input changed since shard {shard} read it: {changed}. Run --shard {shard} again, which compares its "
            "answers with the new rows, or put the file back."
        )


def _check_only_shards(run: RunHandle, outputs: Outputs) -> None:
    """Raise OutputMismatch for files in data/ that are not below a shard's directory."""
    own = [data_of(output) for output in outputs.values()]
    for file in part_files(run.data):
        if all(file.relative_to(directory) is None for directory in own):
            raise OutputMismatch(f"{file} was not made by a shard of this output: move it out of {run.data}")


def _verify(shard: JobShard, output: StoragePath, manifest: dict[str, Any], plan: InputPlan) -> FinishedShard:
    """Count the ids of one shard in its files, without their index. Raises Incomplete unless each of its ids is there
    once, with all rows.
    """
    index = OutputIndex.read(data_of(output))
    _check_own_rows(shard, index)
    wanted = plan.all_rows.of_shard(shard)
    num_ids, found = len(wanted), count_done(wanted, index)
    if found.num_missing:
        names = sample_ids(found.missing, plan)
        raise Incomplete(
            f"shard {shard}: {found.num_missing} of {num_ids} ids are missing: {names}. Run --shard {shard} again."
        )
    if extra := found.excess:
        raise Incomplete(
            f"shard {shard}: {sum(map(len, extra.values()))} ids are there twice, such as in {next(iter(extra))}. Run "
            f"--shard {shard} again, which removes the second rows."
        )
    summary = read_derived_record(output / SUMMARY, SummaryRecord, "its error rows are counted again")
    return FinishedShard(
        shard=str(shard),
        ids=num_ids,
        rows=index.num_rows,
        errors=_num_errors(output) if summary is None else summary["total"]["errors"],
        others=found.num_others,
        attempts=len(manifest["attempts"]),
        finished_at=manifest["attempts"][-1].get("finished_at"),
    )


def _num_errors(output: StoragePath) -> int:
    tables = read_tables(data_of(output), ["status"])
    return sum(len(table.filter(pc.equal(table["status"], "error"))) for table in tables)


def _check_own_rows(shard: JobShard, index: OutputIndex) -> None:
    """Raise OutputMismatch for a file with an id of another shard."""
    for entries in index.by_range(num_ranges(index.num_entries)):
        if not (own := shard.holds(entries["id"])).all():
            file = index.files[entries["file"][int(np.argmin(own))]]
            raise OutputMismatch(f"{file} has rows of another shard than {shard}: move it out of the output")


def _cost(config: JobConfig, outputs: Outputs, total: dict[str, Any]) -> dict[str, Any] | None:
    """Return the cost of all shards: the longest shard's time, and the workers of all, if they are alike."""
    files = (output / PROGRESS for output in outputs.values())
    progress = [read_derived_record(file, ProgressRecord, NO_PROGRESS) or {} for file in files]
    usages = [usage for facts in progress if (usage := facts.get(USAGE))]
    if not usages or len({usage["gpus_per_worker"] for usage in usages}) > 1:
        return None
    together = {
        "elapsed_s": max(usage["elapsed_s"] for usage in usages),
        "worker_s": sum(usage["worker_s"] for usage in usages),
        "gpus_per_worker": usages[0]["gpus_per_worker"],
    }
    return cost(total, together, config.execution.price_per_hour)
