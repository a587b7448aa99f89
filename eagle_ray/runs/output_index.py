"""OutputIndex: the ids that are complete in the files of ``OUT/data``.

An id is done if its n samples are in one file. Each file is read once: its ids are stored in the
run's index until the file changes. Duplicates of an id are removed. Reading changes nothing; `save`
writes the result into the run's index.

    index = OutputIndex.read(run.data, run.output / INDEX)
    count_done(plan.rows, index).num_done                       # 480
    index.save(run.output / INDEX)
"""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.requests.row_schema import SCHEMA_VERSION, VERSION_KEY
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.part_files import attempt_of, check_part, open_part, part_files, read_columns
from eagle_ray.runs.row_index import (
    NO_DIGESTS,
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

OUTPUT_FILE = "output.json"
OUTPUT_KIND = "output"
OUTPUT_VERSION = 1
NO_OUTPUT_ROWS: Table = {
    "id": NO_DIGESTS,
    "file": np.empty(0, np.uint32),
    "rows": np.empty(0, np.uint32),
}


@dataclass(frozen=True, slots=True)
class OutputIndex:
    """The ids in the files of an output.

    Attributes:
        files: files in the order in which they were made.
        tables: rows sorted by id within each table: an id, a file number, and the number of the
            id's rows in that file.
        ranks: for each file number, its index in `files`, or -1 for a file that changed or is gone.
        unknown: files that the stored index did not have in any state.
        known: index of the files, as stored and extended.
    """

    files: list[StoragePath]
    tables: list[Table]
    ranks: np.ndarray
    unknown: list[StoragePath] = field(default_factory=list)
    known: KnownFiles = field(default_factory=lambda: KnownFiles())

    @classmethod
    def read(
        cls,
        data: StoragePath,
        directory: StoragePath | None = None,
        ignored: Container[StoragePath] = (),
    ) -> OutputIndex:
        """Read the files of an output; unchanged ones are taken from the index directory. Nothing is written there.

        Of a new file only the ids are read. A file that changed since it was indexed may be
        damaged, so it is read whole.

        Args:
            ignored: files to skip.

        Raises:
            OutputMismatch: a file is of another major version or of another program.
            OutputDamaged: a file is damaged.
        """
        states = data.list_states("**/*.parquet")
        files = [file for file in part_files(data) if file in states and file not in ignored]
        known = KnownFiles() if directory is None else KnownFiles.load(directory, data)

        # Files that the index has in this state keep their numbers; all others are read.
        numbers = {}
        new = []
        for file in files:
            number = known.number_of(file, states[file])
            if number is None:
                new.append(file)
            else:
                numbers[file] = number
        for file in sorted(known.files.keys() & set(new)):
            check_part(file)
        unknown = [file for file in new if file not in known.files]
        for i, file in enumerate(new):
            numbers[file] = known.next_number + i
        next_number = known.next_number + len(new)

        added = (rows_by_id(file, numbers[file]) for file in new)
        if directory is None:
            tables = [sorted_by_id(join(list(added), NO_OUTPUT_ROWS))]
        else:
            entries = {file: (numbers[file], states[file]) for file in files}
            known = known.with_files(entries, added)
            tables = known.tables

        ranks = np.full(next_number, -1)
        for rank, file in enumerate(files):
            ranks[numbers[file]] = rank
        return cls(files, tables, ranks, unknown, known)

    def save(self, directory: StoragePath, data: StoragePath) -> None:
        """Write the index into the directory that it was read with. The caller must hold the lease."""
        self.known.save(directory, data)

    @property
    def num_rows(self) -> int:
        return sum(
            int(table["rows"][self.ranks[table["file"]] >= 0].sum()) for table in self.tables
        )

    @property
    def num_entries(self) -> int:
        """Return the number of (id, file) entries, including those of files that are gone."""
        return sum(len(table["id"]) for table in self.tables)

    def by_range(self, parts: int) -> Iterator[Table]:
        """Yield the entries of each range of ids, sorted by id. The column `file` is an index into `files`."""
        for tables in ranges(self.tables, parts):
            whole = sorted_by_id(join(tables, NO_OUTPUT_ROWS))
            whole["file"] = self.ranks[whole["file"]]
            yield take(whole, whole["file"] >= 0)

    def find(self, ids: Digests) -> Table:
        """Return the entries of these ids, sorted by id. The column `file` is an index into `files`."""
        wanted = np.sort(ids)
        entries = (
            [take(table, isin(table["id"], wanted)) for table in self.tables] if len(ids) else []
        )
        whole = sorted_by_id(join(entries, NO_OUTPUT_ROWS))
        whole["file"] = self.ranks[whole["file"]]
        return take(whole, whole["file"] >= 0)


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """The stored index, extended by the files that were read since it was written.

    Attributes:
        files: number and state of each file, by path.
        segments: files of rows on disk, with the directory of each.
        tables: rows of the segments.
        next_number: number of the next new file.
        is_saved: whether the index on disk has this content.
        temporary: directory of the segments that are not in the stored index yet.
    """

    files: dict[StoragePath, tuple[int, str]] = field(default_factory=dict)
    segments: list[tuple[StoragePath, Segment]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    next_number: int = 0
    is_saved: bool = False
    temporary: tempfile.TemporaryDirectory | None = None

    @classmethod
    def load(cls, directory: StoragePath, data: StoragePath) -> KnownFiles:
        """Load the index, or an empty one if it is unusable."""
        facts = read_index_file(directory / OUTPUT_FILE)
        try:
            if facts is None or facts["version"] != OUTPUT_VERSION:
                return cls()
            files = {data / name: (number, state) for name, number, state in facts["files"]}
            segments = [(directory, segment) for segment in segments_in(facts["segments"])]
            return cls(files, segments, _tables_of(segments), facts["next_number"], is_saved=True)
        except (IndexDamaged, KeyError, TypeError, ValueError):
            return cls()

    def number_of(self, file: StoragePath, state: str) -> int | None:
        """Return the file's number, or None if the file is new or has changed."""
        number, known_state = self.files.get(file, (None, ""))
        return number if known_state == state else None

    def with_files(
        self, files: dict[StoragePath, tuple[int, str]], added: Iterable[Table]
    ) -> KnownFiles:
        """Return the index of exactly these files. Rows of new files are `added` and written to temporary files."""
        if files == self.files:
            return self
        temporary = tempfile.TemporaryDirectory(prefix="eagle-ray-index-")
        directory = StoragePath.of(temporary.name)
        new = [(directory, segment) for segment in write_rows(directory, OUTPUT_KIND, added)]
        numbers = [number + 1 for number, _ in files.values()]
        return KnownFiles(
            files=files,
            segments=[*self.segments, *new],
            tables=[*self.tables, *_tables_of(new)],
            next_number=max([self.next_number, *numbers]),
            temporary=temporary,
        )

    def save(self, directory: StoragePath, data: StoragePath) -> None:
        """Write the index. The segments come first, so that a kill leaves the old index."""
        if self.is_saved:
            return
        segments = self._segments_in(directory)
        names = [
            (str(file.text.removeprefix(data.text + "/")), *entry)
            for file, entry in self.files.items()
        ]
        facts = {
            "version": OUTPUT_VERSION,
            "next_number": self.next_number,
            "files": names,
            "segments": [segment.as_json() for segment in segments],
        }
        write_facts(directory / OUTPUT_FILE, facts)
        remove_unused(directory, OUTPUT_KIND, segments)

    def _segments_in(self, directory: StoragePath) -> list[Segment]:
        """Write the segments that are elsewhere into the directory, or all rows as few segments. Return them all."""
        if has_many_segments(
            len(self.segments), sum(segment.num_rows for _, segment in self.segments)
        ):
            numbers = [number for number, _ in self.files.values()]
            alive = (
                take(table, np.isin(table["file"], numbers))
                for table in joined_ranges(self.tables, NO_OUTPUT_ROWS)
            )
            return write_rows(directory, OUTPUT_KIND, alive)
        for place, segment in self.segments:
            if place != directory:
                (directory / segment.name).write_atomic((place / segment.name).read_bytes())
        return [segment for _, segment in self.segments]


def _tables_of(segments: Iterable[tuple[StoragePath, Segment]]) -> list[Table]:
    return [read_segment(directory, segment) for directory, segment in segments]


def excess_in(table: Table, is_complete: np.ndarray) -> Table:
    """Return the entries to remove so that every id is in one file only, and complete there if it is complete anywhere.

    The newest of several complete copies stays; without a complete one, the oldest.

    Args:
        table: entries sorted by id.
    """
    twice = duplicates(table["id"])  # as a rule none
    some = np.flatnonzero(isin(table["id"], twice))
    ids = table["id"][some]
    files = table["file"][some]

    # The best copy of an id comes last.
    merit = np.where(is_complete[some], files, -1 - files)
    order = np.lexsort((merit, ids))
    ids = ids[order]
    files = files[order]
    has_better = np.append(ids[:-1] == ids[1:], False)[: len(ids)]
    return {"id": ids[has_better], "file": files[has_better]}


def without_ids(file: StoragePath, ids: Digests) -> pa.Table:
    """Return the rows of a file except those of the given sorted ids. Raises as OutputIndex.read does."""
    table = _columns_in(file, None)
    return table.filter(pa.array(~isin(digests(table["request_id"].to_pylist()), ids)))


def error_ids(file: StoragePath) -> Digests:
    """Return the sorted ids of error rows in this file. Raises as OutputIndex.read does."""
    table = _columns_in(file, ["request_id", "status"])
    return np.unique(
        digests(table.filter(pc.equal(table["status"], "error"))["request_id"].to_pylist())
    )


def own_files(data: StoragePath) -> list[StoragePath]:
    """Return all part files of a run. Raises OutputMismatch if other programs have written Parquet files there."""
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
