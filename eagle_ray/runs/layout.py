"""Names of the files and directories in an output directory, also of a job in shards.

A shard's record (``_lock``, ``_run.json``, ``_SUCCESS`` ...) is in a directory of its own, so that
shards share nothing while they run. Its rows are in the output's ``data/``, so that readers find
the rows of all shards in one place:

    OUT/_shards.json                            number of shards and configuration, written once
    OUT/_shards/0002-of-0003/_run.json ...      the record of the second shard
    OUT/data/shard-0002-of-0003/part-*.parquet  its rows
    OUT/_run.json, OUT/_SUCCESS ...             the whole output's, by ``eagle-ray finish``

The first shard writes ``_shards.json`` and never changes it. Every later shard compares its own
number and configuration with that file before it takes its lease, so an output has one of each.

A run's code names the record's directory ``output``; `data_of` gives the directory of its rows.

Every JSON record is checked when it is read (``config/records.py``). A damaged record raises
`OutputDamaged`, unless its content can be computed again: then it is ignored with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_ray.config import (
    JobConfig,
    changed_keys,
    config_hash,
    is_hash_of_another,
    recorded,
    upgrade_config,
)
from eagle_ray.config.job import parse_shard
from eagle_ray.config.records import RecordKind, ShardPlanRecord, check_record
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.runs.job_errors import (
    InputChanged,
    OutputDamaged,
    OutputMismatch,
    StorageUnavailable,
    outcome_of,
)
from eagle_ray.runs.row_index import SIZE, Digests
from eagle_ray.storage.path import StoragePath, json_bytes, named_path, parse_json_bytes
from eagle_ray.storage.store import check_bucket, remedy_of

log = logging.getLogger("eagle_ray")
RUN = "_run.json"
SUCCESS = "_SUCCESS"
DATA = "data"
PROGRESS = "_progress.json"
SUMMARY = "_summary.json"
REPORT = "report.html"
STOPPED_FILE = (
    "_STOPPED.json"  # why a run ended at a bound with rows left; the next start removes it
)
ESTIMATE = "_estimate.json"  # `validate --estimate` writes it before the run
CACHE = "_cache"  # directory of files that a start makes again without it; shards share it
SHARDS = "_shards"
SHARD_DATA_PREFIX = "shard-"
SHARD_PLAN = "_shards.json"
NO_REVISIONS: Mapping[str, str] = {}  # of an input that is not on the hub
SHARDS_REMEDY = "Choose another output.path, or delete this one to start again"
PLAN_REMEDY = "delete it, and the next shard writes it again"
_SHARD_NAME = re.compile(r"\d{4}-of-\d{4}")
_WORD = 8  # bytes of a digest that are read as a number


@dataclass(frozen=True, slots=True)
class JobShard:
    """The part of a job's rows that one process runs. A row's id alone decides its shard.

    So an input that grows keeps its assignment, and no two shards have an id in common.

    Attributes:
        index: number of the shard, from 1 to count.

        >>> JobShard.of("2/3").name
        '0002-of-0003'
    """

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> JobShard:
        """Parse i/n. Raises ValueError."""
        return cls(*parse_shard(text))

    @classmethod
    def all_of(cls, count: int) -> list[JobShard]:
        return [cls(index, count) for index in range(1, count + 1)]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        """Return the name of the shard's directory."""
        return f"{self.index:04d}-of-{self.count:04d}"

    def holds(self, ids: Digests) -> np.ndarray:
        """Return for each id whether it belongs to this shard: the digest's first 8 bytes, as a
        number, modulo count."""
        words = np.ascontiguousarray(ids).view(np.uint8).reshape(-1, SIZE)[:, :_WORD]
        numbers = np.ascontiguousarray(words).view(">u8").reshape(-1)
        return numbers % np.uint64(self.count) == self.index - 1


def shard_output(root: StoragePath, shard: JobShard) -> StoragePath:
    """Return the directory of a shard's record."""
    return root / SHARDS / shard.name


