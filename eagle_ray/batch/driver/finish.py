"""Finish a job of several shards: verify all shards, then complete the output like a run without shards.

It holds the lease of the output and of every shard, so that no row changes between the count and
``_SUCCESS``. The input is read, because it says which ids there must be. Everything is verified
before anything is written, so a refusal changes nothing.

    print(finish_text(finish_shards(StoragePath.of("runs/a"))))
    # shard  ids  rows  errors  attempts  finished
    # 1/3    167   167       0         1  2026-11-26T08:01:10+00:00
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.input_index import PreviousRun
from eagle_ray.batch.driver.input_plan import InputPlan, plan_input, sample_ids
from eagle_ray.batch.driver.job_manifest import begin_job
from eagle_ray.batch.driver.settle import end_run
from eagle_ray.batch.driver.status import facts_of_attempt, status_of, summarize_rows
from eagle_ray.config import JobConfig, upgrade_config
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.report.run_table import run_table
from eagle_ray.report.text import number, render
from eagle_ray.runs.job_errors import (
    Incomplete,
    JobError,
    OutputDamaged,
    OutputLocked,
    OutputMismatch,
)
from eagle_ray.runs.layout import SHARD_PLAN, JobShard, data_of, read_shard_plan, shard_outputs
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import part_files, read_tables
from eagle_ray.runs.recorded_inputs import Fingerprint, changed_files, read_inputs
from eagle_ray.runs.row_index import num_ranges
from eagle_ray.runs.run import Run, RunState
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.retries import extended_retries

log = logging.getLogger("eagle_ray")
# Keys of `input` that decide which ids are expected; shards may differ in them.
INPUT_KEYS = (
    "path",
    "limit",
)
Shards = Mapping[JobShard, RunState]


def finish_shards(
    root: StoragePath, input_path: str | None = None, limit: int | None = None
) -> dict[str, Any]:
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
    recorded = read_shard_plan(root)
    if recorded is None:
        raise ConfigError(
            f"{root} is not written in shards (it has no {SHARD_PLAN}): a run without --shard ends itself"
        )
    with ExitStack() as leases, ExitStack() as at_end:
        checks = [leases.enter_context(hold_output(root)).check]
        shards = _hold_finished(shard_outputs(root, recorded["count"]), leases, checks)
        config = _config_of(root, recorded["config"], shards, {"path": input_path, "limit": limit})
        log.info("reading the input")
        # Without an index: every row is read.
        plan = plan_input(config, PreviousRun(None, revisions=_revisions_of(shards)))
        plan.check_unchanged()
        for shard, state in shards.items():
            _check_same_input(shard, read_inputs(state.output, state.record), plan.fingerprints)
        _check_only_shards(root, shards)
        with extended_retries():
            verified = [_verify(shard, state, plan) for shard, state in shards.items()]
            counts = summarize_rows(data_of(root), bool(config.input.columns.turns))
            counts |= {"shards": verified}

        check = partial(_check_all, checks)
        run = begin_job(Run.inspect(root), config, plan.fingerprints, check, plan.revisions)
        with run.recorded_outcome(), extended_retries():
            outputs = [state.output for state in shards.values()]
            summary = counts | facts_of_attempt(run, counts["total"], outputs)
            end_run(config, run, summary, at_end)
        return summary


def finish_text(summary: dict[str, Any]) -> str:
    """Return a table with the counts of each shard, followed by a run's usual table."""
    names = ("ids", "rows", "errors", "attempts")
    lines = [
        [s["shard"], *(number(s[name]) for name in names), s["finished_at"] or ""]
        for s in summary["shards"]
    ]
    return f"{render(['shard', *names, 'finished'], lines)}\n\n{run_table(summary)}"


