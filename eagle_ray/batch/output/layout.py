"""The layout of an output directory: its data, and the directories of a job that runs in shards.

A shard's record (``_lock``, ``_run.json``, ``_SUCCESS`` ...) is in a directory of its own, so that shards share nothing
while they run. Its rows are in the output's ``data/``, so that readers find the rows of all shards in one place:

    OUT/_shards.json                            number of shards and configuration, written once
    OUT/_shards/0002-of-0003/_run.json ...      the record of the second shard
    OUT/data/shard-0002-of-0003/part-*.parquet  its rows
    OUT/_run.json, OUT/_SUCCESS ...             the whole output's, by ``eagle-ray finish``

A run's code names the record's directory ``output``; `data_of` gives the directory of its rows.
"""

from __future__ import annotations

import re

from eagle_ray.batch.job_shard import JobShard
from eagle_ray.storage.path import StoragePath

RUN, SUCCESS, DATA = "_run.json", "_SUCCESS", "data"
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
