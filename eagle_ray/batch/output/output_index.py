"""OutputIndex: which ids are done, read from the files in ``OUT/data``.

An id is done if its n samples are in one file. The index is read from the files at each start and again at the end;
duplicates of an id are removed.

    >>> index = OutputIndex.read(StoragePath.of("runs/a/data"))
    >>> len(index.done(lambda ids: np.ones(len(ids))))
    480
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.id_digests import DIGEST, Digests, digests, duplicates, isin
from eagle_ray.batch.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.batch.output.parquet_file import open_parquet
from eagle_ray.batch.output.part_files import attempt_of, part_files
from eagle_ray.batch.output.schema import SCHEMA_VERSION, VERSION_KEY
from eagle_ray.storage.path import StorageError, StoragePath

SamplesOf = Callable[[Digests], np.ndarray]
"""How many samples each of these ids is to have."""


@dataclass(frozen=True, slots=True)
class OutputIndex:
    """Entry j: files[file[j]] holds rows[j] rows of ids[j]; files and entries in the order in which files were made."""

    files: list[StoragePath]
    ids: Digests
    rows: np.ndarray
    file: np.ndarray

    @classmethod
    def read(cls, data: StoragePath) -> OutputIndex:
        """Raise OutputMismatch for a file of another major version or another program, or a damaged one."""
        files = part_files(data)
        counted = [_rows_by_id(file) for file in files]
        return cls(
            files,
            np.concatenate([np.empty(0, DIGEST), *(ids for ids, _ in counted)]),
            np.concatenate([np.empty(0, np.int32), *(rows for _, rows in counted)]),
            np.repeat(np.arange(len(files), dtype=np.int32), [len(ids) for ids, _ in counted]),
        )

    def done(self, samples_of: SamplesOf) -> Digests:
        """Return the ids with all samples in one file, sorted; an id occurs once per such file."""
        complete = self.ids[self.rows == samples_of(self.ids)]
        complete.sort()  # in place: it is a copy already
        return complete

    def excess(self, samples_of: SamplesOf) -> dict[StoragePath, Digests]:
        """Return the ids, sorted, to remove from each file so that every id is complete in one file.

        The newest of several complete copies stays; without a complete one, the oldest.
        """
        twice = duplicates(np.sort(self.ids))  # as a rule none: nothing is kept for each id
        some = np.flatnonzero(isin(self.ids, twice))
        ids, files = self.ids[some], self.file[some]
        merit = np.where(self.rows[some] == samples_of(ids), files, -1 - files)
        order = np.lexsort((merit, ids))
        ids, files = ids[order], files[order]
        extra = np.append(ids[:-1] == ids[1:], False)[: len(ids)]  # all but the last, and best, of each id
        return {self.files[i]: ids[extra & (files == i)] for i in np.unique(files[extra])}


def without_ids(file: StoragePath, ids: Digests) -> pa.Table:
    """Return the file's rows without these ids, which are sorted."""
    with open_parquet(file) as parquet:
        table = parquet.read()
    return table.filter(pa.array(~isin(digests(table["request_id"].to_pylist()), ids)))


def error_ids(file: StoragePath) -> Digests:
    """Return the sorted ids of error rows in this file. Raises as OutputIndex.read does."""
    table = _columns_in(file, ["request_id", "status"])
    return np.unique(digests(table.filter(pc.equal(table["status"], "error"))["request_id"].to_pylist()))


def own_files(data: StoragePath) -> list[StoragePath]:
    """Return every Parquet file of a run, whatever its version. Raises OutputMismatch for files of other programs."""
    files = part_files(data)
    if foreign := [str(file) for file in files if not _is_own(file)]:
        raise OutputMismatch(
            f"{', '.join(foreign)} was not made by eagle-ray, nothing was deleted: move it away, or choose another "
            "output.path"
        )
    return files


def _is_own(file: StoragePath) -> bool:
    """Return whether the file is ours, by its schema's version, or by its name if it is damaged."""
    try:
        with open_parquet(file) as parquet:
            return VERSION_KEY in (parquet.schema_arrow.metadata or {})
    except StorageError:
        raise
    except (pa.ArrowException, OSError):
        return attempt_of(file) is not None


def _rows_by_id(file: StoragePath) -> tuple[Digests, np.ndarray]:
    """Return each id once, with its number of rows."""
    counts = pc.value_counts(_columns_in(file, ["request_id"])["request_id"])
    return digests(counts.field("values").to_pylist()), counts.field("counts").to_numpy().astype(np.int32)


def _columns_in(file: StoragePath, columns: list[str]) -> pa.Table:
    """Return these columns of one file. Raises OutputMismatch, or OutputDamaged if it cannot be read."""
    try:
        with open_parquet(file) as parquet:
            version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
            if version != SCHEMA_VERSION:
                raise OutputMismatch(
                    f"{file} has schema version {version}, not {SCHEMA_VERSION}: choose another output.path"
                )
            return parquet.read(columns=columns)
    except StorageError:  # the storage is at fault, not the file
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise OutputDamaged(
            f"{file} is damaged ({reason}): delete it and its rows are made again, or start again with --overwrite"
        ) from error