def _check_all(checks: Iterable[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _hold_finished(
    outputs: Mapping[JobShard, StoragePath], leases: ExitStack, checks: list[Callable[[], None]]
) -> dict[JobShard, RunState]:
    """Hold the lease of every shard, append their checks, and return what the shards' records say.

    Raises for all unfinished shards together.
    """
    shards: dict[JobShard, RunState] = {}
    problems: list[str] = []
    is_running = False
    for shard, output in outputs.items():
        if Run.inspect(output).manifest is None:
            problems.append(f"shard {shard} has not started")
            continue
        try:
            checks.append(leases.enter_context(hold_output(output)).check)
        except OutputLocked as error:
            is_running = True
            problems.append(f"shard {shard} is running: {error}")
            continue
        shards[shard] = Run.inspect(output)
        if not shards[shard].is_complete:
            problems.append(f"shard {shard} is not complete: {_reason(output)}")
    if problems:
        kind: type[JobError] = OutputLocked if is_running else Incomplete
        raise kind(
            "; ".join(problems)
            + f". Run each with its --shard, then finish again ({len(outputs)} shards)."
        )
    return shards


def _reason(output: StoragePath) -> str:
    status = status_of(output)
    return (
        f"attempt {status.attempt} ended with {status.outcome}"
        if status.outcome
        else f"it is {status.state}"
    )


def _config_of(
    root: StoragePath, recorded: dict[str, Any], shards: Shards, given: Mapping[str, Any]
) -> JobConfig:
    """Return the configuration of the whole output: the shards', without a shard. Raises ConfigError.

    Args:
        given: values of INPUT_KEYS in place of the shards', None for theirs.
    """
    try:
        config = JobConfig.model_validate(upgrade_config(recorded))
    except ValueError as error:
        raise OutputDamaged(
            f"{root / SHARD_PLAN} is damaged (its configuration is not valid: {one_line(error)}): delete it, and run "
            "one of the shards again, which writes it again"
        ) from None
    chosen: dict[str, Any] = {}
    for key in INPUT_KEYS:
        values = {
            shard: state.record["config"]["input"].get(key) for shard, state in shards.items()
        }
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


def _revisions_of(shards: Shards) -> dict[str, str]:
    """Return the commits of the hub that the shards have read. A shard of another one is refused by its files."""
    revisions: dict[str, str] = {}
    for state in shards.values():
        revisions = state.record.get("revisions", {}) | revisions
    return revisions


def _check_same_input(
    shard: JobShard, read: dict[str, Fingerprint], files: dict[str, Fingerprint]
) -> None:
    """Raise OutputMismatch if a file is not the one that the shard has read; new files are added."""
    if changed := changed_files(read, files):
        raise OutputMismatch(
            f"input changed since shard {shard} read it: {changed}. Run --shard {shard} again, which compares its "
            "answers with the new rows, or put the file back."
        )


def _check_only_shards(root: StoragePath, shards: Shards) -> None:
    """Raise OutputMismatch for files in data/ that are not below a shard's directory."""
    own = [data_of(state.output) for state in shards.values()]
    for file in part_files(data_of(root)):
        if all(file.relative_to(directory) is None for directory in own):
            raise OutputMismatch(
                f"{file} was not made by a shard of this output: move it out of {data_of(root)}"
            )


def _verify(shard: JobShard, state: RunState, plan: InputPlan) -> dict[str, Any]:
    """Count the ids of one shard in its files, without their index. Raises Incomplete unless each
    of its ids is there once, with all rows.

    Returns the shard's ids in the input, its rows and error rows in the files, ids there that the
    input does not have ("others"), its attempts and when it finished.
    """
    data = data_of(state.output)
    index = OutputIndex.read(data)
    _check_own_rows(shard, index)
    wanted = plan.all_rows.of_shard(shard)
    num_ids = len(wanted)
    counted = count_done(wanted, index)
    if counted.num_missing:
        names = sample_ids(counted.missing, plan)
        raise Incomplete(
            f"shard {shard}: {counted.num_missing} of {num_ids} ids are missing: {names}. Run --shard {shard} again."
        )
    if extra := counted.excess:
        raise Incomplete(
            f"shard {shard}: {sum(map(len, extra.values()))} ids are there twice, such as in {next(iter(extra))}. Run "
            f"--shard {shard} again, which removes the second rows."
        )
    statuses = (table["status"] for table in read_tables(data, ["status"]))
    return {
        "shard": str(shard),
        "ids": num_ids,
        "rows": index.num_rows,
        "errors": sum(pc.sum(pc.equal(status, "error")).as_py() or 0 for status in statuses),
        "others": counted.num_others,
        "attempts": len(state.record["attempts"]),
        "finished_at": state.last_attempt.get("finished_at"),
    }


def _check_own_rows(shard: JobShard, index: OutputIndex) -> None:
    """Raise OutputMismatch for a file with an id of another shard."""
    for entries in index.by_range(num_ranges(index.num_entries)):
        if not (own := shard.holds(entries["id"])).all():
            file = index.files[entries["file"][int(np.argmin(own))]]
            raise OutputMismatch(
                f"{file} has rows of another shard than {shard}: move it out of the output"
            )
