"""The manifest of a job: what ``_run.json`` says of its configuration and inputs, and which job may resume it.

with hold(output):
    run = open_run(config, plan.fingerprints)
    with run.recorded_outcome():
        generate(...)
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle_ray.config import JobConfig, changed_keys, config_hash, recorded, upgrade_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.layout import RUN, data_of, output_of, root_of, wrap_os_errors
from eagle_ray.runs.part_files import part_files
from eagle_ray.runs.recorded_inputs import (
    FORMAT_WITH_INPUTS,
    Fingerprint,
    changed_files,
    input_lists,
    read_inputs,
    write_inputs,
)
from eagle_ray.runs.row_index import free_index_name
from eagle_ray.runs.run import FORMAT_VERSION, Run, RunState, begin_attempt, erase
from eagle_ray.storage.path import StoragePath

REMEDY = "choose another output.path, or --overwrite"
EXISTS_REMEDY = "Choose another output.path, or --resume or --overwrite"
PACKAGES = ("eagle-ray", "ray", "torch", "transformers", "pyarrow")


def open_run(
    config: JobConfig,
    files: Mapping[str, Fingerprint],
    accepted: Container[str] = (),
    check_lock: Callable[[], None] | None = None,
) -> Run:
    """Start an attempt at config.output.path. The caller holds its lease, whose check is check_lock.

    Args:
        files: fingerprints of the input files by path.
        accepted: paths of changed files whose rows were compared with the answers.

    Raises ConfigError if there is output and if_exists is fail, or if the directory is not writable;
    StorageUnavailable if it cannot be written for now; OutputMismatch if it is another job's output.
    """
    output = output_of(config)
    with wrap_os_errors(output):
        if config.output.if_exists == "overwrite":
            return begin_job(erase(output), config, files, check_lock)
        found = Run.inspect(output)
        old = found.manifest
        if old is None:
            check_no_foreign_data(output)
        elif config.output.if_exists == "fail":
            raise ConfigError(
                f"output.path {output} holds run {old['run_id']} and output.if_exists is 'fail'. {EXISTS_REMEDY}."
            )
        else:
            _check_same_job(output, old, config)
        noted = read_inputs(output, old) if old else {}
        check_same_files(output, noted, {path: each for path, each in files.items() if path not in accepted})
        return begin_job(found, config, {**noted, **files}, check_lock)


def begin_job(
    found: RunState,
    config: JobConfig,
    inputs: Mapping[str, Fingerprint],
    check_lock: Callable[[], None] | None = None,
) -> Run:
    """Begin an attempt whatever the directory holds. The caller holds its lease.

    inputs: all files of the run, also those of earlier attempts that are not asked for now.
    """
    free_index_name(found.output)
    earlier_lists = input_lists(found.output)
    facts = job_facts(found, config, inputs)
    run = begin_attempt(found, facts)
    _remove_unused(earlier_lists, facts["inputs"]["list"])
    return replace(run, check_lock=check_lock)


def job_facts(found: RunState, config: JobConfig, inputs: Mapping[str, Fingerprint]) -> dict[str, Any]:
    """Return what the manifest says of a job, and write its list of input files."""
    before = found.manifest or {}
    return {
        "name": before.get("name", config.name),
        "config": recorded(config),
        "config_hash": config_hash(config),
        "inputs": write_inputs(found.output, inputs, before.get("inputs")),
        "models": {name: _model_files(name) for name in (config.model.target, *config.model.drafts)},
        "versions": _versions(),
        "hardware": _hardware(),
    }


def _remove_unused(lists: Iterable[StoragePath], used: str) -> None:
    """Delete lists of input files that were there before this attempt began: a later driver may write others."""
    with suppress(OSError):
        for file in lists:
            if file.name != used:
                file.remove()


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
    if changed := changed_files(old, new):
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
