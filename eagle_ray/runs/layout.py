"""The layout of an output directory: its data, its records, and the directories of a job that runs in shards.

A shard's record (``_lock``, ``_run.json``, ``_SUCCESS`` ...) is in a directory of its own, so that shards share nothing
while they run. Its rows are in the output's ``data/``, so that readers find the rows of all shards in one place:

    OUT/_shards.json                            number of shards and configuration, written once
    OUT/_shards/0002-of-0003/_run.json ...      the record of the second shard
    OUT/data/shard-0002-of-0003/part-*.parquet  its rows
    OUT/_run.json, OUT/_SUCCESS ...             the whole output's, by ``eagle-ray finish``

A run's code names the record's directory ``output``; `data_of` gives the directory of its rows.

Every JSON record is checked when it is read (``config/records.py``). A record that nothing else says is `OutputDamaged`
if it is damaged; one that can be made again is left out, with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.config.records import RecordKind, check_record
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.runs.job_errors import OutputDamaged, StorageUnavailable, outcome_of
from eagle_ray.runs.job_shard import JobShard
from eagle_ray.storage.path import StoragePath, parse_json_bytes
from eagle_ray.storage.storage_errors import check_bucket, remedy_of

log = logging.getLogger("eagle_ray")
RUN, SUCCESS, DATA = "_run.json", "_SUCCESS", "data"
PROGRESS, SUMMARY, REPORT = "_progress.json", "_summary.json", "report.html"
ESTIMATE = "_estimate.json"  # by `validate --estimate`, before the run
CACHE = "_cache"  # of what starts make again without it; shards share it
SHARDS = "_shards"
SHARD_DATA_PREFIX = "shard-"
_SHARD_NAME = re.compile(r"\d{4}-of-\d{4}")


def shard_output(root: StoragePath, shard: JobShard) -> StoragePath:
    """Return the directory of a shard's record."""
    return root / SHARDS / shard.name


def root_of(output: StoragePath) -> StoragePath:
    """Return output.path: of a shard's record, the directory that all shards share."""
    return output.parent.parent if _is_shard(output) else output


def data_of(output: StoragePath) -> StoragePath:
    """Return the directory with the rows of a run or of a shard."""
    return root_of(output) / DATA / f"{SHARD_DATA_PREFIX}{output.name}" if _is_shard(output) else output / DATA


def _is_shard(output: StoragePath) -> bool:
    return output.parent.name == SHARDS and _SHARD_NAME.fullmatch(output.name) is not None


def output_of(config: JobConfig) -> StoragePath:
    """Return the directory of the run's record, absolute since workers run in another working directory.

    It is output.path, or the shard's directory below.
    """
    try:
        root = StoragePath.of(config.output.path)
    except ValueError as error:
        raise ConfigError(f"output.path: {error}") from None
    return shard_output(root, JobShard.of(config.execution.shard)) if config.execution.shard else root


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


def read_record(file: StoragePath, kind: RecordKind, remedy: str) -> dict[str, Any] | None:
    """Return a record, or None if there is no such file. Raises OutputDamaged with the remedy if it is damaged.

    A missing bucket is an error.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        check_bucket(error)
        return None
    try:
        value = parse_json_bytes(data)
        check_record(kind, value)
    except ValueError as error:
        raise OutputDamaged(f"{file} is damaged ({one_line(error)}): {remedy}") from None
    return dict(value)


def read_derived_record(file: StoragePath, kind: RecordKind, remedy: str = "it is made again") -> dict[str, Any] | None:
    """Return a record that can be made again, or None, with a warning, if it is damaged.

    remedy: what makes it again.
    """
    try:
        return read_record(file, kind, remedy)
    except OutputDamaged as error:
        log.warning("%s", error)
        return None
