"""The manifest of a run: ``_run.json`` in the output directory, with its configuration and attempts.

Each start is an attempt with its own number. A writer that finds another number in ``_run.json`` is fenced off and
publishes nothing more.

    with lock_output(output):
        run = open_run(config, plan.fingerprints)
        with record_outcome(run):
            generate(...)
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from eagle_ray.config import JobConfig, changed_keys, config_hash, recorded, upgrade_config
from eagle_ray.config.records import RecordKind, RunIdentity, RunRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import (
    FencedError,
    JobError,
    OutputDamaged,
    OutputLocked,
    OutputMismatch,
    StorageUnavailable,
    outcome_of,
)
from eagle_ray.runs.job_shard import JobShard
from eagle_ray.runs.layout import DATA, RUN, SUCCESS, data_of, read_record, root_of, shard_output
from eagle_ray.runs.output_index import own_files
from eagle_ray.runs.part_files import attempt_of, part_files
from eagle_ray.runs.process_id import Process
from eagle_ray.runs.recorded_inputs import (
    FORMAT_WITH_INPUTS,
    Fingerprint,
    input_lists,
    read_inputs,
    what_changed,
    write_inputs,
)
from eagle_ray.storage.path import StoragePath, json_bytes
from eagle_ray.storage.storage_errors import remedy_of

PROGRESS, SUMMARY, REPORT = "_progress.json", "_summary.json", "report.html"
ESTIMATE = "_estimate.json"  # by `validate --estimate`, before the run
FORMAT_VERSION = 2  # of _run.json
REMEDY = "choose another output.path, or --overwrite"
EXISTS_REMEDY = "Choose another output.path, or --resume or --overwrite"
PACKAGES = ("eagle-ray", "ray", "torch", "transformers", "pyarrow")


@dataclass(frozen=True, slots=True)
class RunHandle:
    """One attempt at one output directory; pickled into every writer.

    Attributes:
        attempt: 1 for the first start; each resume and each overwrite adds one.
        check_lock: in the driver, called before each publish; writers in other processes have none
            (``runs/lease.py`` explains why that is enough).
    """

    output: StoragePath
    run_id: str
    attempt: int
    config_hash: str
    check_lock: Callable[[], None] | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunHandle, (self.output, self.run_id, self.attempt, self.config_hash)

    @property
    def data(self) -> StoragePath:
        return data_of(self.output)

    def check_current(self) -> None:
        """Check that ``_run.json`` still names this attempt. Waits while a lease is uncertain.

        Raises OutputDamaged if the file is gone, FencedError if it names another attempt.
        """
        if self.check_lock is not None:
            self.check_lock()
        manifest = read_manifest(self.output, RunIdentity)
        if manifest is None:
            raise OutputDamaged(
                f"{self.output}: {RUN} is gone: the output was deleted while the job ran. Nothing more is written; "
                "run the command again to start from the first row."
            )
        if (manifest["run_id"], manifest["attempt"]) != (self.run_id, self.attempt):
            found = f"run {manifest['run_id']} attempt {manifest['attempt']}"
            raise FencedError(f"{self.output}: {RUN} names {found}, not run {self.run_id} attempt {self.attempt}")

    def publish(self, name: str, data: bytes) -> None:
        """Write one of the run's own records, if this is the current attempt.

        The write is a compare-and-swap on the version that was there before the check. So a write that an earlier
        attempt's driver sends late replaces nothing that a later attempt has written since. Raises as check_current
        does.
        """
        file = self.output / name
        written = None
        while written is None:  # another driver wrote in between: the next check says whether it is a later attempt
            version = version_of(file)
            self.check_current()  # first: an output that was deleted is not made again
            if version is None:
                written = file.create(data, self.check_current)
            else:
                written = file.replace(data, version, self.check_current)


def output_of(config: JobConfig) -> StoragePath:
    """Return the directory of the run's record, absolute since workers run in another working directory.

    It is output.path, or the shard's directory below.
    """
    try:
        root = StoragePath.of(config.output.path)
    except ValueError as error:
        raise ConfigError(f"output.path: {error}") from None
    return shard_output(root, JobShard.of(config.execution.shard)) if config.execution.shard else root


def read_manifest(output: StoragePath, kind: RecordKind = RunRecord) -> dict[str, Any] | None:
    """Return the content of ``_run.json``, or None if there is none. Raises OutputDamaged if it is damaged.

    kind: the part of it that the caller needs.
    """
    remedy = (
        "adopt its rows with eagle-ray repair, put it back from a copy, choose another output.path, or start again "
        f"with --overwrite (deletes {DATA}/)"
    )
    return read_record(output / RUN, kind, remedy)


def manifest_of(output: StoragePath) -> dict[str, Any]:
    """Return the manifest of a run that has begun. Raises OutputDamaged if it is gone or damaged."""
    manifest = read_manifest(output)
    if manifest is None:
        raise OutputDamaged(f"{output / RUN} is gone: put it back from a copy, or start the job again")
    return manifest


@contextmanager
def wrap_os_errors(output: StoragePath) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names output.path, or into StorageUnavailable if it may pass."""
    try:
        yield
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        problem = f"output.path: cannot write to {error.filename or output}: {reason}"
        if outcome_of(error).is_transient:
            raise StorageUnavailable(f"{problem}. {remedy_of(error)}") from error
        raise ConfigError(f"{problem}. Choose a directory that can be written.") from error


