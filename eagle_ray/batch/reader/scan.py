"""Scan: read parts of input files once, and keep what the plan and the index need of their rows.

A file is read in the order of its rows. From them follow the types of its columns, its slices, the first values of
parameters that rows cannot set, and for each row the digests of its id and of its request and its output rows.

    scanner = RowScanner(config, request_columns(config.input.columns))
    [[found]] = scanner([FilePart(file)])
    len(found.rows["id"]), found.slices[0].num_rows                         # (240, 240)
"""

from __future__ import annotations

import hashlib
import reprlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eagle_ray.batch.reader.file_slices import (
    COLUMNAR,
    FileSlice,
    columnar_batches,
    columns_in,
    open_columnar,
    partition_scalars,
    partitions_in,
    reading,
    records_in,
    with_values,
)
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.input_columns import CSV_TEXT, join_into, type_in_parquet, type_of
from eagle_ray.batch.reader.parquet import check_unique
from eagle_ray.batch.reader.text_files import type_of_csv_value
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import FIRST, ColumnPath, RequestColumns, RowPosition
from eagle_ray.requests.parameters import ROW_PARAMETERS, match_unsupported
from eagle_ray.requests.refused import REFUSED, has_effect
from eagle_ray.requests.request import InputRow, id_of, parse_row
from eagle_ray.requests.row_schema import JSON
from eagle_ray.runs.row_index import DIGEST, Table, digest

