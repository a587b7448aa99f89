"""InputIndex: what a scan found in each input file, kept with the run, so that a file is scanned once.

For each file: its fingerprint, the types of its columns and its slices. For each row, in segments sorted by id: the
digests of its id and of its request, its file, its place there, and how many output rows it has. An entry is used only
for a file with the same fingerprint. A file that grew at its end is scanned from its last slice on.

    index = InputIndex.load(run.output / INDEX, key).with_rows()
    index.add(files, fingerprints(files, {}), RowScanner(config, columns), grown=[])
    index.save(run.output / INDEX)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray.batch.reader.file_slices import FileSlice
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.input_columns import join_into
from eagle_ray.batch.reader.scan import FilePart, FileScan, UnreadValue
from eagle_ray.requests.columns import RowPosition
from eagle_ray.runs.layout import Fingerprint, JobShard, what_changed
from eagle_ray.runs.row_index import (
    EMPTY,
    Digests,
    IndexDamaged,
    Segment,
    Table,
    cut,
    duplicates,
    has_many_segments,
    index_of,
    join,
    joined_ranges,
    num_ranges,
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

log = logging.getLogger("eagle_ray")
FILE = "input.json"
KIND = "input"
VERSION = 5
DAMAGE = (IndexDamaged, LookupError, TypeError, ValueError, binascii.Error, pa.ArrowException)
NO_ROWS: Table = {
    "id": EMPTY,
    "request": np.empty(0, np.uint64),  # digest of the values that the request is made of
    "file": np.empty(0, np.uint32),  # number of the file in the index
    "row": np.empty(0, np.uint32),  # which of its file's rows, blank lines not counted
    "rows": np.empty(0, np.uint32),  # output rows
}
NO_EXPECTED: Table = {"id": EMPTY, "place": np.empty(0, np.int64), "rows": np.empty(0, np.uint32)}
Scan = Callable[[list[FilePart]], Iterable[Iterable[FileScan]]]
"""Scan parts of files; yield for each part its consecutive pieces."""


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """What earlier attempts at an output left for the scan of its input.

    Attributes:
        index: directory of the run's index, None for one that is damaged.
        inputs: the fingerprints that it recorded, by path.
        finished_key: key of the plan whose rows the output holds, all of them, or None.
    """

    index: StoragePath | None
    inputs: Mapping[str, Fingerprint] = field(default_factory=dict)
    finished_key: str | None = None


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One scanned file.

    Attributes:
        number: place of its rows in the segments.
        slices: byte offset or row group, row, line, rows of each.
        unread: the first value of each column that is a parameter which rows cannot set.
    """

    number: int
    path: str
    name: str
    format: str
    fingerprint: Fingerprint
    types: dict[str, pa.DataType]
    slices: list[tuple[int, int, int | None, int]]
    unread: dict[str, UnreadValue]

    @property
    def num_rows(self) -> int:
        return sum(file_slice[3] for file_slice in self.slices)

    def slices_of(self, file: InputFile) -> list[FileSlice]:
        return [FileSlice(file, start, RowPosition(row, line), count) for start, row, line, count in self.slices]

    def describes(self, file: InputFile, fingerprint: Fingerprint) -> bool:
        """Return whether this is the file as it is now."""
        return self.format == file.format and self.has_content(file, fingerprint)

    def has_content(self, file: InputFile, fingerprint: Fingerprint) -> bool:
        """Return whether this is the file as it is now, in whatever format."""
        is_same = self.path == file.path and self.name == file.name
        return is_same and what_changed(self.fingerprint, fingerprint) is None


