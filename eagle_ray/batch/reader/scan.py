"""Scan parts of input files once, and collect the data that the plan and the index need.

A file is read in the order of its rows. The scan finds the types of its columns, its slices, the
first values of parameters that rows cannot set, and for each row the digests of its id and its
request, and its number of output rows.

    scanner = RowScanner(config, request_columns(config.input.columns))
    [[found]] = scanner([FilePart(file)])
    len(found.rows["id"]), found.slices[0].num_rows                         # (240, 240)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray.batch.reader.carried_columns import CSV_TEXT, join_into, type_in_parquet, type_of
from eagle_ray.batch.reader.csv_files import type_of_csv_value
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
from eagle_ray.batch.reader.parquet import check_unique
from eagle_ray.batch.reader.unread_parameters import UnreadParameters, UnreadValue
from eagle_ray.config import JobConfig
from eagle_ray.requests.columns import FIRST, RequestColumns, RowPosition
from eagle_ray.requests.request import InputRow, id_of, parse_row
from eagle_ray.requests.row_schema import JSON
from eagle_ray.runs.row_index import DIGEST, Table, digest

SCANNED_SLICE_ROWS = 512
NUM_THREADS = 16  # each waits for one object
SMALL_BYTES = 4 << 20  # bytes of an object that takes longer to ask for than to read


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive rows of a file that are scanned together.

    They begin at a byte offset or row group, whose first row has the given position, and end before
    `stop`; None is the file's end.
    """

    file: InputFile
    start: int = 0
    first: RowPosition = FIRST
    stop: int | None = None


@dataclass(slots=True)
class FileScan:
    """The result of scanning a part of a file.

    Attributes:
        types: types of its columns, joined over the rows, in order.
        unread: first value of each column that is a parameter which rows cannot set.
        rows: a table of the index, with the columns id, request and rows.
    """

    types: dict[str, pa.DataType] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)
    unread: dict[str, UnreadValue] = field(default_factory=dict)
    rows: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowScanner:
    """Scans parts of files: column types, slices, and an index entry for each row."""

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
        is_private = not self.config.output.store_prompt
        ids = bytearray()
        requests = array("Q")
        num_outputs = array("I")
        scan = FileScan()
        for position, row in rows_in_part(part, self.columns, scan, is_private):
            location = part.file.location_of(position)
            ids += digest(id_of(row, self.columns, location))
            requests.append(request_digest(row, needed))

            # Only a row with turns or its own n has another number of output rows than the job's n.
            number = self.config.sampling.n
            if isinstance(row, dict) and (has_turns or row.get("n") is not None):
                number = parse_row(row, self.columns, location).num_rows(self.config)
            num_outputs.append(number)
        scan.rows = {
            "id": np.frombuffer(bytes(ids), DIGEST),
            "request": np.frombuffer(requests, np.uint64),
            "rows": np.frombuffer(num_outputs, np.uint32),
        }
        return [scan]


def _is_small_object(part: FilePart) -> bool:
    return not part.file.storage_path.is_local and part.file.version.size <= SMALL_BYTES


def request_digest(row: InputRow, needed: frozenset[str]) -> int:
    """Return a digest of the values that make a row's request, or of a bad row's error.

    A null column counts as an absent one.
    """
    values: Any = repr(row)
    if isinstance(row, dict):
        values = [
            (name, row[name]) for name in sorted(needed.intersection(row)) if row[name] is not None
        ]
    return int.from_bytes(
        hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    )


def rows_in_part(
    part: FilePart, columns: RequestColumns, scan: FileScan, is_private: bool = False
) -> Iterator[tuple[RowPosition, InputRow]]:
    """Yield the position and the values of each row of a part; of Parquet, only the needed columns.

    Raises ConfigError if the file cannot be read at all.

    Args:
        scan: result that gets the types and slices of the part after the last row.
        is_private: whether the scan must record no value of a row.
    """
    unread = UnreadParameters(columns, is_private)
    read = _columnar_rows if part.file.format in COLUMNAR else _record_rows
    with reading(part.file):
        yield from read(part, columns, scan, unread)
    scan.unread = unread.values


