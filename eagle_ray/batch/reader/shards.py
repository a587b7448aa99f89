"""Shards: small consecutive parts of input files that can be read separately, in any format.

Parquet is split at row groups, every other format at the ends of its records: lines in JSONL and OpenAI batch files.
A compressed file, and one that is read through fsspec, is one shard: its parts could only be read from its start.
A malformed record is one bad row. Memory is bounded by a record or a batch.

Directories such as ``lang=de`` are columns of the files below them (``InputFile.partitions``), except where a row has a
column of that name. Their values are texts, but a run's own files tell the types that the values had.

    [row for _, row in rows_in(shard)]      # [{'prompt': 'Hi'}]
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.batch.reader.carried_columns import CSV_TEXT, carry, column_of, join_into, type_in_parquet, type_of
from eagle_ray.batch.reader.csv import parse_csv_value, rows_in_csv, type_of_csv_value
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.jsonl import CutLine, rows_in_batch, rows_in_jsonl
from eagle_ray.batch.reader.parquet import BATCH_ROWS, batches_in_parquet, check_unique
from eagle_ray.batch.reader.run_files import RUN_FORMAT
from eagle_ray.batch.reader.run_input import batches_in_run, run_schema
from eagle_ray.core.errors import ENCODING_BYTES, ConfigError, RequestError, one_line, wide_encoding
from eagle_ray.requests.columns import FIRST, RowPosition
from eagle_ray.requests.parameters import ROW_PARAMETERS
from eagle_ray.requests.row_schema import JSON
from eagle_ray.requests.rows import UNCARRIED, InputRow
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.part_files import open_part
from eagle_ray.runs.partitions import partition_types
from eagle_ray.storage.checked_parquet import is_damage, open_parquet
from eagle_ray.storage.path import StorageError

log = logging.getLogger("eagle_ray")
SHARD_ROWS = 512
COLUMNAR = ("parquet", RUN_FORMAT)
RECORD_READERS = {"jsonl": rows_in_jsonl, "csv": rows_in_csv, "openai_batch": rows_in_batch}
CARRY_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError, LookupError)
READ_ERRORS = (OSError, pa.ArrowException, OverflowError)  # pyarrow's own words for a damaged or foreign file

Item = TypeVar("Item")
OnRow = Callable[[RowPosition, InputRow], None]  # told of every row: its place in the file, and what is needed of it


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of one file. start: row group (Parquet) or byte offset. first: its first row.

    Blank lines are not rows, but row indices count them.
    """

    file: InputFile
    start: int
    first: RowPosition
    num_rows: int

    def truncate(self, num_rows: int) -> Shard:
        """Return the shard's first rows."""
        return dataclasses.replace(self, num_rows=num_rows)


@dataclass(frozen=True, slots=True)
class FileScan:
    """The content of a file: its columns with their passthrough types, in order, and its shards."""

    types: dict[str, pa.DataType]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive rows of a file: from a byte offset or row group on, whose first row has this position, up to `stop`,
    which is the file's end if it is None.
    """

    start: int
    first: RowPosition
    stop: int | None = None


WHOLE = FilePart(0, FIRST)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a shard: their positions, the values that requests are made of, and the passthrough columns."""

    rows: list[tuple[RowPosition, InputRow]]
    carried: dict[str, pa.Array]

    def truncate(self, num_rows: int) -> Chunk:
        return Chunk(self.rows[:num_rows], {name: column[:num_rows] for name, column in self.carried.items()})


def scan(file: InputFile, needed: Iterable[str], on_row: OnRow, part: FilePart = WHOLE) -> FileScan:
    """Scan one file, or a part of it, once and call on_row for every row (of Parquet, its needed columns only).

    Raises ConfigError if the file cannot be read at all.
    """
    read = _scan_parquet if file.format in COLUMNAR else _scan_records
    try:
        return read(file, needed, on_row, part)
    except StorageError:  # the storage is at fault, not the file
        raise
    except READ_ERRORS as error:
        raise _unreadable_error(file, error) from None