def open_run(
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    accepted: Container[str] = (),
) -> RunHandle:
    """Start an attempt at config.output.path. The caller holds its lock.

    Args:
        files: fingerprints of the input files by path.
        accepted: paths of changed files whose rows were compared with the answers.

    Raises ConfigError if there is output and if_exists is fail, or if the directory is not writable;
    StorageUnavailable if it cannot be written for now; OutputMismatch if it is another job's output.
    """
    with wrap_os_errors(output := output_of(config)):
        return _open_run(output, config, files, accepted)


def _open_run(
    output: StoragePath,
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    accepted: Container[str],
) -> RunHandle:
    old_version = version_of(output / RUN)  # what another driver writes after this look is not written over
    if config.output.if_exists == "overwrite":
        return begin_attempt(_overwrite_manifest(output, config), old_version, config, files)
    old = read_manifest(output)
    if old is None:
        check_no_foreign_data(output)
        manifest = new_manifest(config, attempt=0)
    elif config.output.if_exists == "fail":
        raise ConfigError(
            f"output.path {output} holds run {old['run_id']} and output.if_exists is 'fail'. {EXISTS_REMEDY}."
        )
    else:
        _check_same_job(output, old, config)
        manifest = old
    noted = read_inputs(output, manifest) if old else {}
    check_same_files(output, noted, {path: each for path, each in files.items() if path not in accepted})
    return begin_attempt(manifest, old_version, config, {**noted, **files})


@contextmanager
def record_outcome(run: RunHandle) -> Iterator[None]:
    """Record in ``_run.json`` how and when this attempt ended."""
    outcome = "done"
    try:
        yield
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}".rstrip(": ")
        raise
    finally:
        record_facts(run, {"finished_at": _now(), "outcome": outcome})


def record_facts(run: RunHandle, facts: dict[str, str]) -> None:
    """Write the facts. Give up silently if the manifest is another attempt's or not writable: the outcome
    matters more.
    """
    with suppress(JobError, OSError):
        old_version = version_of(run.output / RUN)
        replace(run, check_lock=None).check_current()  # last words do not wait for a lease: the write is conditional
        manifest = manifest_of(run.output)
        manifest["attempts"][-1] |= facts
        _write_manifest(run.output, manifest, old_version)


def new_manifest(config: JobConfig, attempt: int) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "run_id": uuid4().hex[:12],
        "name": config.name,
        "created_at": _now(),
        "attempt": attempt,
        "inputs": {},
        "attempts": [],
    }


def _overwrite_manifest(output: StoragePath, config: JobConfig) -> dict[str, Any]:
    """Delete the old run's files and write a new run's manifest."""
    try:
        old = read_manifest(output)
    except OutputDamaged:
        old = None
    attempts = [attempt_of(file) or 0 for file in part_files(data_of(output))]
    _remove_run(output)
    return new_manifest(config, attempt=old["attempt"] if old else max(attempts, default=0))