SLICE_ROWS = 512
NUM_THREADS = 16  # each waits for one object
CARRY_HINT = "(input.on_unknown=carry)."
SMALL_BYTES = 4 << 20  # of an object that takes longer to ask for than to read


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive rows of a file: from a byte offset or row group on, whose first row has this position, up to `stop`,
    which is the file's end if it is None.
    """

    file: InputFile
    start: int = 0
    first: RowPosition = FIRST
    stop: int | None = None


class UnreadValue(NamedTuple):
    """The first value of a parameter that rows cannot set.

    Attributes:
        number: number of its row, counted from the first one that was scanned; blank lines are not counted.
        row, line: position of its row in the file.
        text: the value, shortened.
    """

    number: int
    row: int
    line: int | None
    text: str


@dataclass(slots=True)
class FileScan:
    """What a scan finds in a part of a file, once all of its rows are read.

    Attributes:
        types: the joined types of its columns, in order.
        unread: the first value of each column that is a parameter which rows cannot set.
        rows: a table of the index, with the columns id, request and rows.
    """

    types: dict[str, pa.DataType] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)
    unread: dict[str, UnreadValue] = field(default_factory=dict)
    rows: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowScanner:
    """Scans parts of files: yields the types and slices of each, and a row of the index for each of its rows."""

    config: JobConfig
    columns: RequestColumns

    def __call__(self, parts: Iterable[FilePart]) -> Iterator[list[FileScan]]:
        """Scan small objects several at once, since each request takes its time, and all else one after the other."""
        for is_small_object, group in groupby(parts, key=_is_small_object):
            if is_small_object:
                yield from self._at_once(group)
            else:
                yield from map(self._scan, group)

    def _at_once(self, parts: Iterable[FilePart]) -> Iterator[list[FileScan]]:
        """Yield the scans in their order. At most NUM_THREADS are ahead, since their rows are held in memory."""
        ahead: deque[Future[list[FileScan]]] = deque()
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for part in parts:
                ahead.append(threads.submit(self._scan, part))
                if len(ahead) == NUM_THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _scan(self, part: FilePart) -> list[FileScan]:
        needed = frozenset(self.columns.needed)
        has_turns = "turns" in self.columns.prompts
        ids, requests, rows = bytearray(), array("Q"), array("I")
        n = self.config.sampling.n
        scan = FileScan()
        for position, row in rows_in_part(part, self.columns, scan, not self.config.output.store_prompt):
            location = part.file.location_of(position)
            ids += digest(id_of(row, self.columns, location))
            requests.append(request_digest(row, needed))
            own = isinstance(row, dict) and (has_turns or row.get("n") is not None)
            request = parse_row(row, self.columns, location) if own else None
            rows.append(n if request is None else request.num_rows(self.config))
        scan.rows = {
            "id": np.frombuffer(bytes(ids), DIGEST),
            "request": np.frombuffer(requests, np.uint64),
            "rows": np.frombuffer(rows, np.uint32),
        }
        return [scan]


def _is_small_object(part: FilePart) -> bool:
    return not part.file.storage_path.is_local and part.file.version.size <= SMALL_BYTES


def request_digest(row: InputRow, needed: frozenset[str]) -> int:
    """Return a digest of the values that a row's request is made of; of a bad row, of what is wrong with it.

    A column that is null is like one that is absent.
    """
    values: Any = repr(row)
    if isinstance(row, dict):
        values = [(name, row[name]) for name in sorted(needed.intersection(row)) if row[name] is not None]
    return int.from_bytes(hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).digest())


def rows_in_part(
    part: FilePart, columns: RequestColumns, scan: FileScan, is_private: bool = False
) -> Iterator[tuple[RowPosition, InputRow]]:
    """Yield the position of each row of a part, and the row (of Parquet, its needed columns only).

    scan: has what the part holds once the last row was yielded. is_private: that is no value of a row. Raises
    ConfigError if the file cannot be read at all.
    """
    unread = UnreadParameters(columns, is_private)
    read = _columnar_rows if part.file.format in COLUMNAR else _record_rows
    with reading(part.file):
        yield from read(part, columns, scan, unread)
    scan.unread = unread.values


def _record_rows(
    part: FilePart, columns: RequestColumns, scan: FileScan, unread: UnreadParameters
) -> Iterator[tuple[RowPosition, InputRow]]:
    file, stop, can_split = part.file, part.stop, part.file.can_split
    starts: list[tuple[int, RowPosition]] = []
    counts: list[int] = []
    types = RecordTypes(file.format)
    partitions = partition_scalars(file)
    values = {name: scalar.as_py() for name, scalar in partitions.items()}
    inherited: set[str] = set()  # partition columns that some row does not have of its own
    unread.watch(partitions)
    for number, (offset, position, row) in enumerate(records_in(file, part.start, part.first)):
        if stop is not None and offset >= stop:
            break
        if not starts or (can_split and counts[-1] == SLICE_ROWS):
            starts.append((offset, position))
            counts.append(0)
        counts[-1] += 1
        if isinstance(row, dict):
            if new := types.add(row):
                unread.watch(new)
            if partitions:
                inherited |= partitions.keys() - row.keys()
                row = values | row
            if unread.is_watching:
                unread.look(number, position, row)
        yield position, row
    scan.types = types.joined()
    join_into(scan.types, {name: scalar.type for name, scalar in partitions.items() if name in inherited})
    scan.slices = [FileSlice(file, *start, count) for start, count in zip(starts, counts, strict=True)]


def _columnar_rows(
    part: FilePart, columns: RequestColumns, scan: FileScan, unread: UnreadParameters
) -> Iterator[tuple[RowPosition, InputRow]]:
    file = part.file
    with open_columnar(file) as parquet:
        scan.types = {field.name: type_in_parquet(field.type) for field in columns_in(parquet, file)}
        check_unique(parquet, file)
        partitions = partitions_in(parquet, file)
        scan.types |= {name: scalar.type for name, scalar in partitions.items()}
        unread.watch(scan.types)
        needed = [*columns.needed, *unread.watched]
        values = {name: partitions[name].as_py() for name in needed if name in partitions}
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        groups = range(len(sizes))[part.start : part.stop]
        batches = columnar_batches(parquet, file, needed, list(groups))
        for number, row in enumerate(row for rows, _ in batches for row in rows):
            position, row = RowPosition(starts[part.start] + number, None), with_values(row, values)
            if unread.is_watching and isinstance(row, dict):
                unread.look(number, position, row)
            yield position, row
    scan.slices = [FileSlice(file, i, RowPosition(starts[i], None), sizes[i]) for i in groups if sizes[i]]


class RecordTypes:
    """The joined types of the columns of records, in order.

    Only a value of a Python type that its column has not had before is looked at, except where its type depends on the
    value: integers, and the texts of CSV files.
    """

    def __init__(self, format_: str) -> None:
        self._type_of, self._mixed = (type_of_csv_value, CSV_TEXT) if format_ == "csv" else (type_of, JSON)
        self._always = str if format_ == "csv" else int
        self._types: dict[str, pa.DataType] = {}
        self._seen: set[tuple[str, type]] = set()

    def add(self, row: dict[str, Any]) -> list[str]:
        """Join the types of a row's values. Return the columns that no row had before."""
        num_columns = len(self._types)
        for name, value in row.items():
            kind = value.__class__
            if (name, kind) not in self._seen:
                if kind is not self._always:
                    self._seen.add((name, kind))
                join_into(self._types, {name: self._type_of(value)})
        return list(self._types)[num_columns:] if len(self._types) > num_columns else []

    def joined(self) -> dict[str, pa.DataType]:
        return {name: self._mixed if type_ == JSON else type_ for name, type_ in self._types.items()}