def _record_rows(
    part: FilePart, columns: RequestColumns, scan: FileScan, unread: UnreadParameters
) -> Iterator[tuple[RowPosition, InputRow]]:
    file = part.file
    stop = part.stop
    can_split = file.can_split
    starts: list[tuple[int, RowPosition]] = []
    counts: list[int] = []
    types = RecordTypes(file.format)
    partitions = partition_scalars(file)
    values = {name: scalar.as_py() for name, scalar in partitions.items()}
    inherited: set[str] = set()  # partition columns that some row lacks
    unread.watch(partitions)
    for number, (offset, position, row) in enumerate(records_in(file, part.start, part.first)):
        if stop is not None and offset >= stop:
            break

        # Slices of SCANNED_SLICE_ROWS rows, if the file can be read from the middle.
        if not starts or (can_split and counts[-1] == SCANNED_SLICE_ROWS):
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
    inherited_types = {
        name: scalar.type for name, scalar in partitions.items() if name in inherited
    }
    join_into(scan.types, inherited_types)
    scan.slices = []
    for (offset, position), count in zip(starts, counts, strict=True):
        scan.slices.append(FileSlice(file, offset, position, count))


def _columnar_rows(
    part: FilePart, columns: RequestColumns, scan: FileScan, unread: UnreadParameters
) -> Iterator[tuple[RowPosition, InputRow]]:
    file = part.file
    with open_columnar(file) as parquet:
        scan.types = {}
        for field in columns_in(parquet, file):
            scan.types[field.name] = type_in_parquet(field.type)
        check_unique(parquet, file)
        partitions = partitions_in(parquet, file)
        for name, scalar in partitions.items():
            scan.types[name] = scalar.type
        unread.watch(scan.types)

        needed = [*columns.needed, *unread.watched]
        values = {name: partitions[name].as_py() for name in needed if name in partitions}

        # Row groups, and the number of the first row of each.
        metadata = parquet.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        groups = range(len(sizes))[part.start : part.stop]
        first_row = starts[part.start]

        batches = columnar_batches(parquet, file, needed, list(groups))
        all_rows = (row for rows, _ in batches for row in rows)
        for number, own in enumerate(all_rows):
            position = RowPosition(first_row + number, None)
            row = with_values(own, values)
            if unread.is_watching and isinstance(row, dict):
                unread.look(number, position, row)
            yield position, row

    scan.slices = []
    for i in groups:
        if sizes[i]:
            position = RowPosition(starts[i], None)
            scan.slices.append(FileSlice(file, i, position, sizes[i]))


class RecordTypes:
    """Collects the types of columns from the values of records.

    A column's value is inspected only if its Python type is new in that column, or if the type
    depends on the value, as for integers and the texts of CSV files.
    """

    def __init__(self, format_: str) -> None:
        self._type_of, self._mixed = (
            (type_of_csv_value, CSV_TEXT) if format_ == "csv" else (type_of, JSON)
        )
        self._always = str if format_ == "csv" else int
        self._types: dict[str, pa.DataType] = {}
        self._seen: set[tuple[str, type]] = set()

    def add(self, row: dict[str, Any]) -> list[str]:
        """Update the types with the values of a row. Return the columns that no earlier row had."""
        num_columns = len(self._types)
        for name, value in row.items():
            kind = value.__class__
            if (name, kind) not in self._seen:
                if kind is not self._always:
                    self._seen.add((name, kind))
                join_into(self._types, {name: self._type_of(value)})
        return list(self._types)[num_columns:] if len(self._types) > num_columns else []

    def joined(self) -> dict[str, pa.DataType]:
        return {
            name: self._mixed if type_ == JSON else type_ for name, type_ in self._types.items()
        }