def root_of(output: StoragePath) -> StoragePath:
    """Return output.path from a record's directory; for a shard, the directory that all shards share."""
    return output.parent.parent if _is_shard(output) else output


def data_of(output: StoragePath) -> StoragePath:
    """Return the directory with the rows of a run or of a shard."""
    return (
        root_of(output) / DATA / f"{SHARD_DATA_PREFIX}{output.name}"
        if _is_shard(output)
        else output / DATA
    )


def _is_shard(output: StoragePath) -> bool:
    return output.parent.name == SHARDS and _SHARD_NAME.fullmatch(output.name) is not None


def output_of(config: JobConfig) -> StoragePath:
    """Return the directory of the run's record: output.path, or the shard's directory below it.

    It is absolute, since workers run in another working directory.
    """
    root = named_path("output.path", config.output.path)
    return (
        shard_output(root, JobShard.of(config.execution.shard)) if config.execution.shard else root
    )


@contextmanager
def wrap_os_errors(output: StoragePath, key: str = "output.path") -> Iterator[None]:
    """Turn an OSError into a ConfigError, or into StorageUnavailable if it may be temporary.

    Args:
        key: key of the configuration that the message names.
    """
    try:
        yield
    except OSError as error:
        reason = (
            "it is not a directory"
            if isinstance(error, FileExistsError)
            else error.strerror or error
        )
        problem = f"{key}: cannot write to {error.filename or output}: {reason}"
        if outcome_of(error).is_transient:
            raise StorageUnavailable(f"{problem}. {remedy_of(error)}") from error
        raise ConfigError(f"{problem}. Choose a directory that can be written.") from error


def read_record(file: StoragePath, kind: RecordKind, remedy: str) -> dict[str, Any] | None:
    """Return a record, or None if there is no such file. Raises OutputDamaged with the remedy if it is damaged.

    A missing bucket is an error.
    """
    return read_record_with_version(file, kind, remedy)[0]


def read_record_with_version(
    file: StoragePath, kind: RecordKind, remedy: str
) -> tuple[dict[str, Any], int | str] | tuple[None, None]:
    """Return a record as read_record does, and the version of its file."""
    try:
        data, stamp = file.read_with_version()
    except FileNotFoundError as error:
        check_bucket(error)
        return None, None
    try:
        value = parse_json_bytes(data)
        check_record(kind, value)
    except ValueError as error:
        raise OutputDamaged(f"{file} is damaged ({one_line(error)}): {remedy}") from None
    return dict(value), stamp.version


def read_derived_record(
    file: StoragePath, kind: RecordKind, remedy: str = "it is made again"
) -> dict[str, Any] | None:
    """Return a record that can be computed again; None if it is missing, or with a warning if it is damaged.

    Args:
        remedy: command that makes the record again.
    """
    try:
        return read_record(file, kind, remedy)
    except OutputDamaged as error:
        log.warning("%s", error)
        return None


def check_claim(config: JobConfig) -> None:
    """Raise OutputMismatch if the output belongs to a job with another number of shards, or without shards."""
    root = root_of(output_of(config))
    with wrap_os_errors(root):
        if config.execution.shard is None:
            check_not_sharded(root)
        else:
            _check_shard(root, JobShard.of(config.execution.shard), config)


def claim_output(config: JobConfig, revisions: Mapping[str, str] = NO_REVISIONS) -> None:
    """Claim the output for its shards, if this is the first one. Raises as check_claim does.

    Raises ConfigError if it cannot be written, InputChanged if another shard reads other commits.

    Args:
        revisions: commits on the hub that the input comes from, which all shards then read.
    """
    check_claim(config)
    root = root_of(output_of(config))
    if config.execution.shard is None:
        return
    if read_shard_plan(root) is not None:
        _check_revisions(config, revisions)
        return
    shard = JobShard.of(config.execution.shard)
    with wrap_os_errors(root):
        plan = {
            "count": shard.count,
            "config": recorded(config),
            "config_hash": config_hash(config),
            "revisions": dict(revisions),
        }
        (root / SHARD_PLAN).create(json_bytes(plan))
        if read_shard_plan(root) is None:
            raise OutputDamaged(f"{root / SHARD_PLAN} was deleted just now: run the command again")
        # Another shard, or a run without shards, may have begun after the first look.
        _check_shard(root, shard, config)
    _check_revisions(config, revisions)


