"""Repair an output whose record is lost or damaged: adopt the rows in ``data/``, so that the run can be resumed.

The rows say which run and attempts made them, when, and with which configuration hash. The configuration itself must
be given; it is compared with that hash. What nothing says is not recorded: how an attempt ended, and what the input
files held at that time.

If ``_run.json`` is whole and only its list of input files is lost, it stays, and the files are recorded as they are.

    print(repair_output(load_config("job.yaml")))      # runs/a: adopted run 5f0c2a91d3b7 ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.finished import forget_finished
from eagle_ray.batch.driver.input_plan import InputPlan, plan_input
from eagle_ray.batch.reader.fingerprints import check_unchanged
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import (
    DATA,
    RUN,
    SHARD_DATA_PREFIX,
    SUCCESS,
    check_not_sharded,
    claim_output,
    data_of,
    root_of,
)
from eagle_ray.runs.lease import lock_output
from eagle_ray.runs.manifest import (
    PROGRESS,
    SUMMARY,
    begin_attempt,
    new_manifest,
    output_of,
    read_manifest,
    record_facts,
    version_of,
)
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.part_files import part_files, read_tables
from eagle_ray.runs.recorded_inputs import read_inputs
from eagle_ray.runs.row_index import digests, free_index_name
from eagle_ray.storage.path import StoragePath, read_json_object

DAMAGED_COPY = f"{RUN}.damaged"
OUTCOME = "repaired"
STATED = ("target_model", "draft_model", "method")  # what rows say of their configuration, in plain words
COLUMNS = ["request_id", "source_file", "run_id", "attempt", "status", "config_hash", "started_at", "finished_at"]


@dataclass(slots=True)
class FoundRows:
    """What the rows in data/ say of the run that made them.

    Attributes:
        stated: values of the columns STATED.
        attempts: first start and last end of a row, by attempt; None if no row of it was decoded.
    """

    num_rows: int = 0
    num_errors: int = 0
    run_ids: set[str] = field(default_factory=set)
    config_hashes: set[str] = field(default_factory=set)
    stated: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in STATED})
    source_files: set[str] = field(default_factory=set)
    attempts: dict[int, tuple[datetime | None, datetime | None]] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Add the rows of one file, with the columns COLUMNS and STATED."""
        self.num_rows += len(table)
        self.num_errors += pc.sum(pc.equal(table["status"], "error")).as_py() or 0
        self.run_ids |= _values(table["run_id"])
        self.config_hashes |= _values(table["config_hash"])
        self.source_files |= _values(table["source_file"])
        for name, values in self.stated.items():
            values |= _values(table[name])
        for attempt in pc.unique(table["attempt"]).to_pylist():
            rows = table.filter(pc.equal(table["attempt"], attempt))
            began, ended = self.attempts.get(attempt, (None, None))
            times = [began, pc.min(rows["started_at"]).as_py()], [ended, pc.max(rows["finished_at"]).as_py()]
            self.attempts[attempt] = _pick(min, times[0]), _pick(max, times[1])


def repair_output(config: JobConfig, trust_config: bool = False) -> str:
    """Write a manifest for the rows that are there and return what was done, or that nothing was to be done.

    Args:
        trust_config: adopt rows although their configuration hash differs, as after a change of release. Models and
            method must be equal.

    Raises:
        ConfigError: there are no rows.
        OutputMismatch: the rows are of another configuration or input, of two runs, or of another program.
        OutputLocked: a driver writes the output.
    """
    output = output_of(config)
    if config.execution.shard is None:
        check_not_sharded(root_of(output))
    if not part_files(data_of(output)):
        raise ConfigError(f"{output}: there are no rows in {data_of(output)}: nothing to adopt. Run the job.")
    with lock_output(output):
        free_index_name(output)
        damage = _damage_of(output)
        if damage is None:
            return f"{output / RUN} can be read: there is nothing to repair"
        found = _found_in(output)
        _check_one_run(output, found)
        _check_config(output, found, config, trust_config)
        plan = plan_input(config)
        check_unchanged(plan.files, {})  # a change since the scan
        _check_sources(output, found, plan)
        claim_output(config)
        return _adopt(output, found, config, plan, damage)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a record. manifest: the content of ``_run.json`` if only its list of input files is lost."""

    what: str
    manifest: dict[str, Any] | None = None


def _damage_of(output: StoragePath) -> Damage | None:
    try:
        manifest = read_manifest(output)
    except OutputDamaged:
        return Damage(f"{output / RUN} is damaged; its content is kept in {DAMAGED_COPY}")
    if manifest is None:
        return Damage(f"there was no {RUN}")
    try:
        read_inputs(output, manifest)
    except OutputDamaged:
        return Damage("the list of input files was lost or damaged", manifest)
    return None


def _found_in(output: StoragePath) -> FoundRows:
    """Return what the rows say. Raises OutputMismatch for another program's files, OutputDamaged for damaged ones."""
    data = data_of(output)
    OutputIndex.read(data)  # refuses the files that cannot be read, by name
    if data == root_of(output) / DATA and (shards := data.glob(f"{SHARD_DATA_PREFIX}*/**/*.parquet")):
        raise OutputMismatch(f"{shards[0]} is a shard's. Repair each shard with its --shard i/n.")
    found = FoundRows()
    for table in read_tables(data, [*COLUMNS, *STATED]):
        found.add(table)
    return found


