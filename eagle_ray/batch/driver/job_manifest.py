"""The manifest of a job (``_run.json``): its configuration and input files, and whether a job may resume it.

    with hold(output):
        run = open_run(config, plan.fingerprints)     # check_run, which writes nothing, then begin_run
        with run.recorded_outcome():
            generate(...)

**Finished runs** are recorded with the key of their plan and the states of the files in data/.
While both are unchanged, a second start trusts the record and reads no row.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle_ray.batch.driver.input_index import PreviousRun
from eagle_ray.config import (
    JobConfig,
    changed_keys,
    config_hash,
    is_hash_of_another,
    recorded,
    upgrade_config,
)
from eagle_ray.config.job import EMBEDDED_PAIRS, SMOLLM2
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import JobError, OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import (
    NO_REVISIONS,
    RUN,
    data_of,
    output_of,
    root_of,
    shard_revisions,
    wrap_os_errors,
)
from eagle_ray.runs.part_files import part_files
from eagle_ray.runs.recorded_inputs import (
    FORMAT_WITH_INPUTS,
    Fingerprint,
    changed_files,
    input_lists,
    read_inputs,
    write_inputs,
)
from eagle_ray.runs.row_index import (
    INDEX_DIRECTORY,
    free_index_name,
    read_index_file,
    write_facts,
)
from eagle_ray.runs.run import (
    FORMAT_VERSION,
    RUN_REMEDY,
    Run,
    RunState,
    begin_attempt,
    is_current,
    overwritten,
    remove_overwritten,
)
from eagle_ray.storage.model_files import gguf_file, stored_quantization
from eagle_ray.storage.path import StoragePath

OTHER_OUTPUT = "choose another output.path, or --overwrite, which deletes its rows"
EXISTS_REMEDY = "Choose another output.path, or --resume, or --overwrite, which deletes its rows"
RECORDED_PACKAGES = ("eagle-ray", "ray", "torch", "transformers", "pyarrow")
FINISHED_FILE = "finished.json"
log = logging.getLogger("eagle_ray")


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The run that a start finds in the output directory.

    Attributes:
        state: state of the job's run, or of a new one.
        inputs: fingerprints of the files that the run was made from.
        erased: part files of the run that the start overwrites.
    """

    state: RunState
    inputs: Mapping[str, Fingerprint] = field(default_factory=dict)
    erased: Sequence[StoragePath] = ()