def shard_revisions(config: JobConfig) -> dict[str, str]:
    """Return the commits on the hub that all shards of this output read, by repository and revision."""
    if config.execution.shard is None:
        return {}
    plan = read_shard_plan(root_of(output_of(config)))
    return {} if plan is None else dict(plan.get("revisions", {}))


def _check_revisions(config: JobConfig, revisions: Mapping[str, str]) -> None:
    """Raise InputChanged if the first shard has read another commit of a revision, which has moved meanwhile."""
    first = shard_revisions(config)
    for named, commit in revisions.items():
        if first.get(named, commit) != commit:
            raise InputChanged(
                f"input.path: {named} has moved since another shard began with {first[named]}. Run the same command "
                "again, which reads that one."
            )


def _check_shard(root: StoragePath, shard: JobShard, config: JobConfig) -> None:
    plan = read_shard_plan(root)
    if plan is not None and plan["count"] != shard.count:
        raise OutputMismatch(
            f"{root} is written in {plan['count']} shards, and --shard {shard} has {shard.count}. Use "
            f"--shard i/{plan['count']}. {SHARDS_REMEDY} with {shard.count} shards."
        )
    if plan is not None and (
        keys := changed_keys(upgrade_config(plan["config"]), recorded(config))
    ):
        if (written := plan.get("config_hash")) and is_hash_of_another(plan["config"], written):
            reason = "its config is not what config_hash says"
            raise OutputDamaged(f"{root / SHARD_PLAN} is damaged ({reason}): {PLAN_REMEDY}")
        raise OutputMismatch(
            f"{root} belongs to shards of another configuration, which differs in {', '.join(keys)}. {SHARDS_REMEDY}."
        )
    _check_unsharded_rows(root, shard)


def check_not_sharded(root: StoragePath) -> None:
    """Raise OutputMismatch if shards write this output."""
    if plan := read_shard_plan(root):
        count = plan["count"]
        raise OutputMismatch(
            f"{root} is written in {count} shards. Give this run one of them with --shard i/{count}, or complete the "
            f"output with eagle-ray finish {root.display_path}. {SHARDS_REMEDY} without shards."
        )


def read_shard_plan(root: StoragePath) -> dict[str, Any] | None:
    """Return the number of shards ("count") and their configuration ("config"), or None if there are no shards.

    Raises OutputDamaged if the file cannot be read.
    """
    return read_record(root / SHARD_PLAN, ShardPlanRecord, PLAN_REMEDY)


def _check_unsharded_rows(root: StoragePath, shard: JobShard) -> None:
    """Refuse rows of a run without shards, and records of another number of shards whose plan is lost."""
    if (root / DATA).glob("*.parquet") or (
        (root / RUN).exists() and not (root / SHARDS).is_directory()
    ):
        raise OutputMismatch(
            f"{root} holds a run without shards, and --shard {shard} is given. {SHARDS_REMEDY}."
        )
    others = [name for name in _shard_names(root) if not name.endswith(f"-of-{shard.count:04d}")]
    if others:
        raise OutputMismatch(
            f"{root} holds shard {others[0]}, and --shard {shard} is given. {SHARDS_REMEDY}."
        )


def _shard_names(root: StoragePath) -> list[str]:
    return (root / SHARDS).list_names() if (root / SHARDS).is_directory() else []


def shard_outputs(root: StoragePath, count: int) -> dict[JobShard, StoragePath]:
    """Return the directory of each shard's record."""
    return {shard: shard_output(root, shard) for shard in JobShard.all_of(count)}
