"""File slices: consecutive parts of input files that read tasks turn into requests, in any format.

Parquet is split at row groups, every other format between records, which are lines in JSONL and
OpenAI batch files. A compressed file, or one that is read through fsspec, is one slice, since it
can only be read from its start. A malformed record is one bad row. Memory is bounded by a record or
a batch.

Directories such as ``lang=de`` are columns of the files below them (``InputFile.partitions``),
except where a row has a column of that name. Their values are texts, but a run's own files tell the
types that the values had.

    [chunk] = chunks_in(file_slice, ["prompt"], carried={})
    chunk.rows                                                  # [(RowPosition(row=0, line=1), {'prompt': 'Hi'})]

A read task parses slices with the parser that validate uses, and skips rows that are done or that
are in another shard of the job. Blocks are small, so that every actor has work.

    read_requests(plan.reader, plan.slices).schema().names[:2]  # ['request_id', 'row_index']
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.batch.reader.carried_columns import CSV_TEXT, CarriedColumn, carry, column_of
from eagle_ray.batch.reader.csv_files import parse_csv_value, rows_in_csv
from eagle_ray.batch.reader.files import RUN_FORMAT, InputFile, advice_on
from eagle_ray.batch.reader.jsonl_files import CutLine, ZeroBytes, rows_in_batch, rows_in_jsonl
from eagle_ray.batch.reader.parquet import BATCH_ROWS, batches_in_parquet
from eagle_ray.batch.reader.run_rows import batches_in_run, run_schema
from eagle_ray.core.errors import ConfigError, RequestError, one_line
from eagle_ray.requests.columns import RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.parameters import ROW_PARAMETERS
from eagle_ray.requests.request import UNCARRIED, InputRow, Request, parse_row, table_of_requests
from eagle_ray.requests.row_schema import request_schema
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.part_files import open_part
from eagle_ray.runs.partitions import partition_types
from eagle_ray.runs.row_index import digests
from eagle_ray.storage.checked_parquet import is_damage, open_parquet
from eagle_ray.storage.file_kinds import START_BYTES, advice, foreign_kind
from eagle_ray.storage.retries import extended_retries
from eagle_ray.storage.store import StorageError

log = logging.getLogger("eagle_ray")
COLUMNAR = ("parquet", RUN_FORMAT)
RECORD_READERS = {"jsonl": rows_in_jsonl, "csv": rows_in_csv, "openai_batch": rows_in_batch}
CARRY_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError, LookupError)
# Errors that pyarrow raises for a damaged or foreign file.
READ_ERRORS = (
    OSError,
    pa.ArrowException,
    OverflowError,
)

Item = TypeVar("Item")
PlacedRow = tuple[RowPosition, InputRow]
Convert = Callable[[str, pa.DataType, int, int], pa.Array]
BLOCK_ROWS = 16  # small blocks keep every actor busy until the end


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Consecutive rows of one file.

    Blank lines are not rows, but row indices count them.

    Attributes:
        start: row group (Parquet) or byte offset at which it begins.
        first: position of the first row.
    """

    file: InputFile
    start: int
    first: RowPosition
    num_rows: int

    def truncate(self, num_rows: int) -> FileSlice:
        """Return a slice with only the first rows of this one."""
        return dataclasses.replace(self, num_rows=num_rows)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a slice.

    Attributes:
        rows: position and request values of each row.
        carried: carried columns of the rows, by name.
    """

    rows: list[PlacedRow]
    carried: dict[str, pa.Array]


@contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Turn errors of reading a file in this context into a ConfigError that names the file."""
    try:
        yield
    except StorageError:  # the storage is at fault, not the file
        raise
    except READ_ERRORS as error:
        raise _unreadable_error(file, error) from None


def chunks_in(
    file_slice: FileSlice, needed: Iterable[str], carried: Mapping[str, pa.DataType]
) -> Iterator[Chunk]:
    """Yield the rows of a slice in chunks with their carried columns.

    Raises InputChanged if the file has changed since it was scanned, ConfigError if it cannot be
    read now.

    Args:
        needed: columns that requests need, to be read from Parquet; other formats are read whole.
        carried: types of the carried columns, joined over all files.
    """
    file_slice.file.check_unchanged()
    read = _columnar_chunks if file_slice.file.format in COLUMNAR else _record_chunks
    return _detect_changes(file_slice.file, read(file_slice, needed, carried))


