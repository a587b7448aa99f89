"""OutputIndex: which ids are done, read from the files in ``OUT/data``.

An id is done if its n samples are in one file. Each file is read once: what it holds is kept in the run's index until
the file changes. Duplicates of an id are removed.

    index = OutputIndex.read(run.data, run.output / INDEX)
    count_done(plan.rows, index).num_done                       # 480
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.requests.row_schema import SCHEMA_VERSION, VERSION_KEY
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.part_files import attempt_of, check_part, open_part, part_files, read_columns
from eagle_ray.runs.row_index import (
    EMPTY,
    Digests,
    IndexDamaged,
    Segment,
    Table,
    digests,
    duplicates,
    has_many_segments,
    isin,
    join,
    joined_ranges,
    ranges,
    read_index_file,
    read_segment,
    remove_unused,
    segments_in,
    sorted_by_id,
    take,
    write_facts,
    write_rows,
)
from eagle_ray.storage.path import StoragePath

FILE = "output.json"
KIND = "output"
VERSION = 1
NO_ROWS: Table = {"id": EMPTY, "file": np.empty(0, np.uint32), "rows": np.empty(0, np.uint32)}


@dataclass(frozen=True, slots=True)
class OutputIndex:
    """The ids in the files of an output.

    Attributes:
        files: in the order in which they were made.
        tables: rows sorted by id within each table: an id, the number of a file, and the rows of the id there.
        ranks: by number of a file: its index in `files`, or -1 for a file that changed or is gone.
    """

    files: list[StoragePath]
    tables: list[Table]
    ranks: np.ndarray

    @classmethod
    def read(cls, data: StoragePath, directory: StoragePath | None = None) -> OutputIndex:
        """Read the files, or from an index directory what it has of them; files that it lacks are added to it.

        Only the ids of a file are read. A file that changed since it was indexed may be damaged, so it is read whole.

        If a directory is named, the caller holds the lease. Raises OutputMismatch for a file of another major version
        or of another program, and OutputDamaged for a damaged file.
        """
        states = data.list_states("**/*.parquet")
        files = [file for file in part_files(data) if file in states]
        known = KnownFiles({}, [], [], 0) if directory is None else KnownFiles.load(directory, data)
        numbers = {file: number for file in files if (number := known.number_of(file, states[file])) is not None}
        new = [file for file in files if file not in numbers]
        for file in sorted(known.files.keys() & set(new)):
            check_part(file)
        numbers |= {file: known.next_number + i for i, file in enumerate(new)}
        next_number = known.next_number + len(new)
        added = (rows_by_id(file, numbers[file]) for file in new)
        if directory is None:
            tables = [sorted_by_id(join(list(added), NO_ROWS))]
        elif new or len(known.files) != len(files):
            known = known.saved(directory, data, {file: (numbers[file], states[file]) for file in files}, added)
            tables = known.tables
        else:
            tables = known.tables
        ranks = np.full(next_number, -1)
        for rank, file in enumerate(files):
            ranks[numbers[file]] = rank
        return cls(files, tables, ranks)

    @property
    def num_rows(self) -> int:
        return sum(int(table["rows"][self.ranks[table["file"]] >= 0].sum()) for table in self.tables)

    @property
    def num_entries(self) -> int:
        """Return the number of ids, one that is in several files counted in each; files that are gone count too."""
        return sum(len(table["id"]) for table in self.tables)

    def by_range(self, parts: int) -> Iterator[Table]:
        """Yield the entries of each range of ids, sorted by id. Column file is the index in `files`."""
        for tables in ranges(self.tables, parts):
            whole = sorted_by_id(join(tables, NO_ROWS))
            whole["file"] = self.ranks[whole["file"]]
            yield take(whole, whole["file"] >= 0)

    def find(self, ids: Digests) -> Table:
        """Return the entries of these ids, sorted by id. Column file is the index in `files`."""
        wanted = np.sort(ids)
        entries = [take(table, isin(table["id"], wanted)) for table in self.tables] if len(ids) else []
        whole = sorted_by_id(join(entries, NO_ROWS))
        whole["file"] = self.ranks[whole["file"]]
        return take(whole, whole["file"] >= 0)


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """The part of the index on disk. files: number and state of each file that it has, by its path below data/."""

    files: dict[StoragePath, tuple[int, str]]
    segments: list[Segment]
    tables: list[Table]
    next_number: int

    @classmethod
    def load(cls, directory: StoragePath, data: StoragePath) -> KnownFiles:
        """Return what the index has; nothing if it cannot be used."""
        facts = read_index_file(directory / FILE)
        try:
            if facts is None or facts["version"] != VERSION:
                return cls({}, [], [], 0)
            files = {data / name: (number, state) for name, number, state in facts["files"]}
            segments = segments_in(facts["segments"])
            return cls(files, segments, [read_segment(directory, each) for each in segments], facts["next_number"])
        except (IndexDamaged, KeyError, TypeError, ValueError):
            return cls({}, [], [], 0)

    def number_of(self, file: StoragePath, state: str) -> int | None:
        """Return the file's number, or None if the index does not have the file as it is now."""
        number, known_state = self.files.get(file, (None, ""))
        return number if known_state == state else None

    def saved(
        self,
        directory: StoragePath,
        data: StoragePath,
        files: dict[StoragePath, tuple[int, str]],
        added: Iterable[Table],
    ) -> KnownFiles:
        """Write the index of these files. The segments come first, so that a kill leaves the old index."""
        segments = [*self.segments, *write_rows(directory, KIND, added)]
        tables = [read_segment(directory, segment) for segment in segments]
        numbers = [number for number, _ in files.values()]
        if has_many_segments(len(segments), sum(segment.num_rows for segment in segments)):
            alive = (take(table, np.isin(table["file"], numbers)) for table in joined_ranges(tables, NO_ROWS))
            segments = write_rows(directory, KIND, alive)
            tables = [read_segment(directory, segment) for segment in segments]
        next_number = max([self.next_number, *(number + 1 for number in numbers)])
        names = [(str(file.text.removeprefix(data.text + "/")), *entry) for file, entry in files.items()]
        facts = {
            "version": VERSION,
            "next_number": next_number,
            "files": names,
            "segments": [segment.as_json() for segment in segments],
        }
        write_facts(directory / FILE, facts)
        remove_unused(directory, KIND, segments)
        return KnownFiles(files, segments, tables, next_number)