def open_run(
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    accepted: Container[str] = (),
    check_lock: Callable[[], None] | None = None,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> Run:
    """Start an attempt at config.output.path: check_run, then begin_run, with their arguments."""
    return begin_run(check_run(config, files, accepted), config, files, check_lock, revisions)


def check_run(
    config: JobConfig, files: Mapping[str, Fingerprint], accepted: Container[str] = ()
) -> EarlierRun:
    """Return the state of the output directory. Nothing is written.

    Args:
        files: fingerprints of the input files by path.
        accepted: paths of changed input files that may stay, because their rows were compared
            already.

    Raises ConfigError if there is output and if_exists is fail, or if the directory cannot be read;
    OutputMismatch if it is another job's or another program's output.
    """
    output = output_of(config)
    with wrap_os_errors(output):
        if config.output.if_exists == "overwrite":
            state, erased = overwritten(output)
            return EarlierRun(state, erased=erased)
        state, noted = resumable(output, config, files, accepted)
        return EarlierRun(state, noted)


def begin_run(
    earlier: EarlierRun,
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    check_lock: Callable[[], None] | None = None,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> Run:
    """Begin an attempt at the run that check_run returned. The caller must hold the output's lease.

    Args:
        revisions: commits on the hub that the input comes from, with those of earlier attempts.

    Raises OutputLocked if the run was written since, ConfigError if the directory is not writable,
    StorageUnavailable if it cannot be written for now.
    """
    with wrap_os_errors(earlier.state.output):
        inputs = {**earlier.inputs, **files}
        run = begin_job(earlier.state, config, inputs, check_lock, revisions)
        if config.output.if_exists == "overwrite":
            remove_overwritten(run.output, earlier.erased)
    return run


def resumable(
    output: StoragePath,
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    accepted: Container[str],
) -> tuple[RunState, dict[str, Fingerprint]]:
    """Return the run in the output directory and its input files. Raises as check_run does."""
    state = Run.inspect(output)
    if state.manifest is None:
        check_no_foreign_data(output)
        return state, {}
    if config.output.if_exists == "fail":
        raise ConfigError(
            f"output.path {output} holds run {state.manifest['run_id']} and output.if_exists is 'fail'. "
            f"{EXISTS_REMEDY}."
        )
    _check_same_job(output, state.manifest, config)
    noted = read_inputs(output, state.manifest)
    check_same_files(
        output, noted, {path: each for path, each in files.items() if path not in accepted}
    )
    return state, noted


def begin_job(
    state: RunState,
    config: JobConfig,
    inputs: Mapping[str, Fingerprint],
    check_lock: Callable[[], None] | None = None,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> Run:
    """Begin an attempt without checking the directory. The caller holds the lease. A failure changes nothing.

    The list of input files is written first, while nothing names it; then ``_run.json``, which
    does.

    Args:
        inputs: all input files of the run, including those of earlier attempts that this input
            lacks.
    """
    earlier_lists = input_lists(state.output)
    try:
        facts = job_facts(state, config, inputs) | {"revisions": dict(revisions)}
        run = begin_attempt(state, facts)
    except BaseException:
        with suppress(OSError):
            if is_current(state):
                for file in set(input_lists(state.output)) - set(earlier_lists):
                    file.remove()
        raise
    remove_unused_lists(earlier_lists, facts["inputs"]["list"])
    free_index_name(state.output)
    return replace(run, check_lock=check_lock)


def job_facts(
    state: RunState, config: JobConfig, inputs: Mapping[str, Fingerprint]
) -> dict[str, Any]:
    """Return the manifest's facts about the job: configuration, models, versions, hardware. Writes
    the list of input files."""
    before = state.manifest or {}
    return {
        "name": before.get("name", config.name),
        "config": recorded(config),
        "config_hash": config_hash(config),
        "inputs": write_inputs(state.output, inputs, before.get("inputs")),
        "target_quantization": _target_quantization(config),
        "models": {
            name: _model_files(name) for name in (config.model.target, *config.model.drafts)
        },
        "versions": library_versions(),
        "hardware": _hardware(),
    }


def remove_unused_lists(lists: Iterable[StoragePath], used: str) -> None:
    """Delete these lists of input files, found before this attempt began, except the one in use."""
    with suppress(OSError):
        for file in lists:
            if file.name != used:
                file.remove()


def _check_same_job(output: StoragePath, old: dict[str, Any], config: JobConfig) -> None:
    """Check that a resume asks for the completions of the earlier run."""
    if (format_version := old.get("format_version")) not in (FORMAT_WITH_INPUTS, FORMAT_VERSION):
        raise OutputMismatch(
            f"{output}/{RUN} has format {format_version}, this is {FORMAT_VERSION}: {OTHER_OUTPUT}"
        )
    before = upgrade_config(old["config"])
    new = config.model_dump(mode="json")
    if keys := changed_keys(before, new):
        check_config_hash(output, old)
        changes = "; ".join(
            f"{key}: was {_value_at(before, key)!r}, now {_value_at(new, key)!r}" for key in keys
        )
        raise OutputMismatch(
            f"{output} belongs to another configuration ({changes}): {OTHER_OUTPUT}"
        )
    _check_same_weights(output, old, _target_quantization(config))


def check_config_hash(output: StoragePath, record: Mapping[str, Any]) -> None:
    """Raise OutputDamaged if the recorded configuration does not have the recorded hash.

    Records of other releases are not checked, since their hash may cover other keys.
    """
    is_own_release = record["versions"].get(RECORDED_PACKAGES[0]) == _version(RECORDED_PACKAGES[0])
    if is_own_release and is_hash_of_another(record["config"], record["config_hash"]):
        raise OutputDamaged(
            f"{output / RUN} is damaged (its configuration has another hash than it says): {RUN_REMEDY}"
        )


def _check_same_weights(output: StoragePath, old: dict[str, Any], now: str | None) -> None:
    """Raise OutputMismatch if the target is quantised differently than before, since its outputs would change.

    Older releases did not record it, and dequantised GGUF files.
    """
    unrecorded = None if now is not None and now.startswith("gguf") else now
    before = old.get("target_quantization", unrecorded)
    if before != now and "unknown" not in (before, now):
        raise OutputMismatch(
            f"{output} was made with a target of other weights (quantization: was {before}, now {now}): {OTHER_OUTPUT}"
        )


def check_same_files(output: StoragePath, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise OutputMismatch if a file of the earlier run has changed. New files are allowed."""
    if changed := changed_files(old, new):
        raise OutputMismatch(
            f"input changed since {output} was made from it: {changed}: put it back, {OTHER_OUTPUT}"
        )


def check_no_foreign_data(output: StoragePath) -> None:
    """Refuse an output directory with Parquet files but no manifest, or in a table: it belongs to another program."""
    check_no_table(root_of(output))
    if foreign := part_files(data_of(output)):
        raise OutputMismatch(
            f"{foreign[0]} is there but no {output / RUN}: choose another output.path, or adopt the rows of a run that "
            "lost it with eagle-ray repair"
        )


def check_no_table(output: StoragePath) -> None:
    """Refuse an output directory that is a Delta or Iceberg table, or lies inside one."""
    place = output
    while True:
        if kind := _table_kind(place):
            where = "is" if place == output else "is inside"
            name = "" if place == output else f", {place}"
            raise OutputMismatch(
                f"{output} {where} {kind} table{name}, which deletes files that it did not commit. Choose "
                "another output.path, and add the finished run's files to the table."
            )
        if place == place.parent:
            return
        place = place.parent


def _table_kind(place: StoragePath) -> str | None:
    """Return "a Delta" or "an Iceberg" if a directory is such a table, else None, also if it may not be read."""
    try:
        if (place / "_delta_log").is_directory():
            return "a Delta"
        return "an Iceberg" if (place / "metadata").glob("*.metadata.json") else None
    except PermissionError:
        return None


def _value_at(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _model_files(name: str) -> dict[str, dict[str, int]]:
    """Return the size and time of a local model's files, by which a changed model is noticed."""
    path = Path(name)
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file())
    return {
        file.name: {"size": file.stat().st_size, "mtime_ns": file.stat().st_mtime_ns}
        for file in files
    }


def _target_quantization(config: JobConfig) -> str | None:
    """Return the quantization of the target that decodes the run's outputs, or None for plain weights.

    A model that is no file here is "unknown": workers get it from storage or the hub.
    """
    model = config.model
    path = Path(config.model.target)
    if model.quantization != "none":
        stored: str | None = f"{model.quantization}, rounded when it is loaded"
    elif model.dtype == "float32":
        stored = None  # the files' weights are dequantised
    elif model.target == SMOLLM2:
        file = gguf_file()
        stored = None if file is None else stored_quantization(file)
    elif model.target in EMBEDDED_PAIRS:
        stored = None
    else:
        stored = stored_quantization(path) if path.exists() else "unknown"
    if config.execution.kv_dtype == "auto":
        return stored
    return f"{stored or 'weights are not'}; keys and values {config.execution.kv_dtype}"


def library_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: _version(name) for name in RECORDED_PACKAGES
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that was never installed
        return "not installed"


def _hardware() -> dict[str, Any]:
    return {"host": socket.gethostname(), "platform": platform.platform(), "cpus": os.cpu_count()}


def previous_run(config: JobConfig, is_index_damaged: bool = False) -> PreviousRun:
    """Return the state that earlier attempts left. If the output will be overwritten, that is the input's index only.

    Args:
        is_index_damaged: neither the index nor its record of a finished run can be used.
    """
    output = output_of(config)
    index = None if is_index_damaged else output / INDEX_DIRECTORY
    revisions: dict[str, str] = {}
    with suppress(OSError, JobError):
        revisions = shard_revisions(config)
    if config.output.if_exists != "overwrite":
        with suppress(OSError, JobError):  # opening the run names what is wrong
            if manifest := Run.inspect(output).manifest:
                finished = None if is_index_damaged else finished_key(output)
                revisions = manifest.get("revisions", {}) | revisions
                return PreviousRun(index, read_inputs(output, manifest), finished, revisions)
    return PreviousRun(index, revisions=revisions)


def finished_key(output: StoragePath) -> str | None:
    """Return the key of the plan whose rows the files hold completely, from the record; None without a valid record."""
    finished = read_index_file(output / INDEX_DIRECTORY / FINISHED_FILE)
    if finished is None or finished.get("files") != files_key(output):
        return None
    return finished.get("key")


def record_finished(output: StoragePath, key: str, counted: str) -> None:
    """Record that the files hold every row of the plan with this key.

    Args:
        counted: result of files_key before the rows were counted, so that a file added later makes
            the record invalid.
    """
    write_facts(output / INDEX_DIRECTORY / FINISHED_FILE, {"key": key, "files": counted})


def remove_finished(output: StoragePath) -> None:
    """Delete the record of a finished run, so that the next start counts the rows."""
    (output / INDEX_DIRECTORY / FINISHED_FILE).remove()


def files_key(output: StoragePath) -> str:
    """Return a digest of the names and states of all part files of this run or shard."""
    content = hashlib.blake2b(digest_size=16)
    data = data_of(output)
    for file, state in data.list_states("**/*.parquet").items():
        content.update(f"{file.text.removeprefix(data.text)} {state}\n".encode())
    return content.hexdigest()