@dataclass(slots=True)
class InputIndex:
    """Scanned files and their rows.

    Attributes:
        key: how rows were read: an index with another key says nothing about this job.
        files: by path, as they were last scanned.
        next_number: number of the next file that is scanned.
        segments: on disk, with the directory of each.
        saved_in: the directory that has the index as it is, or None.
    """

    key: str
    files: dict[str, IndexedFile] = field(default_factory=dict)
    next_number: int = 0
    segments: list[tuple[StoragePath, Segment]] = field(default_factory=list)
    saved_in: StoragePath | None = None
    _tables: list[Table] | None = None
    _temporary: tempfile.TemporaryDirectory | None = None

    @classmethod
    def load(cls, directory: StoragePath, key: str) -> InputIndex:
        """Return the index of a run, whose rows are not read yet; an empty one if there is none that can be used."""
        facts = read_index_file(directory / FILE)
        if facts is None or (facts.get("version"), facts.get("key")) != (VERSION, key):
            return cls(key)
        try:
            files = files_in(facts)
            segments = [(directory, segment) for segment in segments_in(facts["segments"])]
            return cls(key, files, facts["next_number"], segments, saved_in=directory)
        except DAMAGE as error:
            return cls._replacing(key, error)

    @classmethod
    def _replacing(cls, key: str, error: Exception) -> InputIndex:
        log.warning("the index of the input is built again: %s", error)
        return cls(key)

    def with_rows(self) -> InputIndex:
        """Read the rows and return the index, or an empty one if they are damaged."""
        try:
            self._tables = self._read()
        except DAMAGE as error:
            return self._replacing(self.key, error)
        return self

    def known_format(self, file: InputFile, fingerprint: Fingerprint) -> str | None:
        """Return the format that a file with this content was read in, or None."""
        entry = self.files.get(file.path)
        return entry.format if entry is not None and entry.has_content(file, fingerprint) else None

    @property
    def tables(self) -> list[Table]:
        """Return all rows, sorted within each table; rows of numbers that no file has are out of date.

        Raises IndexDamaged.
        """
        if self._tables is None:
            self._tables = self._read()
        return self._tables

    def _read(self) -> list[Table]:
        return [read_segment(directory, segment) for directory, segment in self.segments]

    def add(
        self,
        files: Iterable[InputFile],
        fingerprints: Mapping[str, Fingerprint],
        scan: Scan,
        grown: Container[str],
    ) -> None:
        """Scan the files that the index does not have as they are now. Their rows are in temporary files until `save`.

        grown: paths of files that hold the lines that the index has of them, and more behind them.
        """
        bases = []
        for file in files:
            old = self.files.get(file.path)
            if old is not None and old.describes(file, fingerprints[file.path]):
                continue
            is_base = old is not None and file.path in grown and (old.name, old.format) == (file.name, file.format)
            bases.append(self._base(file, fingerprints[file.path], old if is_base else None))
        if bases:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="eagle-ray-index-")
            directory = StoragePath.of(self._temporary.name)
            scanned = zip(bases, scan([part for _, part, _ in bases]), strict=True)
            rows = chain.from_iterable(self._rows_of(base, scans, known) for (base, _, known), scans in scanned)
            self.segments += [(directory, segment) for segment in write_rows(directory, KIND, rows)]
            self._tables, self.saved_in = None, None

    def _rows_of(self, base: IndexedFile, scans: Iterable[FileScan], num_known: int) -> Iterator[Table]:
        """Yield the rows that scans found in a file, and add the file once they are over.

        base: the file with what is known of it. num_known: rows at the start of the scans that are indexed.
        """
        types, slices, unread = dict(base.types), list(base.slices), dict(base.unread)
        first = base.num_rows
        for scan in scans:
            join_into(types, scan.types)
            slices += [(file_slice.start, *file_slice.first, file_slice.num_rows) for file_slice in scan.slices]
            for column, value in scan.unread.items():
                unread.setdefault(column, value._replace(number=first + value.number))
            count = len(scan.rows["id"])
            row_numbers = np.arange(first, first + count, dtype=np.uint32)
            numbers = np.full(count, base.number, np.uint32)
            yield cut(scan.rows | {"file": numbers, "row": row_numbers}, num_known, count)
            num_known = max(0, num_known - count)
            first += count
        self.files[base.path] = replace(base, types=types, slices=slices, unread=unread)

    def _base(
        self, file: InputFile, fingerprint: Fingerprint, grown: IndexedFile | None
    ) -> tuple[IndexedFile, FilePart, int]:
        """Return what is known of a file, the part to scan, and how many of that part's rows are known.

        Of a file that has grown, the part is its last slice and what is behind it.
        """
        if grown is not None and grown.slices:
            *earlier, (start, row, line, num_known) = grown.slices
            log.info("%s has grown: reading its new rows", file.path)
            base = replace(grown, fingerprint=fingerprint, types=dict(grown.types), slices=earlier)
            return base, FilePart(file, start, RowPosition(row, line)), num_known
        number, self.next_number = self.next_number, self.next_number + 1
        base = IndexedFile(number, file.path, file.name, file.format, fingerprint, {}, [], {})
        return base, FilePart(file), 0

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of all rows that are not out of date."""
        return {entry.number for entry in self.files.values()}

    def compare(
        self, earlier: Mapping[str, int], current: Iterable[int]
    ) -> tuple[dict[str, Digests], dict[str, Table]]:
        """Return earlier rows whose request is another one now (their ids, sorted), and those that are gone (their ids
        and which of their file's they were), by path.

        earlier: the number that the rows of each file have. current: numbers of the input's files.
        """
        current = list(current)
        changed, gone = [], []
        for rows in map(sorted_by_id, joined_ranges(self.tables, NO_ROWS)):
            before = take(rows, np.isin(rows["file"], list(earlier.values())))
            now = take(rows, np.isin(rows["file"], current))
            index = index_of(before["id"], now["id"])
            requests = np.append(now["request"], np.uint64(0))[index]  # -1, of no place, is the last
            changed.append(take(before, (index >= 0) & (requests != before["request"])))
            gone.append(take(before, index < 0))
        changed_rows = _by_path(join(changed, NO_ROWS), earlier)
        return {path: rows["id"] for path, rows in changed_rows.items()}, _by_path(join(gone, NO_ROWS), earlier)

    def save(self, directory: StoragePath) -> None:
        """Write the index into a run's directory. The segments come first, so that a kill leaves the old index."""
        if self.saved_in == directory:
            return
        if has_many_segments(len(self.segments), self._num_rows()) or self._num_stale() > self._num_rows() // 2:
            self._merge(directory)
        self.segments = [(directory, self._saved(place, segment, directory)) for place, segment in self.segments]
        write_facts(directory / FILE, self._facts())
        remove_unused(directory, KIND, [segment for _, segment in self.segments])
        self._tables, self.saved_in = None, directory

    def _saved(self, place: StoragePath, segment: Segment, directory: StoragePath) -> Segment:
        if place != directory:
            (directory / segment.name).write_atomic((place / segment.name).read_bytes())
        return segment

    def _merge(self, directory: StoragePath) -> None:
        """Write all rows that are not out of date as few segments."""
        numbers = sorted(self.numbers)
        alive = (take(table, np.isin(table["file"], numbers)) for table in joined_ranges(self.tables, NO_ROWS))
        self.segments = [(directory, segment) for segment in write_rows(directory, KIND, alive)]

    def _num_rows(self) -> int:
        return sum(len(table["id"]) for table in self.tables)

    def _num_stale(self) -> int:
        return self._num_rows() - sum(entry.num_rows for entry in self.files.values())

    def _facts(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "key": self.key,
            "next_number": self.next_number,
            "segments": [segment.as_json() for _, segment in self.segments],
            **files_as_json(self.files.values()),
        }


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows that the input asks for, read from its index a range of ids at a time.

    Attributes:
        index: the input's.
        allowed: by number of a file in the index: how many of its first rows are asked for.
        starts: by number of a file: the place of its first row in the whole input.
        default_rows: output rows of ids that the input does not have, whose rows another input left.
        shard: only its ids are asked for; None for all ids.
    """

    index: InputIndex
    allowed: np.ndarray
    starts: np.ndarray
    default_rows: int
    shard: JobShard | None = None

    def __len__(self) -> int:
        """Return the number of ids. It takes time to count those of a shard."""
        if self.shard is None:
            return self.num_input_rows
        return sum(int(np.count_nonzero(self._is_expected(table))) for table in self.index.tables)

    @property
    def num_input_rows(self) -> int:
        """Return the number of rows of the whole input, those of other shards included."""
        return int(self.allowed.sum())

    def of_shard(self, shard: JobShard) -> ExpectedRows:
        """Return the rows of one shard of the job."""
        return replace(self, shard=shard)

    def by_range(self, parts: int) -> Iterator[Table]:
        """Yield the rows of each range of ids: columns id, place (in the whole input) and rows, sorted by id."""
        for tables in ranges(self.index.tables, parts):
            rows = join([self._placed(table) for table in tables], NO_EXPECTED)
            yield sorted_by_id(rows) if len(tables) > 1 else rows

    def contains(self, ids: Digests) -> np.ndarray:
        """Return for each id whether the input asks for it."""
        is_expected = np.zeros(len(ids), bool)
        for table in self.index.tables if len(ids) else ():
            first, behind = (np.searchsorted(table["id"], ids, side) for side in ("left", "right"))
            for offset in range(int((behind - first).max())):  # an id also has rows that are out of date
                here = np.flatnonzero(first + offset < behind)
                is_expected[here] |= self._is_expected(take(table, first[here] + offset))
        return is_expected

    def duplicates(self) -> Digests:
        """Return the ids that occur more than once, sorted."""
        parts = num_ranges(self.num_input_rows)
        return np.concatenate([EMPTY, *(duplicates(rows["id"]) for rows in self.by_range(parts))])

    def _placed(self, table: Table) -> Table:
        rows = take(table, self._is_expected(table))
        place = self.starts[rows["file"]] + rows["row"]
        return {"id": rows["id"], "place": place, "rows": rows["rows"]}

    def _is_expected(self, table: Table) -> np.ndarray:
        is_expected = table["row"] < self.allowed[table["file"]]
        return is_expected if self.shard is None else is_expected & self.shard.holds(table["id"])


def files_as_json(files: Iterable[IndexedFile]) -> dict[str, Any]:
    """Return the files as lists without names, since there may be many. Types that several have are there once."""
    numbers: dict[str, int] = {}
    entries = []
    for file in files:
        types = base64.b64encode(pa.schema(list(file.types.items())).serialize()).decode()
        number = numbers.setdefault(types, len(numbers))
        details = [number, file.slices, file.unread]
        entries.append([file.number, file.path, file.name, file.format, file.fingerprint, *details])
    return {"types": list(numbers), "files": entries}


def files_in(facts: Mapping[str, Any]) -> dict[str, IndexedFile]:
    """Return the files in this form by path. Raises what is in DAMAGE."""
    types = [_types_in(text) for text in facts["types"]]
    files = {}
    for number, path, name, format_, fingerprint, at, slices, values in facts["files"]:
        unread = {column: UnreadValue(*value) for column, value in dict(values).items()} if values else {}
        files[path] = IndexedFile(number, path, name, format_, fingerprint, types[at], list(map(tuple, slices)), unread)
    return files


def _types_in(text: str) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))}


def index_key(settings: Mapping[str, Any]) -> str:
    """Return a key of everything that the content of an index depends on."""
    return hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=16).hexdigest()


def _by_path(table: Table, numbers: Mapping[str, int]) -> dict[str, Table]:
    """Return the rows of each file that has some, in their order."""
    paths = {number: path for path, number in numbers.items()}
    return {paths[number]: take(table, table["file"] == number) for number in np.unique(table["file"]).tolist()}