def excess_in(table: Table, is_complete: np.ndarray) -> Table:
    """Return the entries to remove so that every id is complete in one file. table: sorted by id.

    The newest of several complete copies stays; without a complete one, the oldest.
    """
    twice = duplicates(table["id"])  # as a rule none
    some = np.flatnonzero(isin(table["id"], twice))
    ids, files = table["id"][some], table["file"][some]
    merit = np.where(is_complete[some], files, -1 - files)
    order = np.lexsort((merit, ids))
    ids, files = ids[order], files[order]
    extra = np.append(ids[:-1] == ids[1:], False)[: len(ids)]  # all but the last, and best, of each id
    return {"id": ids[extra], "file": files[extra]}


def without_ids(file: StoragePath, ids: Digests) -> pa.Table:
    """Return the file's rows without these ids, which are sorted. Raises as OutputIndex.read does."""
    table = _columns_in(file, None)
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
        with open_part(file) as parquet:
            return VERSION_KEY in (parquet.schema_arrow.metadata or {})
    except OutputDamaged:
        return attempt_of(file) is not None


def rows_by_id(file: StoragePath, number: int) -> Table:
    """Return each id of a file once, with its number of rows."""
    counts = pc.value_counts(_columns_in(file, ["request_id"])["request_id"])
    return {
        "id": digests(counts.field("values").to_pylist()),
        "file": np.full(len(counts), number, np.uint32),
        "rows": counts.field("counts").to_numpy().astype(np.uint32),
    }


def _columns_in(file: StoragePath, columns: list[str] | None) -> pa.Table:
    """Return these columns of one file, or all that it stores. Raises OutputMismatch, or OutputDamaged."""
    with open_part(file) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version != SCHEMA_VERSION:
            raise OutputMismatch(
                f"{file} has schema version {version!r}, not {SCHEMA_VERSION!r}: choose another output.path"
            )
        return read_columns(parquet, columns)