def _check_one_run(output: StoragePath, found: FoundRows) -> None:
    if len(found.run_ids) == 1:
        return
    data = data_of(output)
    first: dict[str, str] = {}
    for file, table in zip(part_files(data), read_tables(data, ["run_id"]), strict=True):
        for run_id in _values(table["run_id"]):
            first.setdefault(run_id, file.name)
    names = ", ".join(f"{run_id} (such as {name})" for run_id, name in sorted(first.items(), key=lambda x: x[1]))
    raise OutputMismatch(f"{output} has rows of {len(first)} runs: {names}. Move the files of all but one away.")


def _check_config(output: StoragePath, found: FoundRows, config: JobConfig, trust_config: bool) -> None:
    """Refuse a configuration that did not make the rows, and show what the rows say of theirs."""
    given = config_hash(config)
    if found.config_hashes == {given}:
        return
    stated = ", ".join(f"{name} {'/'.join(sorted(values)) or 'none'}" for name, values in found.stated.items())
    if not trust_config:
        raise OutputMismatch(
            f"{output}: its rows were made with configuration {'/'.join(sorted(found.config_hashes))}, and the given "
            f"one is {given}. They say: {stated}. Give the configuration they were made with (-c, --set). If it is "
            "that one and only the release has changed, add --trust-config."
        )
    wanted = {
        "target_model": config.model.target,
        "draft_model": config.model.draft_name,
        "method": config.speculative.method,
    }
    if wrong := [name for name, values in found.stated.items() if values - {wanted[name]}]:
        raise OutputMismatch(
            f"{output}: the given configuration has another {', '.join(wrong)} than its rows: {stated}"
        )


def _check_sources(output: StoragePath, found: FoundRows, plan: InputPlan) -> None:
    """Refuse rows of requested ids from a file that is not in the input: it may have held other prompts."""
    absent = sorted(found.source_files - {file.path for file in plan.files})
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


def _adopt(output: StoragePath, found: FoundRows, config: JobConfig, plan: InputPlan, damage: Damage) -> str:
    old_version = version_of(output / RUN)
    if old_version is not None and damage.manifest is None:
        (output / DAMAGED_COPY).write_atomic((output / RUN).read_bytes())
    manifest = damage.manifest or _manifest_of_rows(output, found, config)
    is_complete = (output / SUCCESS).exists()
    forget_finished(output)
    run = begin_attempt(manifest, old_version, config, plan.fingerprints)
    record_facts(run, {"finished_at": _text(datetime.now(timezone.utc)), "outcome": OUTCOME})

    expected, index = plan.rows, OutputIndex.read(run.data)
    num_ids, counted = len(expected), count_done(expected, index)
    num_left, others = counted.num_missing, counted.num_others
    numbers = ", ".join(map(str, sorted(found.attempts)))
    return "\n".join(
        [
            f"{output.display_path}: {damage.what}",
            f"adopted run {run.run_id}: {found.num_rows:,} rows ({found.num_errors:,} errors) in {len(index.files):,} "
            f"files, of attempts {numbers}; this repair is attempt {run.attempt}",
            f"the input has {num_ids:,} ids: {num_ids - num_left:,} done, {num_left:,} to be made, and "
            f"{others:,} in the files that it does not have",
            f"not known, and not recorded: {_not_known(damage)}whether the input has changed since; its files are "
            "recorded as they are now",
            *([f"{SUCCESS} was there and is removed: the run writes it again after its count"] if is_complete else []),
            "Run the same configuration to resume.",
        ]
    )


def _manifest_of_rows(output: StoragePath, found: FoundRows, config: JobConfig) -> dict[str, Any]:
    """Return the manifest as far as the rows tell it."""
    [run_id] = found.run_ids
    manifest = new_manifest(config, attempt=max([*found.attempts, *_noted_attempts(output, run_id)]))
    attempts = [_attempt(number, *times) for number, times in sorted(found.attempts.items())]
    return manifest | {"run_id": run_id, "created_at": attempts[0]["started_at"], "attempts": attempts}


def _not_known(damage: Damage) -> str:
    return "how those attempts ended, their machines, and " if damage.manifest is None else ""


def _noted_attempts(output: StoragePath, run_id: str) -> list[int]:
    """Return the attempts that other files of the run name: one may have ended before its first row."""
    notes = [read_json_object(output / name) or {} for name in (PROGRESS, SUMMARY)]
    return [note["attempt"] for note in notes if note.get("run_id") == run_id and isinstance(note.get("attempt"), int)]


def _attempt(number: int, began: datetime | None, ended: datetime | None) -> dict[str, Any]:
    """Return an attempt without an outcome, as one that was killed has: its writers are waited for."""
    facts = {"attempt": number, "started_at": _text(began or datetime.fromtimestamp(0, timezone.utc)), "adopted": True}
    return facts | ({"last_row_at": _text(ended)} if ended else {})


def _text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


def _values(column: pa.ChunkedArray) -> set[str]:
    return set(pc.unique(column).drop_null().to_pylist())


def _pick(choose: Any, times: Iterable[datetime | None]) -> datetime | None:
    return choose((time for time in times if time is not None), default=None)
