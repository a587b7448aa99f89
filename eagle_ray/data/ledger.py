"""What already stands in ``OUT/data``: the output is its own record.

An id is done when its n samples stand in one file. The ledger is read from the files at each start and recounted at
the end; an id found twice is written down to one. Does not know Ray, the input or why a row failed.

    >>> ledger = Ledger.read(Path("runs/a/data"))
    >>> len(ledger.done(lambda ids: np.ones(len(ids))))
    480
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_ray.data.ids import DIGEST, Digests, among, digests
from eagle_ray.data.schema import SCHEMA_VERSION, VERSION_KEY
from eagle_ray.data.stops import OutputDamaged, OutputMismatch

PART = re.compile(r"part-\d{3,}-\d{6}\.parquet")  # the names that the sink gives
SamplesOf = Callable[[Digests], np.ndarray]
"""How many samples each of these ids is to have."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Entry j: files[file[j]] holds rows[j] rows of ids[j]; files and entries in the order in which files were made."""

    files: list[Path]
    ids: Digests
    rows: np.ndarray
    file: np.ndarray

    @classmethod
    def read(cls, data: Path) -> Ledger:
        """Raises OutputMismatch for a file that another major version, or somebody else, wrote, or that is damaged."""
        files = sorted(data.glob("*.parquet"))
        counted = [_rows_by_id(file) for file in files]
        return cls(
            files,
            np.concatenate([np.empty(0, DIGEST), *(ids for ids, _ in counted)]),
            np.concatenate([np.empty(0, np.int64), *(rows for _, rows in counted)]),
            np.repeat(np.arange(len(files)), [len(ids) for ids, _ in counted]),
        )

    def done(self, samples_of: SamplesOf) -> Digests:
        """Ids all of whose samples stand in one file; sorted."""
        return np.unique(self.ids[self.rows == samples_of(self.ids)])

    def excess(self, samples_of: SamplesOf) -> dict[Path, Digests]:
        """Ids, sorted, to take out of each file so that every id stands in one, where it is complete.

        The newest of several complete ones stays; where none is complete, the oldest.
        """
        merit = np.where(self.rows == samples_of(self.ids), self.file, -1 - self.file)
        order = np.lexsort((merit, self.ids))
        ids, files = self.ids[order], self.file[order]
        extra = np.append(ids[:-1] == ids[1:], False)[: len(ids)]  # all but the last, and best, of each id
        return {self.files[i]: ids[extra & (files == i)] for i in np.unique(files[extra])}


def without_ids(file: Path, ids: Digests) -> pa.Table:
    """The file's rows but for these ids, which are sorted."""
    table = pq.read_table(file, partitioning=None)
    return table.filter(pa.array(~among(digests(table["request_id"].to_pylist()), ids)))


def error_ids(file: Path) -> Digests:
    """Ids whose rows in this file are errors, sorted."""
    table = pq.read_table(file, columns=["request_id", "status"], partitioning=None)
    return np.unique(digests(table.filter(pc.equal(table["status"], "error"))["request_id"].to_pylist()))


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


def _rows_by_id(file: Path) -> tuple[Digests, np.ndarray]:
    """Each id once, and how many rows it has."""
    try:
        ids = _ids_in(file)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise OutputDamaged(
            f"{file} is damaged ({reason}): delete it and its rows are made again, or start anew with --overwrite"
        ) from error
    counts = pc.value_counts(ids)
    return digests(counts.field("values").to_pylist()), counts.field("counts").to_numpy(zero_copy_only=False)


def _ids_in(file: Path) -> pa.ChunkedArray:
    with pq.ParquetFile(file) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version != SCHEMA_VERSION:
            raise OutputMismatch(
                f"{file} has schema version {version}, not {SCHEMA_VERSION}: choose another output.path"
            )
        return parquet.read(columns=["request_id"])["request_id"]
