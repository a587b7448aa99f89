"""InputIndex: the result of scanning each input file, stored with the run so that each file is scanned once.

For each file: its fingerprint, the types of its columns and its slices. For each row, in segments
sorted by id: the digests of its id and of its request, its file, its place there, and how many
output rows it has. An entry is used only for a file with the same fingerprint. A file that grew at
its end is scanned from its last slice on.

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

from eagle_ray.batch.reader.carried_columns import join_into
from eagle_ray.batch.reader.file_slices import FileSlice
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.scan import FilePart, FileScan
from eagle_ray.batch.reader.unread_parameters import UnreadValue
from eagle_ray.requests.columns import RowPosition
from eagle_ray.runs.recorded_inputs import Fingerprint, what_changed
from eagle_ray.runs.row_index import (
    NO_DIGESTS,
    Digests,
    IndexDamaged,
    Segment,
    Table,
    cut,
    has_many_segments,
    index_of,
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
)
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
INPUT_FILE = "input.json"
INPUT_KIND = "input"
INPUT_VERSION = 5
DAMAGE = (IndexDamaged, LookupError, TypeError, ValueError, binascii.Error, pa.ArrowException)
NO_INPUT_ROWS: Table = {
    "id": NO_DIGESTS,
    "request": np.empty(0, np.uint64),  # digest of the values that the request is made of
    "file": np.empty(0, np.uint32),  # number of the file in the index
    "row": np.empty(0, np.uint32),  # which of its file's rows, blank lines not counted
    "rows": np.empty(0, np.uint32),  # output rows
}
Scan = Callable[[list[FilePart]], Iterable[Iterable[FileScan]]]
"""Scan parts of files; yield for each part its consecutive pieces."""


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """State of earlier attempts that the scan of the input can reuse.

    Attributes:
        index: directory of the run's index; None for a damaged index.
        inputs: recorded fingerprints of the input files, by path.
        finished_key: key of the plan all of whose rows are in the output, or None.
        revisions: commits on the hub that the run read, by repository and revision.
    """

    index: StoragePath | None
    inputs: Mapping[str, Fingerprint] = field(default_factory=dict)
    finished_key: str | None = None
    revisions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """What the scan of one input file found.

    Attributes:
        number: number of the file in the segments' column `file`.
        slices: for each slice its byte offset or row group, first row, first line, and rows.
        unread: first value of each column that is a parameter which rows cannot set.
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
        return [
            FileSlice(file, start, RowPosition(row, line), count)
            for start, row, line, count in self.slices
        ]

    def describes(self, file: InputFile, fingerprint: Fingerprint) -> bool:
        """Return whether the file is unchanged since this scan."""
        return self.format == file.format and self.has_content(file, fingerprint)

    def has_content(self, file: InputFile, fingerprint: Fingerprint) -> bool:
        """Return whether the file still has the recorded content. Its format may differ."""
        is_same = self.path == file.path and self.name == file.name
        return is_same and what_changed(self.fingerprint, fingerprint) is None


