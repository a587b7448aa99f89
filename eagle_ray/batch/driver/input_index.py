"""InputIndex: what a scan found in each input file, kept with the run, so that a file is scanned once.

For each file: its fingerprint, the types of its columns and its shards. For each row, in segments sorted by id: the
digests of its id and of its request, its file, its place there, and how many output rows it has. An entry is used only
for a file with the same fingerprint. A file that grew at its end is scanned from its last shard on.

    index = InputIndex.load(run.output / INDEX, key).with_rows()
    index.add(files, fingerprints(files, {}), RowScanner(config, columns), Growth(prints))
    index.save(run.output / INDEX)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray.batch.reader.carried_columns import join_into
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.shards import FilePart, FileScan, Shard
from eagle_ray.requests.columns import FIRST, RowPosition
from eagle_ray.runs.recorded_inputs import Fingerprint, what_changed
from eagle_ray.runs.row_index import (
    DIGEST,
    SEGMENT_ROWS,
    Digests,
    IndexDamaged,
    Segment,
    Table,
    cut,
    has_many_segments,
    isin,
    join,
    joined_ranges,
    read_index_file,
    read_segment,
    remove_unused,
    segments_in,
    sorted_by_id,
    take,
    write_facts,
    write_rows,
    write_segment,
)
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
FILE = "input.json"
KIND = "input"
VERSION = 4
DAMAGE = (IndexDamaged, LookupError, TypeError, ValueError, binascii.Error, pa.ArrowException)
NO_ROWS: Table = {
    "id": np.empty(0, DIGEST),
    "request": np.empty(0, np.uint64),  # digest of the values that the request is made of
    "file": np.empty(0, np.uint32),  # number of the file in the index
    "row": np.empty(0, np.uint32),  # which of its file's rows, blank lines not counted
    "rows": np.empty(0, np.uint32),  # output rows
}
Scan = Callable[[list[tuple[InputFile, FilePart]]], Iterable[Iterable[tuple[FileScan, Table]]]]
"""Scan parts of files; yield for each part its consecutive pieces with their rows (columns id, request, rows)."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One scanned file. number: of its rows in the segments. shards: byte offset or row group, row, line, rows."""

    number: int
    path: str
    name: str
    format: str
    fingerprint: Fingerprint
    types: dict[str, pa.DataType]
    shards: list[tuple[int, int, int | None, int]]

    @property
    def num_rows(self) -> int:
        return sum(shard[3] for shard in self.shards)

    def shards_of(self, file: InputFile) -> list[Shard]:
        return [Shard(file, start, RowPosition(row, line), count) for start, row, line, count in self.shards]

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
        next_number: of the next file that is scanned.
        vanished: number and count of the rows that are in no file any more, if there are any: their answers stand.
        segments: on disk, with the directory of each.
        unsaved: tables that are in memory only.
        saved_in: the directory that has the index as it is, or None.
    """

    key: str
    files: dict[str, IndexedFile] = field(default_factory=dict)
    next_number: int = 0
    vanished: tuple[int, int] | None = None
    segments: list[tuple[StoragePath, Segment]] = field(default_factory=list)
    unsaved: list[Table] = field(default_factory=list)
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
            vanished = tuple(facts["vanished"]) if facts["vanished"] else None
            return cls(key, files, facts["next_number"], vanished, segments, saved_in=directory)
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
        return [*(read_segment(directory, segment) for directory, segment in self.segments), *self.unsaved]

    def add(
        self,
        files: Iterable[InputFile],
        fingerprints: Mapping[str, Fingerprint],
        scan: Scan,
        has_grown: Callable[[InputFile, Fingerprint], bool],
    ) -> int:
        """Scan the files that the index does not have as they are now. Return their number.

        has_grown: whether a file holds the lines of a fingerprint, and more behind them.
        """
        bases = []
        for file in files:
            old = self.files.get(file.path)
            if old is not None and old.describes(file, fingerprints[file.path]):
                continue
            grown = None
            if old is not None and (old.name, old.format) == (file.name, file.format):
                grown = old if has_grown(file, old.fingerprint) else None
            bases.append((file, *self._base(file, fingerprints[file.path], grown)))
        with RowWriter(self) as rows:
            scanned = scan([(file, part) for file, _, part, _ in bases])
            for (file, base, _, num_known), found in zip(bases, scanned, strict=True):
                self.files[file.path] = _joined(base, found, rows, num_known)
                self.saved_in = None
        return len(bases)

    def _base(
        self, file: InputFile, fingerprint: Fingerprint, grown: IndexedFile | None
    ) -> tuple[IndexedFile, FilePart, int]:
        """Return what is known of a file, the part to scan, and how many of that part's rows are known.

        Of a file that has grown, the part is its last shard and what is behind it.
        """
        if grown is not None and grown.shards:
            *kept, (start, row, line, num_known) = grown.shards
            log.info("%s has grown: reading its new rows", file.path)
            base = replace(grown, fingerprint=fingerprint, types=dict(grown.types), shards=kept)
            return base, FilePart(start, RowPosition(row, line)), num_known
        number, self.next_number = self.next_number, self.next_number + 1
        base = IndexedFile(number, file.path, file.name, file.format, fingerprint, {}, [])
        return base, FilePart(0, FIRST), 0

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of all rows that are not out of date."""
        return {entry.number for entry in self.files.values()} | ({self.vanished[0]} if self.vanished else set())

    def rows_of_files(self, numbers: Iterable[int]) -> Table:
        """Return the rows of some files, sorted by id. They are held in memory."""
        wanted = list(numbers)
        found = [take(table, np.isin(table["file"], wanted)) for table in self.tables]
        return sorted_by_id(join(found, NO_ROWS))

    def compare(self, replaced: Iterable[int], current: Iterable[int]) -> tuple[Digests, Digests]:
        """Return the ids of earlier rows whose request is another one now, and of those that have vanished since.

        Earlier rows are those of replaced files, and those that had vanished before. What has vanished is kept, so that
        a row that comes back is compared, too. current: the numbers of the files that are asked for.
        """
        number, num_before = self.vanished or (None, 0)
        numbers = [*replaced, *([self.vanished[0]] if self.vanished else [])]
        rows = self.rows_of_files(numbers) if numbers else NO_ROWS
        changed, gone = _changed_ids(rows, self, current)
        vanished = take(rows, isin(rows["id"], gone))
        is_new = vanished["file"] != number
        if is_new.any() or len(is_new) != num_before:
            self._set_vanished(vanished)
        return changed, vanished["id"][is_new]

    def _set_vanished(self, rows: Table) -> None:
        count = len(rows["id"])
        self.vanished, self.saved_in = None, None
        if count:
            self.vanished = self.next_number, count
            self.unsaved.append(rows | {"file": np.full(count, self.next_number, np.uint32)})
            self.next_number += 1
            self.reload()

    def save(self, directory: StoragePath) -> None:
        """Write the index into a run's directory. The segments come first, so that a kill leaves the old index."""
        if self.saved_in == directory:
            return
        num_segments = len(self.segments) + len(self.unsaved)
        if has_many_segments(num_segments, self._num_rows()) or self._num_stale() > self._num_rows() // 2:
            self._merge(directory)
        self.segments = [(directory, self._saved(place, segment, directory)) for place, segment in self.segments]
        self.segments += [(directory, write_segment(directory, KIND, table)) for table in self.unsaved]
        self.unsaved = []
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
        self.unsaved = []

    def _num_rows(self) -> int:
        return sum(len(table["id"]) for table in self.tables)

    def _num_stale(self) -> int:
        kept = sum(entry.num_rows for entry in self.files.values()) + (self.vanished[1] if self.vanished else 0)
        return self._num_rows() - kept

    def _facts(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "key": self.key,
            "next_number": self.next_number,
            "vanished": list(self.vanished) if self.vanished else None,
            "segments": [segment.as_json() for _, segment in self.segments],
            **files_as_json(self.files.values()),
        }

    def spill(self, table: Table) -> None:
        """Move rows that were just scanned to a temporary file."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="eagle-ray-index-")
        directory = StoragePath.of(self._temporary.name)
        self.segments.append((directory, write_segment(directory, KIND, table)))
        self.reload()

    def reload(self) -> None:
        """Read the rows again when they are next used."""
        self._tables = None


class RowWriter:
    """Collects scanned rows, and sorts and spills them once they fill a segment."""

    def __init__(self, index: InputIndex) -> None:
        self._index = index
        self._waiting: list[Table] = []
        self._num_waiting = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None and self._waiting:
            self._index.unsaved.append(self._sorted())
            self._index.reload()

    def add(self, table: Table) -> None:
        self._waiting.append(table)
        self._num_waiting += len(table["id"])
        if self._num_waiting >= SEGMENT_ROWS:
            self._index.spill(self._sorted())

    def _sorted(self) -> Table:
        table = sorted_by_id(join(self._waiting, NO_ROWS))
        self._waiting, self._num_waiting = [], 0
        return table


def files_as_json(files: Iterable[IndexedFile]) -> dict[str, Any]:
    """Return the files as lists without names, since there may be many. Types that several have are there once."""
    numbers: dict[str, int] = {}
    entries = []
    for file in files:
        types = base64.b64encode(pa.schema(list(file.types.items())).serialize()).decode()
        number = numbers.setdefault(types, len(numbers))
        entries.append([file.number, file.path, file.name, file.format, file.fingerprint, number, file.shards])
    return {"types": list(numbers), "files": entries}


def files_in(facts: Mapping[str, Any]) -> dict[str, IndexedFile]:
    """Return the files in this form by path. Raises what is in DAMAGE."""
    types = [_types_in(text) for text in facts["types"]]
    return {
        path: IndexedFile(number, path, name, format_, fingerprint, types[at], [tuple(shard) for shard in shards])
        for number, path, name, format_, fingerprint, at, shards in facts["files"]
    }


def _types_in(text: str) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))}


def index_key(settings: Mapping[str, Any]) -> str:
    """Return a key of everything that the content of an index depends on."""
    return hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=16).hexdigest()


def _joined(base: IndexedFile, found: Iterable[tuple[FileScan, Table]], rows: RowWriter, num_known: int) -> IndexedFile:
    """Return the file with what a scan found behind its shards. num_known: rows at the start that are indexed."""
    types, shards = dict(base.types), list(base.shards)
    first = base.num_rows
    for scan, table in found:
        join_into(types, scan.types)
        shards += [(shard.start, *shard.first, shard.num_rows) for shard in scan.shards]
        count = len(table["id"])
        places = np.arange(first, first + count, dtype=np.uint32)
        rows.add(cut(table | {"file": np.full(count, base.number, np.uint32), "row": places}, num_known, count))
        num_known = max(0, num_known - count)
        first += count
    return replace(base, types=types, shards=shards)


def _changed_ids(old: Table, new: InputIndex, numbers: Iterable[int]) -> tuple[Digests, Digests]:
    """Return the ids of old rows whose request is another one now, and of those that are gone.

    old: sorted rows. numbers: the files that are asked for now.
    """
    found = np.zeros(len(old["id"]), bool)
    same = np.zeros(len(old["id"]), bool)
    wanted = list(numbers)
    for table in new.tables:
        _match(old, table, np.isin(table["file"], wanted), found, same)
    return old["id"][found & ~same], old["id"][~found]


def _match(old: Table, table: Table, is_current: np.ndarray, found: np.ndarray, same: np.ndarray) -> None:
    """Mark the old rows that a table has, and those it has with the same request."""
    current = take(table, is_current)
    places = np.minimum(np.searchsorted(current["id"], old["id"]), max(0, len(current["id"]) - 1))
    if len(current["id"]):
        here = current["id"][places] == old["id"]
        found |= here
        same |= here & (current["request"][places] == old["request"])