def rows_in(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[RowPosition, InputRow]]:
    """Yield each row's position in its file, and the row (of Parquet, its needed columns only).

    Raises InputChanged if the file has changed since it was scanned, ConfigError if it cannot be read now.
    """
    shard.file.check_unchanged()
    read = _parquet_rows if shard.file.format in COLUMNAR else _record_rows
    return _detect_changes(shard.file, islice(read(shard, needed), shard.num_rows))


def chunks_in(shard: Shard, needed: Iterable[str], carried: Mapping[str, pa.DataType]) -> Iterator[Chunk]:
    """Yield the rows in chunks with their passthrough columns. Raises as rows_in does.

    carried: the columns' types over all files.
    """
    shard.file.check_unchanged()
    read = _parquet_chunks if shard.file.format in COLUMNAR else _record_chunks
    return _detect_changes(shard.file, _first_rows(read(shard, needed, carried), shard.num_rows))


def _first_rows(chunks: Iterator[Chunk], num_rows: int) -> Iterator[Chunk]:
    left = num_rows
    while left > 0 and (chunk := next(chunks, None)) is not None:
        yield chunk.truncate(left)
        left -= len(chunk.rows)


def _detect_changes(file: InputFile, items: Iterator[Item]) -> Iterator[Item]:
    """Treat a file that cannot be read now as changed if its size differs."""
    try:
        with file.detect_changes():
            yield from items
    except (ConfigError, OutputDamaged):
        file.check_unchanged()
        raise


def _unreadable_error(file: InputFile, error: Exception) -> ConfigError:
    fix = "delete it" if file.version.size == 0 else "write it again, leave it out of input.path, or set input.format"
    return ConfigError(f"cannot read {file.path} as {file.format} ({one_line(error)}): {fix}")