@dataclass(slots=True)
class InputIndex:
    """Scanned files and their rows.

    Attributes:
        key: key of the settings under which rows were read; an index with another key is useless
            for this job.
        files: results of the last scan of each file, by path.
        next_number: number of the next file that is scanned.
        segments: files of rows on disk, with the directory of each.
        saved_in: directory that holds the current state of the index, or None.
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
        """Open the index of a run, without reading its rows. An unusable index is opened as an empty one."""
        facts = read_index_file(directory / INPUT_FILE)
        if facts is None or (facts.get("version"), facts.get("key")) != (INPUT_VERSION, key):
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
        """Return all rows, as tables sorted by id. Rows whose file number belongs to no file are out of date.

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
        """Scan the files that are new or changed. Their rows are in temporary files until `save`.

        Args:
            grown: paths of files to which lines were appended; only the new lines are scanned.
        """
        bases = []
        for file in files:
            old = self.files.get(file.path)
            if old is not None and old.describes(file, fingerprints[file.path]):
                continue
            is_base = (
                old is not None
                and file.path in grown
                and (old.name, old.format) == (file.name, file.format)
            )
            bases.append(self._base(file, fingerprints[file.path], old if is_base else None))
        if bases:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(
                prefix="eagle-ray-index-"
            )
            directory = StoragePath.of(self._temporary.name)
            scanned = zip(bases, scan([part for _, part, _ in bases]), strict=True)
            rows = chain.from_iterable(
                self._rows_of(base, scans, known) for (base, _, known), scans in scanned
            )
            self.segments += [
                (directory, segment) for segment in write_rows(directory, INPUT_KIND, rows)
            ]
            self._tables = None
            self.saved_in = None

    def _rows_of(
        self, base: IndexedFile, scans: Iterable[FileScan], num_known: int
    ) -> Iterator[Table]:
        """Yield the rows that scans found in a file, and add the file once they are over.

        Args:
            base: the file with what is known of it.
            num_known: rows at the start of the scans that are indexed.
        """
        types = dict(base.types)
        slices = list(base.slices)
        unread = dict(base.unread)
        first = base.num_rows
        for scan in scans:
            join_into(types, scan.types)
            for file_slice in scan.slices:
                slices.append((file_slice.start, *file_slice.first, file_slice.num_rows))
            for column, value in scan.unread.items():
                unread.setdefault(column, value._replace(number=first + value.number))

            count = len(scan.rows["id"])
            file_numbers = np.full(count, base.number, np.uint32)
            row_numbers = np.arange(first, first + count, dtype=np.uint32)
            rows = scan.rows | {"file": file_numbers, "row": row_numbers}
            yield cut(rows, num_known, count)
            num_known = max(0, num_known - count)
            first += count
        self.files[base.path] = replace(base, types=types, slices=slices, unread=unread)

    def _base(
        self, file: InputFile, fingerprint: Fingerprint, grown: IndexedFile | None
    ) -> tuple[IndexedFile, FilePart, int]:
        """Return the known part of a file, the part left to scan, and the number of known rows in the latter.

        If the file has grown, the part is its last slice and all rows after it.
        """
        if grown is not None and grown.slices:
            *earlier, (start, row, line, num_known) = grown.slices
            log.info("%s has grown: reading its new rows", file.path)
            base = replace(grown, fingerprint=fingerprint, types=dict(grown.types), slices=earlier)
            return base, FilePart(file, start, RowPosition(row, line)), num_known

        number = self.next_number
        self.next_number += 1
        base = IndexedFile(number, file.path, file.name, file.format, fingerprint, {}, [], {})
        return base, FilePart(file), 0

    @property
    def numbers(self) -> set[int]:
        """Return the file numbers of all rows that are not out of date."""
        return {entry.number for entry in self.files.values()}

    def compare(
        self, earlier: Mapping[str, int], current: Iterable[int]
    ) -> tuple[dict[str, Digests], dict[str, Table]]:
        """Compare earlier rows with the current ones, by id. Both results are by path of the earlier file.

        Args:
            earlier: file number that each file's rows had.
            current: file numbers of the input's files now.

        Returns:
            The sorted ids whose request has changed, and the rows that are gone: their ids and their
            positions in the file.
        """
        current = list(current)
        changed = []
        gone = []
        earlier_files = list(earlier.values())
        for joined in joined_ranges(self.tables, NO_INPUT_ROWS):
            rows = sorted_by_id(joined)
            files = rows["file"]
            before = take(rows, np.isin(files, earlier_files))
            now = take(rows, np.isin(files, current))

            # Rows that are gone have the index -1, which is the appended 0.
            index = index_of(before["id"], now["id"])
            is_there = index >= 0
            requests = np.append(now["request"], np.uint64(0))[index]
            has_changed = requests != before["request"]
            changed.append(take(before, is_there & has_changed))
            gone.append(take(before, ~is_there))

        changed_rows = _by_path(join(changed, NO_INPUT_ROWS), earlier)
        changed_ids = {path: rows["id"] for path, rows in changed_rows.items()}
        return changed_ids, _by_path(join(gone, NO_INPUT_ROWS), earlier)

    def save(self, directory: StoragePath) -> None:
        """Write the index into a run's directory. The segments come first, so that a kill leaves the old index."""
        if self.saved_in == directory:
            return
        if (
            has_many_segments(len(self.segments), self._num_rows())
            or self._num_stale() > self._num_rows() // 2
        ):
            self._merge(directory)
        self.segments = [
            (directory, self._saved(place, segment, directory)) for place, segment in self.segments
        ]
        write_facts(directory / INPUT_FILE, self._facts())
        remove_unused(directory, INPUT_KIND, [segment for _, segment in self.segments])
        self._tables = None
        self.saved_in = directory

    def _saved(self, place: StoragePath, segment: Segment, directory: StoragePath) -> Segment:
        if place != directory:
            (directory / segment.name).write_atomic((place / segment.name).read_bytes())
        return segment

    def _merge(self, directory: StoragePath) -> None:
        """Write all rows that are not out of date as few segments."""
        numbers = sorted(self.numbers)
        alive = (
            take(table, np.isin(table["file"], numbers))
            for table in joined_ranges(self.tables, NO_INPUT_ROWS)
        )
        self.segments = [
            (directory, segment) for segment in write_rows(directory, INPUT_KIND, alive)
        ]

    def _num_rows(self) -> int:
        return sum(len(table["id"]) for table in self.tables)

    def _num_stale(self) -> int:
        return self._num_rows() - sum(entry.num_rows for entry in self.files.values())

    def _facts(self) -> dict[str, Any]:
        return {
            "version": INPUT_VERSION,
            "key": self.key,
            "next_number": self.next_number,
            "segments": [segment.as_json() for _, segment in self.segments],
            **files_as_json(self.files.values()),
        }