class UnreadParameters:
    """Finds parameters that rows cannot set, with the first value of each that would change an output.

    Such a parameter is a column, or a key of an object of which input.columns reads another key.

    Attributes:
        values: the first ones, by column or by ``path.key``.
        watched: for each such column without a value so far, its parameter.
        is_watching: whether rows must be looked at.
    """

    def __init__(self, columns: RequestColumns, is_private: bool = False) -> None:
        self._text_of = _hidden_text if is_private else reprlib.repr
        paths = (columns.id, *columns.prompt_paths)
        self._objects = list({path.parent for path in paths if path.parent is not None})
        self.values: dict[str, UnreadValue] = {}
        self.watched: dict[str, str] = {}
        self.is_watching = bool(self._objects)

    def watch(self, columns: Iterable[str]) -> None:
        """Add the columns that are such parameters."""
        self.watched |= {column: name for column in columns if (name := match_unsupported(column)) is not None}
        self.is_watching = bool(self.watched or self._objects)

    def look(self, number: int, position: RowPosition, row: dict[str, Any]) -> None:
        """Note the values of a row. number: of the row, from the first one of the scan."""
        values = [(column, name, row.get(column)) for column, name in self.watched.items()]
        for path in self._objects:
            items = _object_at(path, row).items()
            values += [(f"{path.text}.{key}", name, value) for key, value in items if (name := _parameter(key))]
        for column, name, value in values:
            if column not in self.values and has_effect(name, value):
                self.values[column] = UnreadValue(number, *position, self._text_of(value))
                self.watched.pop(column, None)
        self.is_watching = bool(self.watched or self._objects)


def _hidden_text(value: Any) -> str:
    return f"a {type(value).__name__} that is not shown, as output.store_prompt is false"


@cache
def _parameter(key: str) -> str | None:
    return key if key in ROW_PARAMETERS else match_unsupported(key)


def _object_at(path: ColumnPath, row: dict[str, Any]) -> dict[str, Any]:
    try:
        value = path.value_in(row)
    except RequestError:  # the row is refused for it elsewhere
        return {}
    return value if isinstance(value, dict) else {}


def remedy_of_unread(column: str) -> str:
    """Return what to do about a column that is a parameter which rows cannot set."""
    name = match_unsupported(column)
    if "." in column and name is None:
        return "Move it to a column of its own (format: openai_batch reads body), or treat it as data " + CARRY_HINT
    instead = name
    if name is not None and name not in ROW_PARAMETERS:
        instead = REFUSED[name].use if name in REFUSED else None
    change = f"Rename it to {instead!r}" if instead else "Leave it out of the input, or rename it"
    return f"{change}, or treat it as data {CARRY_HINT}"