def _detect_changes(file: InputFile, items: Iterator[Item]) -> Iterator[Item]:
    """Treat a file that cannot be read now as changed if its size differs."""
    try:
        with file.detect_changes():
            yield from items
    except (ConfigError, OutputDamaged):
        file.check_unchanged()
        raise


def _unreadable_error(file: InputFile, error: Exception) -> ConfigError:
    if file.version.size == 0:
        fix = "delete it"
    else:
        fix = advice_on(file) or "write it again, leave it out of input.path, or set input.format"
    return ConfigError(f"cannot read {file.path} as {file.format} ({one_line(error)}): {fix}")


@contextmanager
def open_columnar(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file in a context.

    Raises ConfigError that names the file if it, or what is read from it in the context, is
    damaged; OutputDamaged if it is another run's part file.
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


def partition_scalars(file: InputFile, types: pa.Schema | None = None) -> dict[str, pa.Scalar]:
    """Return the values of a file's partition columns, from its path.

    Args:
        types: known types; columns that are not there are texts, and null values have no type.
    """
    scalars = {}
    for name, text in file.partitions.items():
        if types is not None and name in types.names:
            scalars[name] = pa.scalar(text, pa.string()).cast(types.field(name).type)
            continue
        value = text
        if text is not None and name in ROW_PARAMETERS:
            value = parse_csv_value(name, text)
        if value is None:
            scalars[name] = pa.scalar(None, pa.null())
        elif isinstance(value, str):
            scalars[name] = pa.scalar(value, CSV_TEXT)
        else:
            scalars[name] = pa.scalar(value)
    return scalars


def with_values(row: InputRow, values: Mapping[str, Any]) -> InputRow:
    """Return the row with the partition columns that it does not have itself."""
    return {**values, **row} if values and isinstance(row, dict) else row


def _record_chunks(
    file_slice: FileSlice, needed: Iterable[str], carried: Mapping[str, pa.DataType]
) -> Iterator[Chunk]:
    values = {name: scalar.as_py() for name, scalar in partition_scalars(file_slice.file).items()}
    records = records_in(file_slice.file, file_slice.start, file_slice.first)
    rows = (
        (position, with_values(row, values))
        for _, position, row in islice(records, file_slice.num_rows)
    )
    while some := list(islice(rows, BATCH_ROWS)):
        yield _chunk(some, carried, partial(_record_column, some))


def _record_column(
    rows: list[PlacedRow], name: str, type_: pa.DataType, start: int, stop: int
) -> pa.Array:
    return column_of(
        [row.get(name) if isinstance(row, dict) else None for _, row in rows[start:stop]], type_
    )


def _chunk(rows: list[PlacedRow], carried: Mapping[str, pa.DataType], convert: Convert) -> Chunk:
    """Return the rows with their carried columns.

    A row with a value that does not fit its type gets an error and a null, and keeps its id.

    Args:
        convert: returns a column of some of the rows, or raises an error of CARRY_ERRORS.
    """
    columns: dict[str, pa.Array] = {}
    errors: dict[int, RequestError] = {}
    for name, type_ in carried.items():
        try:
            columns[name] = convert(name, type_, 0, len(rows))
        except CARRY_ERRORS:
            # Row by row, to find those that do not fit.
            null = column_of([None], type_)
            values = []
            for i in range(len(rows)):
                part = _value_or_error(convert, name, type_, i)
                if isinstance(part, RequestError):
                    errors[i] = part
                    values.append(null)
                else:
                    values.append(part)
            columns[name] = pa.concat_arrays(values)
    for i, error in errors.items():
        position, row = rows[i]
        rows[i] = position, row | {UNCARRIED: error} if isinstance(row, dict) else row
    return Chunk(rows, columns)


def _value_or_error(
    convert: Convert, name: str, type_: pa.DataType, row: int
) -> pa.Array | RequestError:
    try:
        return convert(name, type_, row, row + 1)
    except CARRY_ERRORS as error:
        fix = "cast it, for example to a string, or leave it out with input.passthrough"
        message = f"column {name!r} cannot be carried through as {type_} ({one_line(error)}): {fix}"
        return RequestError("bad_type", message)


def records_in(
    file: InputFile, start: int, start_position: RowPosition
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of each record from byte `start` on, whose position is start_position.

    An incomplete last line is left out, since another process may be writing it.
    """
    with file.open() as stream:
        if start == 0:
            _check_kind(stream.read(START_BYTES), file)
        for offset, position, row in RECORD_READERS[file.format](
            stream, file.path, start, start_position
        ):
            if isinstance(row, ZeroBytes):
                log.warning(
                    "%s, line %s: %s. %s.",
                    file.path,
                    position.line,
                    row,
                    _cut_command(file, offset),
                )
                return
            if isinstance(row, CutLine):
                log.warning(
                    "%s, line %s: the last line is not whole. It is read once it is.",
                    file.path,
                    position.line,
                )
                return
            yield offset, position, row


def _cut_command(file: InputFile, num_bytes: int) -> str:
    """Return a shell command that truncates a file to its last complete line."""
    if not file.storage_path.is_local or file.is_compressed:
        return "The line is left out. Write the file again"
    return f"The line is left out. Cut it off: truncate -s {num_bytes} {shlex.quote(file.path)}"


def _check_kind(first_bytes: bytes, file: InputFile) -> None:
    """Raise ConfigError if a file is something else than its format, all of whose lines would be bad rows."""
    if (kind := foreign_kind(first_bytes, file.format)) is not None:
        raise ConfigError(
            f"cannot read {file.path} as {file.format}: {advice(kind, file.storage_path)}"
        )


def partitions_in(parquet: pq.ParquetFile, file: InputFile) -> dict[str, pa.Scalar]:
    """Return the partition columns of a file's path that the Parquet file itself does not contain."""
    schema = parquet.schema_arrow
    scalars = partition_scalars(file, partition_types(schema))
    return {name: scalar for name, scalar in scalars.items() if name not in schema.names}


def columns_in(parquet: pq.ParquetFile, file: InputFile) -> pa.Schema:
    return run_schema(parquet, file.path) if file.format == RUN_FORMAT else parquet.schema_arrow


def columnar_batches(
    parquet: pq.ParquetFile,
    file: InputFile,
    needed: Iterable[str],
    groups: list[int],
    carried: Iterable[str] = (),
) -> Iterator[tuple[list[InputRow], pa.RecordBatch]]:
    """Yield batches of some row groups: the columns of requests as Python rows, the carried ones as Arrow columns."""
    if file.format == RUN_FORMAT:
        return batches_in_run(parquet, file.path, needed, groups, carried)
    return batches_in_parquet(parquet, file, needed, groups, carried)


def _columnar_chunks(
    file_slice: FileSlice, needed: Iterable[str], carried: Mapping[str, pa.DataType]
) -> Iterator[Chunk]:
    file = file_slice.file
    index = file_slice.first.row
    left = file_slice.num_rows
    with reading(file), open_columnar(file) as parquet:
        partitions = {name: scalar.as_py() for name, scalar in partitions_in(parquet, file).items()}
        read = {name: partitions[name] for name in needed if name in partitions}
        for rows, batch in columnar_batches(parquet, file, needed, [file_slice.start], carried):
            placed = []
            for i, row in enumerate(rows[:left]):
                placed.append((RowPosition(index + i, None), with_values(row, read)))
            yield _chunk(placed, carried, partial(_columnar_column, batch, partitions))
            index += len(placed)
            left -= len(placed)
            if left == 0:
                return


def _columnar_column(
    batch: pa.RecordBatch,
    partitions: Mapping[str, Any],
    name: str,
    type_: pa.DataType,
    start: int,
    stop: int,
) -> pa.Array:
    if name in batch.schema.names:
        return carry(batch.column(name)[start:stop], type_)
    return column_of([partitions.get(name)] * (stop - start), type_)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads slices of the input as requests. Pickled into every read task.

    Attributes:
        columns: columns that requests are made of.
        carried_columns: carried columns, in the order of the output.
        job_shard: the part of the rows that this process runs; None for all.
        is_private: whether errors must not quote values of rows.
    """

    files: tuple[InputFile, ...]
    columns: RequestColumns
    carried_columns: tuple[CarriedColumn, ...]
    job_shard: JobShard | None = None
    is_private: bool = False

    def rows(self, file_slice: FileSlice) -> Iterator[tuple[InputRow, RowLocation]]:
        """Yield the rows of a slice, not yet parsed, with their locations."""
        for chunk in chunks_in(file_slice, self.columns.needed, self._source_types):
            yield from (
                (row, file_slice.file.location_of(position)) for position, row in chunk.rows
            )

    def tables(self, file_slice: FileSlice) -> Iterator[pa.Table]:
        """Yield the requests of a slice in small tables, with their carried columns."""
        for chunk in chunks_in(file_slice, self.columns.needed, self._source_types):
            requests = []
            for position, row in chunk.rows:
                location = file_slice.file.location_of(position)
                requests.append(self.parse(row, location))
            table = table_of_requests(requests)
            for column in self.carried_columns:
                table = table.append_column(column.name, chunk.carried[column.source])
            yield table

    def parse(self, row: InputRow, location: RowLocation) -> Request:
        """Return the request of a row."""
        return parse_row(row, self.columns, location, self.is_private)

    @property
    def carried_fields(self) -> list[pa.Field]:
        """Return the carried columns as fields of the output's schema."""
        return [column.field for column in self.carried_columns]

    @property
    def _source_types(self) -> dict[str, pa.DataType]:
        return {column.source: column.type for column in self.carried_columns}

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Read described slices in a read task. Their bits `done` mark the rows to leave out."""
        for row in batch.to_pylist():
            first = RowPosition(row["row"], row["line"])
            file_slice = FileSlice(self.files[row["file"]], row["start"], first, row["num_rows"])
            left = np.ones(file_slice.num_rows, bool)
            if row["done"] is not None:
                left = ~np.unpackbits(
                    np.frombuffer(row["done"], np.uint8), count=file_slice.num_rows
                ).astype(bool)
            start = 0
            with extended_retries():
                for table in self.tables(file_slice):
                    wanted = left[start : start + len(table)]
                    start += len(table)
                    # Rows of other shards are left out, whatever the bits say.
                    if self.job_shard is not None:
                        wanted = wanted & self.job_shard.holds(
                            digests(table["request_id"].to_pylist())
                        )
                    yield table.filter(pa.array(wanted))


def read_requests(
    reader: RequestReader,
    slices: Iterable[FileSlice],
    done: np.ndarray | None = None,
    rows_per_block: int = BLOCK_ROWS,
) -> Any:
    """Return a Dataset of requests in blocks of about rows_per_block rows, in file order if execution preserves order.

    Args:
        done: for each row of the slices, in order, whether to leave it out. A slice whose rows are
            all done is not read.
    """
    import ray.data  # seconds to import: the plan needs none of it

    numbers = {file: i for i, file in enumerate(reader.files)}
    described = []
    place = 0
    for file_slice in slices:
        flags = None if done is None else done[place : place + file_slice.num_rows]
        place += file_slice.num_rows
        if flags is None or not flags.all():
            skipped = None if flags is None or not flags.any() else np.packbits(flags).tobytes()
            facts = {
                "file": numbers[file_slice.file],
                "start": file_slice.start,
                "num_rows": file_slice.num_rows,
            }
            described.append(facts | file_slice.first._asdict() | {"done": skipped})
    if not described:
        return ray.data.from_arrow(request_schema(reader.carried_fields).empty_table())
    read = ray.data.from_items(described).map_batches(
        reader, batch_size=1, batch_format="pyarrow", udf_modifying_row_count=True
    )
    return read.repartition(target_num_rows_per_block=rows_per_block)