@contextmanager
def open_columnar(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises ConfigError naming it if it or what the body reads of it is damaged; OutputDamaged if
    it is another run's part file.
    """
    if file.format == RUN_FORMAT:
        with open_part(file.storage_path) as parquet:
            yield parquet
        return
    try:
        with open_parquet(file.storage_path) as parquet:
            yield parquet
    except Exception as error:
        if not is_damage(error):
            raise
        raise _unreadable_error(file, error) from None


def _scan_records(file: InputFile, needed: Iterable[str], on_row: OnRow, part: FilePart) -> FileScan:
    starts: list[tuple[int, RowPosition]] = []
    counts: list[int] = []
    types = RecordTypes(file.format)
    can_split, stop = file.can_split, part.stop
    partitions = partition_scalars(file)
    values = _values_of(partitions)
    inherited: set[str] = set()  # partition columns that some row does not have of its own
    for offset, position, row in _records(file, part.start, part.first):
        if stop is not None and offset >= stop:
            break
        if not starts or (can_split and counts[-1] == SHARD_ROWS):
            starts.append((offset, position))
            counts.append(0)
        counts[-1] += 1
        if isinstance(row, dict):
            types.add(row)
            inherited |= partitions.keys() - row.keys()
        on_row(position, _with_values(row, values))
    joined = types.joined()
    join_into(joined, {name: scalar.type for name, scalar in partitions.items() if name in inherited})
    shards = (Shard(file, *start, count) for start, count in zip(starts, counts, strict=True))
    return FileScan(joined, tuple(shards))


def partition_scalars(file: InputFile, types: pa.Schema | None = None) -> dict[str, pa.Scalar]:
    """Return the file's partition columns. types: those that are known; others are texts, and null has no type."""
    scalars = {}
    for name, text in file.partitions.items():
        known = None if types is None or name not in types.names else types.field(name).type
        value = text if known is not None or text is None or name not in ROW_PARAMETERS else parse_csv_value(name, text)
        if known is not None:
            scalars[name] = pa.scalar(text, pa.string()).cast(known)
        elif value is None or isinstance(value, str):
            scalars[name] = pa.scalar(value, pa.null() if value is None else CSV_TEXT)
        else:
            scalars[name] = pa.scalar(value)
    return scalars


def _values_of(partitions: Mapping[str, pa.Scalar], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the values of these partition columns; None: of all."""
    wanted = partitions if names is None else names
    return {name: partitions[name].as_py() for name in wanted if name in partitions}


def _with_values(row: InputRow, values: Mapping[str, Any]) -> InputRow:
    """Return the row with the values of partition columns that it does not have itself."""
    return {**values, **row} if values and isinstance(row, dict) else row


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

    def add(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            kind = value.__class__
            if (name, kind) not in self._seen:
                if kind is not self._always:
                    self._seen.add((name, kind))
                join_into(self._types, {name: self._type_of(value)})

    def joined(self) -> dict[str, pa.DataType]:
        return {name: self._mixed if type_ == JSON else type_ for name, type_ in self._types.items()}


def _record_rows(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[RowPosition, InputRow]]:
    values = _values_of(partition_scalars(shard.file))
    for _, position, row in _records(shard.file, shard.start, shard.first):
        yield position, _with_values(row, values)


def _record_chunks(shard: Shard, needed: Iterable[str], carried: Mapping[str, pa.DataType]) -> Iterator[Chunk]:
    rows = islice(_record_rows(shard, needed), shard.num_rows)
    while chunk := list(islice(rows, BATCH_ROWS)):
        columns: dict[str, pa.Array] = {}
        errors: dict[int, RequestError] = {}
        for name, type_ in carried.items():
            columns[name], wrong = _record_column(chunk, name, type_)
            errors |= wrong
        yield Chunk(_with_errors(chunk, errors), columns)


def _with_errors(
    rows: list[tuple[RowPosition, InputRow]], errors: Mapping[int, RequestError]
) -> list[tuple[RowPosition, InputRow]]:
    """Return the rows with an error in each that has a value which cannot be carried; its id stays."""
    return [
        (position, row | {UNCARRIED: errors[i]} if i in errors and isinstance(row, dict) else row)
        for i, (position, row) in enumerate(rows)
    ]


def _record_column(
    chunk: list[tuple[RowPosition, InputRow]], name: str, type_: pa.DataType
) -> tuple[pa.Array, dict[int, RequestError]]:
    values = [row.get(name) if isinstance(row, dict) else None for _, row in chunk]
    return _carried(name, type_, len(chunk), lambda start, stop: column_of(values[start:stop], type_))


def _carried(
    name: str, type_: pa.DataType, num_rows: int, convert: Callable[[int, int], pa.Array]
) -> tuple[pa.Array, dict[int, RequestError]]:
    """Return a carried column of num_rows rows, null where a value does not fit the type, and those rows' errors.

    convert: returns the column of some rows, or raises an error of CARRY_ERRORS.
    """
    try:
        return convert(0, num_rows), {}
    except CARRY_ERRORS:
        pass
    parts, errors = [], {}
    for row in range(num_rows):
        try:
            parts.append(convert(row, row + 1))
        except CARRY_ERRORS as error:
            fix = "cast it, for example to a string, or leave it out with input.passthrough"
            message = f"column {name!r} cannot be carried through as {type_} ({one_line(error)}): {fix}"
            errors[row] = RequestError("bad_type", message)
            parts.append(column_of([None], type_))
    return pa.concat_arrays(parts), errors


def _records(file: InputFile, start: int, start_position: RowPosition) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of every record from byte `start` on, which is at position `at`.

    A last line that is not whole is left out, since another process may be writing it.
    """
    with file.open() as stream:
        if start == 0:
            _check_encoding(stream.read(ENCODING_BYTES), file)
        for offset, position, row in RECORD_READERS[file.format](stream, file.path, start, start_position):
            if isinstance(row, CutLine):
                log.warning("%s, line %s: the last line is not whole. It is read once it is.", file.path, position.line)
                return
            yield offset, position, row


def _check_encoding(first_bytes: bytes, file: InputFile) -> None:
    if (encoding := wide_encoding(first_bytes)) is not None:
        raise ConfigError(f"cannot read {file.path} as {file.format}: it is {encoding} text. Write it as UTF-8.")


def _scan_parquet(file: InputFile, needed: Iterable[str], on_row: OnRow, part: FilePart) -> FileScan:
    with open_columnar(file) as parquet:
        types = {field.name: type_in_parquet(field.type) for field in _columns_in(parquet, file)}
        check_unique(parquet, file)
        partitions = _partitions_in(parquet, file)
        types |= {name: scalar.type for name, scalar in partitions.items()}
        values = _values_of(partitions, needed)
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        groups = range(len(sizes))[part.start : part.stop]
        batches = _parquet_batches(parquet, file, needed, list(groups), ())
        for index, row in enumerate((row for rows, _ in batches for row in rows), starts[part.start]):
            on_row(RowPosition(index, None), _with_values(row, values))
    shards = (Shard(file, i, RowPosition(starts[i], None), sizes[i]) for i in groups if sizes[i])
    return FileScan(types, tuple(shards))


def _partitions_in(parquet: pq.ParquetFile, file: InputFile) -> dict[str, pa.Scalar]:
    """Return the partition columns of a Parquet file, without those that it has itself."""
    schema = parquet.schema_arrow
    scalars = partition_scalars(file, partition_types(schema))
    return {name: scalar for name, scalar in scalars.items() if name not in schema.names}


def _columns_in(parquet: pq.ParquetFile, file: InputFile) -> pa.Schema:
    return run_schema(parquet, file.path) if file.format == RUN_FORMAT else parquet.schema_arrow


def _parquet_batches(
    parquet: pq.ParquetFile, file: InputFile, needed: Iterable[str], groups: list[int], carried: Iterable[str]
) -> Iterator[tuple[list[InputRow], pa.RecordBatch]]:
    if file.format == RUN_FORMAT:
        return batches_in_run(parquet, file.path, needed, groups, carried)
    return batches_in_parquet(parquet, file, needed, groups, carried)


def _parquet_rows(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[RowPosition, InputRow]]:
    for chunk in _parquet_chunks(shard, needed, {}):
        yield from chunk.rows


def _parquet_chunks(shard: Shard, needed: Iterable[str], carried: Mapping[str, pa.DataType]) -> Iterator[Chunk]:
    index = shard.first.row
    try:
        with open_columnar(shard.file) as parquet:
            partitions = _partitions_in(parquet, shard.file)
            read, kept = _values_of(partitions, needed), _values_of(partitions, carried)
            for rows, batch in _parquet_batches(parquet, shard.file, needed, [shard.start], carried):
                positions = [RowPosition(index + i, None) for i in range(len(rows))]
                index += len(rows)
                columns: dict[str, pa.Array] = {}
                errors: dict[int, RequestError] = {}
                for name in batch.schema.names:
                    columns[name], wrong = _parquet_column(batch, name, carried[name])
                    errors |= wrong
                absent = {name: column_of([kept.get(name)] * len(rows), type_) for name, type_ in carried.items()}
                placed = [(place, _with_values(row, read)) for place, row in zip(positions, rows, strict=True)]
                yield Chunk(_with_errors(placed, errors), absent | columns)
    except StorageError:
        raise
    except READ_ERRORS as error:
        raise _unreadable_error(shard.file, error) from None


def _parquet_column(batch: pa.RecordBatch, name: str, type_: pa.DataType) -> tuple[pa.Array, dict[int, RequestError]]:
    column = batch.column(name)
    return _carried(name, type_, len(column), lambda start, stop: carry(column[start:stop], type_))
