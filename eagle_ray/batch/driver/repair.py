"""Repair an output whose record is lost or damaged: adopt the rows in ``data/``, so that the run can be resumed.

The rows say which run and attempts made them, when, and with which configuration hash. The
configuration itself must be given; it is compared with that hash. Two facts cannot be recovered:
how an attempt ended, and what the input files held at that time.

    print(repair_output(load_config("job.yaml")))      # runs/a: adopted run 5f0c2a91d3b7 ...
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.driver.claim import free_output, hold_free
from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.input_plan import InputPlan, plan_input
from eagle_ray.batch.driver.job_manifest import begin_job, check_config_hash, remove_finished
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import (
    DATA,
    PROGRESS,
    RUN,
    SHARD_DATA_PREFIX,
    SUCCESS,
    SUMMARY,
    check_claim,
    check_not_sharded,
    claim_output,
    data_of,
    output_of,
    root_of,
)
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import part_files, read_tables
from eagle_ray.runs.recorded_inputs import read_inputs
from eagle_ray.runs.row_index import digests
from eagle_ray.runs.run import Run, RunState, new_manifest, now_text, version_of
from eagle_ray.storage.path import StoragePath, read_json_object

DAMAGED_COPY = f"{RUN}.damaged"
OUTCOME = "repaired"
# What rows say of their configuration, in plain words.
STATED = (
    "target_model",
    "draft_model",
    "method",
)
EPOCH = "1970-01-01T00:00:00+00:00"  # when an attempt began whose rows were never decoded
# What rows say of the run that made them.
ORIGIN_COLUMNS = [
    "run_id",
    "attempt",
    "config_hash",
    "source_file",
    *STATED,
]
COUNTED = [
    ("status", "count"),
    ("is_error", "sum"),
    ("started_at", "min"),
    ("finished_at", "max"),
    ("file", "min"),
]


def repair_output(config: JobConfig, trust_config: bool = False) -> str:
    """Write a manifest for the rows in ``data/``, and return a description of what was done.

    Args:
        trust_config: adopt rows although their configuration hash differs, as after a change of
            release. Models and method must be equal.

    Raises:
        ConfigError: there are no rows.
        OutputMismatch: the rows come from another configuration or input, from two runs, or from
            another program.
        OutputLocked: a driver writes the output.
    """
    output = output_of(config)
    if config.execution.shard is None:
        check_not_sharded(root_of(output))
    if not part_files(data_of(output)):
        raise ConfigError(
            f"{output}: there are no rows in {data_of(output)}: nothing to adopt. Run the job."
        )
    free = free_output(output)
    damage = _damage_of(output)
    if damage is None:
        return f"{output / RUN} can be read: there is nothing to repair"
    index, origins = _origins_in(output)
    _check_one_run(output, origins)
    _check_config(output, origins, config, trust_config)
    plan = plan_input(config)
    plan.check_unchanged()
    _check_sources(output, origins, plan)
    check_claim(config)
    is_complete = (output / SUCCESS).exists()
    state = _state_from(output, origins)

    with hold_free(free) as lease:
        claim_output(config, plan.revisions)
        if state.version is not None:
            (output / DAMAGED_COPY).write_atomic((output / RUN).read_bytes())
        run = begin_job(state, config, plan.fingerprints, lease.check, plan.revisions)
        remove_finished(output)
        run.record({"finished_at": now_text(), "outcome": OUTCOME})
        return "\n".join(
            [f"{output.display_path}: {damage}", *_report(run, origins, plan, index, is_complete)]
        )


def _damage_of(output: StoragePath) -> str | None:
    try:
        manifest = Run.inspect(output).manifest
        if manifest is None:
            return f"there was no {RUN}"
        check_config_hash(output, manifest)
        read_inputs(output, manifest)
    except OutputDamaged as error:
        return f"{str(error).partition(' (')[0]}; the content of {RUN} is kept in {DAMAGED_COPY}"
    return None


def _origins_in(output: StoragePath) -> tuple[OutputIndex, pa.Table]:
    """Return the ids in the files, and what the rows say: a line with counts and times for each different combination.

    Raises OutputMismatch for another program's files, OutputDamaged for damaged ones.
    """
    data = data_of(output)
    index = OutputIndex.read(data)  # refuses the files that cannot be read, by name
    if data == root_of(output) / DATA and (
        shards := data.glob(f"{SHARD_DATA_PREFIX}*/**/*.parquet")
    ):
        raise OutputMismatch(f"{shards[0]} is a shard's. Repair each shard with its --shard i/n.")
    tables = []
    for file, table in zip(
        index.files,
        read_tables(data, [*ORIGIN_COLUMNS, "status", "started_at", "finished_at"]),
        strict=True,
    ):
        table = table.append_column("is_error", pc.equal(table["status"], "error"))
        table = table.append_column("file", pa.array([file.name] * len(table), pa.string()))
        tables.append(table.group_by(ORIGIN_COLUMNS).aggregate(COUNTED))
    return index, pa.concat_tables(tables)


def _check_one_run(output: StoragePath, origins: pa.Table) -> None:
    runs = (
        origins.group_by("run_id")
        .aggregate([("file_min", "min")])
        .sort_by("file_min_min")
        .to_pylist()
    )
    if len(runs) > 1:
        names = ", ".join(f"{run['run_id']} (such as {run['file_min_min']})" for run in runs)
        raise OutputMismatch(
            f"{output} has rows of {len(runs)} runs: {names}. Move the files of all but one away."
        )


def _check_config(
    output: StoragePath, origins: pa.Table, config: JobConfig, trust_config: bool
) -> None:
    """Refuse a configuration that did not make the rows, and show what the rows say of theirs."""
    given = config_hash(config)
    hashes = _values(origins, "config_hash")
    if hashes == [given]:
        return
    stated = ", ".join(f"{name} {'/'.join(_values(origins, name)) or 'none'}" for name in STATED)
    if not trust_config:
        raise OutputMismatch(
            f"{output}: its rows were made with configuration {'/'.join(hashes)}, and the given one is {given}. They "
            f"say: {stated}. Give the configuration they were made with (-c, --set). If it is that one and only the "
            "release has changed, add --trust-config."
        )
    models = {"target_model": config.model.target, "draft_model": config.model.draft_name}
    if wrong := [name for name, value in models.items() if set(_values(origins, name)) - {value}]:
        raise OutputMismatch(
            f"{output}: the given configuration has another {', '.join(wrong)} than its rows: {stated}"
        )


def _check_sources(output: StoragePath, origins: pa.Table, plan: InputPlan) -> None:
    """Refuse rows of requested ids from a file that is not in the input: it may have held other prompts."""
    absent = sorted(set(_values(origins, "source_file")) - {file.path for file in plan.files})
    for table in read_tables(data_of(output), ["request_id", "source_file"]) if absent else ():
        rows = table.filter(pc.is_in(table["source_file"], pa.array(absent)))
        ids = rows["request_id"].to_pylist()
        if (requested := plan.all_rows.contains(digests(ids))).any():
            place = int(requested.argmax())
            raise OutputMismatch(
                f"{output} has an answer to the id {ids[place]!r} from {rows['source_file'][place]}, which is not in "
                "this input, and nothing says whether its rows were the same. Give the input under its earlier path "
                "(-i)."
            )


def _state_from(output: StoragePath, origins: pa.Table) -> RunState:
    """Return the manifest as far as the rows tell it."""
    version = version_of(output / RUN)
    [run_id] = _values(origins, "run_id")
    attempts = _attempts_in(origins)

    # An attempt may have made no row, so other files may know a later one.
    numbers = [attempts[-1]["attempt"]]
    for name in (PROGRESS, SUMMARY, RUN):
        note = read_json_object(output / name) or {}
        if note.get("run_id") == run_id:
            numbers.append(note.get("attempt"))
    last = max(number for number in numbers if isinstance(number, int))

    facts = {"run_id": run_id, "created_at": attempts[0]["started_at"], "attempts": attempts}
    return RunState(output, version, new_manifest(last) | facts)


def _attempts_in(origins: pa.Table) -> list[dict[str, Any]]:
    """Return the attempts that the rows name, without outcomes, so that their writers are waited for."""
    times = origins.group_by("attempt").aggregate(
        [("started_at_min", "min"), ("finished_at_max", "max")]
    )
    began = "started_at_min_min"
    ended = "finished_at_max_max"
    return [
        {"attempt": each["attempt"], "started_at": _text(each[began]) or EPOCH, "adopted": True}
        | ({"last_row_at": _text(each[ended])} if each[ended] else {})
        for each in times.sort_by("attempt").to_pylist()
    ]


def _report(
    run: Run, origins: pa.Table, plan: InputPlan, index: OutputIndex, is_complete: bool
) -> list[str]:
    num_ids = len(plan.rows)
    counted = count_done(plan.rows, index)
    num_errors = pc.sum(origins["is_error_sum"]).as_py() or 0
    numbers = ", ".join(map(str, sorted(set(origins["attempt"].to_pylist()))))
    return [
        f"adopted run {run.run_id}: {index.num_rows:,} rows ({num_errors:,} errors) in {len(index.files):,} files, of "
        f"attempts {numbers}; this repair is attempt {run.attempt}",
        f"the input has {num_ids:,} ids: {num_ids - counted.num_missing:,} done, {counted.num_missing:,} to be made, "
        f"and {counted.num_others:,} in the files that it does not have",
        "not known, and not recorded: how those attempts ended, their machines, and whether the input has changed "
        "since; its files are recorded as they are now",
        *(
            [f"{SUCCESS} was there and is removed: the run writes it again after its count"]
            if is_complete
            else []
        ),
        "Run the same configuration to resume.",
    ]


def _values(origins: pa.Table, name: str) -> list[str]:
    return sorted(pc.unique(origins[name]).drop_null().to_pylist())


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="seconds")