def begin_attempt(
    manifest: dict[str, Any], old_version: int | str | None, config: JobConfig, inputs: Mapping[str, Fingerprint]
) -> RunHandle:
    """Raise the attempt number before anything is read: from now on no earlier writer publishes.

    inputs: all files of the run, also those of earlier attempts that are not asked for now.
    """
    output = output_of(config)
    manifest["attempt"] += 1
    manifest["config"] = recorded(config)
    manifest["config_hash"] = config_hash(config)
    earlier_lists = input_lists(output)
    manifest["inputs"] = write_inputs(output, inputs, manifest["inputs"])
    manifest["format_version"] = FORMAT_VERSION
    manifest["models"] = {name: _model_files(name) for name in (config.model.target, *config.model.drafts)}
    manifest["versions"], manifest["hardware"] = _versions(), _hardware()
    for directory in (root_of(output), output):  # the whole output's, and the shard's
        (directory / SUCCESS).remove()  # first: a missing one is made again, one that is no longer true is believed
    driver_id = uuid4().hex[:12]  # no two drivers ever write the same bytes
    manifest["attempts"].append(
        {
            "attempt": manifest["attempt"],
            "started_at": _now(),
            "process": asdict(Process.current()),
            "driver": driver_id,
        }
    )
    _write_manifest(output, manifest, old_version)
    _remove_unused(earlier_lists, manifest["inputs"]["list"])
    data_of(output).make_directory()
    for directory in (output, data_of(output)):
        directory.remove_temporary()
    return RunHandle(output, manifest["run_id"], manifest["attempt"], manifest["config_hash"])


def _remove_unused(lists: Iterable[StoragePath], used: str) -> None:
    """Delete lists of input files that were there before this attempt began: a later driver may write others."""
    with suppress(OSError):
        for file in lists:
            if file.name != used:
                file.remove()


def _write_manifest(output: StoragePath, manifest: dict[str, Any], old_version: int | str | None) -> None:
    """Raises OutputLocked where it is not the version any more that was there before."""
    file, data = output / RUN, json_bytes(manifest)
    if (file.create(data) if old_version is None else file.replace(data, old_version)) is None:
        raise OutputLocked(f"{file} is being written by another driver: wait for it to end")


def version_of(file: StoragePath) -> int | str | None:
    try:
        return file.stat().version
    except FileNotFoundError:
        return None


def _check_same_job(output: StoragePath, old: dict[str, Any], config: JobConfig) -> None:
    """Check that a resume asks for the completions of the earlier run."""
    if (found := old.get("format_version")) not in (FORMAT_WITH_INPUTS, FORMAT_VERSION):
        raise OutputMismatch(f"{output}/{RUN} has format {found}, this is {FORMAT_VERSION}: {REMEDY}")
    before, new = upgrade_config(old["config"]), config.model_dump(mode="json")
    if keys := changed_keys(before, new):
        changes = "; ".join(f"{key}: was {_value_at(before, key)!r}, now {_value_at(new, key)!r}" for key in keys)
        raise OutputMismatch(f"{output} belongs to another configuration ({changes}): {REMEDY}")


def check_same_files(output: StoragePath, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Check that a resume has the earlier run's files; new files are added."""
    changes = {path: what_changed(old.get(path, found), found) for path, found in new.items()}
    if changed := ", ".join(f"{path} ({change})" for path, change in changes.items() if change):
        raise OutputMismatch(f"input changed since {output} was made from it: {changed}: put it back, {REMEDY}")


def check_no_foreign_data(output: StoragePath) -> None:
    """Refuse Parquet files that no manifest explains, and tables: they belong to another program."""
    if table := _table_kind(root_of(output)):
        raise OutputMismatch(
            f"output.path: {output} is {table} table, which deletes files that it did not commit. Choose another "
            "output.path, and add the finished run's files to the table."
        )
    if foreign := part_files(data_of(output)):
        raise OutputMismatch(
            f"{foreign[0]} is there but no {output / RUN}: choose another output.path, or adopt the rows of a run that "
            "lost it with eagle-ray repair"
        )


def _table_kind(output: StoragePath) -> str | None:
    if (output / "_delta_log").is_directory():
        return "a Delta"
    return "an Iceberg" if (output / "metadata").glob("*.metadata.json") else None


def _remove_run(output: StoragePath) -> None:
    """Delete what a run writes, _SUCCESS first, and nothing else; ``_run.json`` is replaced by the next attempt's."""
    rows = own_files(data_of(output))
    for path in [*(output / name for name in (SUCCESS, SUMMARY, PROGRESS, REPORT)), *rows]:
        path.remove()


def _value_at(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _model_files(name: str) -> dict[str, dict[str, int]]:
    """Size and time of a local model's files: what stood under that name. An embedded one comes with the version."""
    files = sorted(file for file in Path(name).glob("*") if file.is_file())
    return {file.name: {"size": file.stat().st_size, "mtime_ns": file.stat().st_mtime_ns} for file in files}


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that was never installed
        return "not installed"


def _hardware() -> dict[str, Any]:
    return {"host": socket.gethostname(), "platform": platform.platform(), "cpus": os.cpu_count()}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