def files_as_json(files: Iterable[IndexedFile]) -> dict[str, Any]:
    """Return the files as compact lists without keys. Types that several files share are stored once."""
    numbers: dict[str, int] = {}
    entries = []
    for file in files:
        schema = pa.schema(list(file.types.items()))
        types = base64.b64encode(schema.serialize()).decode()
        entries.append(
            [
                file.number,
                file.path,
                file.name,
                file.format,
                file.fingerprint,
                numbers.setdefault(types, len(numbers)),
                file.slices,
                file.unread,
            ]
        )
    return {"types": list(numbers), "files": entries}


def files_in(facts: Mapping[str, Any]) -> dict[str, IndexedFile]:
    """Return the files of `files_as_json` by path. Raises an error of DAMAGE if they are damaged."""
    types = [_types_in(text) for text in facts["types"]]
    files = {}
    for number, path, name, format_, fingerprint, at, slices, values in facts["files"]:
        unread = (
            {column: UnreadValue(*value) for column, value in dict(values).items()}
            if values
            else {}
        )
        files[path] = IndexedFile(
            number, path, name, format_, fingerprint, types[at], list(map(tuple, slices)), unread
        )
    return files


def _types_in(text: str) -> dict[str, pa.DataType]:
    return {
        field.name: field.type for field in pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    }


def index_key(settings: Mapping[str, Any]) -> str:
    """Return a key of everything that the content of an index depends on."""
    return hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=16).hexdigest()


def _by_path(table: Table, numbers: Mapping[str, int]) -> dict[str, Table]:
    """Return the rows of each file that has some, in their order."""
    paths = {number: path for path, number in numbers.items()}
    return {
        paths[number]: take(table, table["file"] == number)
        for number in np.unique(table["file"]).tolist()
    }
