"""What already stands in ``OUT/data``: the output is its own record.

An id is done when its n samples stand in one file. The ledger is read from the files at each start and recounted at
the end; an id found twice is written down to one. Does not know Ray, the input or why a row failed.

    >>> ledger = Ledger.read(Path("runs/a/data"))
    >>> sorted(ledger.done(lambda request_id: 1))
    ['q1', 'q2']
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_ray.config import JobConfig
from eagle_ray.data.schema import SCHEMA_VERSION, VERSION_KEY
from eagle_ray.data.stops import OutputDamaged, OutputMismatch

PART = re.compile(r"part-\d{3,}-\d{6}\.parquet")  # the names that the sink gives
SamplesOf = Callable[[str], int]
"""How many samples an id is to have."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """files[i] holds counts[i][id] rows of each of its ids, in the order in which the files were made."""

    files: list[Path]
    counts: list[dict[str, int]]

    @classmethod
    def read(cls, data: Path) -> Ledger:
        """Raises OutputMismatch for a file that another major version, or somebody else, wrote, or that is damaged."""
        files = sorted(data.glob("*.parquet"))
        return cls(files, [_rows_by_id(file) for file in files])

    def done(self, samples_of: SamplesOf) -> set[str]:
        """Ids all of whose samples stand in one file."""
        return {id for counts in self.counts for id, rows in counts.items() if rows == samples_of(id)}

    def excess(self, samples_of: SamplesOf) -> dict[Path, set[str]]:
        """Ids to take out of each file so that every id stands in one, where it is complete; the newest such wins."""
        keeper: dict[str, int] = {}
        for i, counts in enumerate(self.counts):
            keeper |= {id: i for id, rows in counts.items() if rows == samples_of(id) or id not in keeper}
        extra = [{id for id in counts if keeper[id] != i} for i, counts in enumerate(self.counts)]
        return {file: ids for file, ids in zip(self.files, extra, strict=True) if ids}


def num_samples(row: dict[str, Any], config: JobConfig) -> int:
    """How many output rows a request row is to have, good or bad."""
    return row["n"] or config.sampling.n


def without_ids(file: Path, ids: set[str]) -> pa.Table:
    """The file's rows but for these ids."""
    table = pq.read_table(file, partitioning=None)
    return table.filter(pc.invert(pc.is_in(table["request_id"], pa.array(sorted(ids), pa.string()))))


def error_ids(file: Path) -> set[str]:
    """Ids whose rows in this file are errors."""
    table = pq.read_table(file, columns=["request_id", "status"], partitioning=None)
    return set(table.filter(pc.equal(table["status"], "error"))["request_id"].to_pylist())


def own_files(data: Path) -> list[Path]:
    """Every Parquet file of a run's, whatever its version; raises OutputMismatch where one is somebody else's."""
    files = sorted(data.glob("*.parquet"))
    if foreign := [str(file) for file in files if not _is_own(file)]:
        raise OutputMismatch(
            f"{', '.join(foreign)} was not made by eagle-ray, nothing was deleted: move it away, or choose another "
            "output.path"
        )
    return files


def _is_own(file: Path) -> bool:
    """By its schema's version; a damaged file by its name."""
    try:
        return VERSION_KEY in (pq.read_schema(file).metadata or {})
    except (pa.ArrowException, OSError):
        return PART.fullmatch(file.name) is not None


def _rows_by_id(file: Path) -> dict[str, int]:
    try:
        ids = _ids_in(file)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise OutputDamaged(
            f"{file} is damaged ({reason}): delete it and its rows are made again, or start anew with --overwrite"
        ) from error
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(ids).to_pylist()}


def _ids_in(file: Path) -> pa.ChunkedArray:
    with pq.ParquetFile(file) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version != SCHEMA_VERSION:
            raise OutputMismatch(
                f"{file} has schema version {version}, not {SCHEMA_VERSION}: choose another output.path"
            )
        return parquet.read(columns=["request_id"])["request_id"]
