"""Claim an output for a job that runs in shards, or for one that does not: it is never both.

The first shard writes ``OUT/_shards.json`` with the number of shards and the configuration, and never changes it. Every
later shard compares its own with that file before it takes its lock, so an output has one number of shards and one
configuration.

    claim_output(config)        # from another process, with --shard 1/4 on an output of three shards
    # OutputMismatch: runs/a is written in 3 shards, and --shard 1/4 has 4 ...
"""

from __future__ import annotations

from typing import Any

from eagle_ray.config import JobConfig, changed_keys, recorded, upgrade_config
from eagle_ray.config.records import ShardPlanRecord
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.job_shard import JobShard
from eagle_ray.runs.layout import DATA, SHARDS, read_record, root_of, shard_output
from eagle_ray.runs.manifest import RUN, output_of, wrap_os_errors
from eagle_ray.storage.path import StoragePath, json_bytes

SHARD_PLAN = "_shards.json"
REMEDY = "Choose another output.path, or delete this one to start again"


def claim_output(config: JobConfig) -> None:
    """Raise OutputMismatch if the output belongs to a job of another number of shards, or to one without shards.

    The first shard of an output claims it. Raises ConfigError if it cannot be written.
    """
    root = root_of(output_of(config))
    with wrap_os_errors(root):
        if config.execution.shard is None:
            check_not_sharded(root)
        else:
            _claim_for_shard(root, JobShard.of(config.execution.shard), config)


def _claim_for_shard(root: StoragePath, shard: JobShard, config: JobConfig) -> None:
    if read_shard_plan(root) is None:
        _check_unsharded_rows(root, shard)
        (root / SHARD_PLAN).create(json_bytes({"count": shard.count, "config": recorded(config)}))
    plan = read_shard_plan(root)
    if plan is None:
        raise OutputDamaged(f"{root / SHARD_PLAN} was deleted just now: run the command again")
    if plan["count"] != shard.count:
        raise OutputMismatch(
            f"{root} is written in {plan['count']} shards, and --shard {shard} has {shard.count}. Use "
            f"--shard i/{plan['count']}. {REMEDY} with {shard.count} shards."
        )
    if keys := changed_keys(upgrade_config(plan["config"]), recorded(config)):
        raise OutputMismatch(
            f"{root} belongs to shards of another configuration, which differs in {', '.join(keys)}. {REMEDY}."
        )
    _check_unsharded_rows(root, shard)  # a run without shards that began between the first look and the claim


def check_not_sharded(root: StoragePath) -> None:
    """Raise OutputMismatch if shards write this output."""
    if plan := read_shard_plan(root):
        count = plan["count"]
        raise OutputMismatch(
            f"{root} is written in {count} shards. Give this run one of them with --shard i/{count}, or complete the "
            f"output with eagle-ray finish {root.display_path}. {REMEDY} without shards."
        )


def read_shard_plan(root: StoragePath) -> dict[str, Any] | None:
    """Return the number of shards ("count") and their configuration ("config"), or None if there are no shards.

    Raises OutputDamaged if the file cannot be read.
    """
    return read_record(root / SHARD_PLAN, ShardPlanRecord, "delete it, and the next shard writes it again")


def _check_unsharded_rows(root: StoragePath, shard: JobShard) -> None:
    """Refuse rows of a run without shards, and records of another number of shards whose plan is lost."""
    if (root / DATA).glob("*.parquet") or ((root / RUN).exists() and not (root / SHARDS).is_directory()):
        raise OutputMismatch(f"{root} holds a run without shards, and --shard {shard} is given. {REMEDY}.")
    others = [name for name in _shard_names(root) if not name.endswith(f"-of-{shard.count:04d}")]
    if others:
        raise OutputMismatch(f"{root} holds shard {others[0]}, and --shard {shard} is given. {REMEDY}.")


def _shard_names(root: StoragePath) -> list[str]:
    return (root / SHARDS).list_names() if (root / SHARDS).is_directory() else []


def shard_outputs(root: StoragePath, count: int) -> dict[JobShard, StoragePath]:
    """Return the directory of each shard's record."""
    return {shard: shard_output(root, shard) for shard in JobShard.all_of(count)}
