"""Names of an output's part files, and functions that read their columns.

A file is named after the attempt and the task that made it. Functions read one file at a time into
memory, and errors name a damaged file:

    for table in read_tables(run.data, ["request_id", "text"]):
        print(table["text"][0])

Files may be in partition directories, named after the values of chosen columns (`partitions.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.requests.row_schema import (
    ADDED_COLUMNS,
    OUTPUT_FIELDS,
    missing_columns,
    output_schema,
)
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.partitions import partition_types, with_partition_columns
from eagle_ray.storage.checked_parquet import damage_text, is_damage, open_parquet, parquet_bytes
from eagle_ray.storage.path import StoragePath

PART = re.compile(r"part-(\d{3,})-\d{6,}\.parquet")


def part_name(attempt: int, task: int) -> str:
    return f"part-{attempt:03d}-{task:06d}.parquet"


def attempt_of(file: StoragePath) -> int | None:
    """Return the number of the attempt that made a file, or None if the file's name is not a part file's."""
    match = PART.fullmatch(file.name)
    return int(match.group(1)) if match else None


def part_files(data: StoragePath) -> list[StoragePath]:
    """Return every Parquet file below a directory, in the order in which they were made."""
    return sorted(
        data.glob("**/*.parquet"), key=lambda file: (attempt_of(file) or 0, file.name, file)
    )


@contextmanager
def open_part(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a part file in a context. Raises OutputDamaged, naming it, if it or what is read from it is damaged."""
    try:
        with open_parquet(file) as parquet:
            yield parquet
    except Exception as error:
        if not is_damage(error):
            raise
        raise OutputDamaged(damage_text(file, error)) from error


def check_part(file: StoragePath) -> None:
    """Read all of a part file, a row group at a time. Raises as open_part does."""
    with open_part(file) as parquet:
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group, use_threads=file.is_local).validate(full=True)


def read_columns(parquet: pq.ParquetFile, columns: list[str] | None = None) -> pa.Table:
    """Read these columns, or all, and check that texts are UTF-8. Raises ArrowInvalid if one is missing or invalid."""
    table = parquet.read(columns=columns)
    if missing := [name for name in columns or () if name not in table.column_names]:
        raise pa.ArrowInvalid(f"no column {', '.join(missing)}")
    table.validate(full=True)
    return table


def read_tables(data: StoragePath, columns: list[str]) -> Iterator[pa.Table]:
    """Yield these columns of every file, read by read_part."""
    for file in part_files(data):
        yield read_part(file, columns)


def read_part(file: StoragePath, columns: list[str]) -> pa.Table:
    """Return these columns of a part file, partition columns included. ADDED_COLUMNS that the file lacks are null.

    Raises OutputDamaged.
    """
    added = {
        field.name: field.type
        for field in OUTPUT_FIELDS
        if field.name in ADDED_COLUMNS and field.name in columns
    }
    with open_part(file) as parquet:
        partition_schema = partition_types(parquet.schema_arrow)
        stored = [name for name in columns if name not in partition_schema.names]
        part = read_columns(
            parquet, [n for n in stored if n in parquet.schema_arrow.names or n not in added]
        )
        wanted = pa.schema(
            [partition_schema.field(name) for name in columns if name in partition_schema.names]
        )
    whole = with_partition_columns(part, wanted, file.text)
    for name, type_ in added.items():
        if name not in whole.schema.names:
            whole = whole.append_column(name, pa.nulls(len(whole), type_))
    return whole.select(columns)


def stored_schema(data: StoragePath) -> pa.Schema:
    """Return the columns of a run's files, partition columns last."""
    return schema_of(part_files(data))


def schema_of(files: Sequence[StoragePath]) -> pa.Schema:
    """Return the columns of these part files, partition columns last. Without files there are no columns."""
    for file in files[:1]:
        with open_part(file) as parquet:
            schema = parquet.schema_arrow
            partition_schema = partition_types(schema)
        return pa.schema(
            [
                *(field for field in schema if field.name not in partition_schema.names),
                *partition_schema,
            ]
        )
    return pa.schema([])


def next_schema(data: StoragePath, carried: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema for the run's next file: all columns that its files have so far."""
    return schema_after(stored_schema(data), carried)


def schema_after(stored: pa.Schema, carried: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of the next file of a run whose files have the columns `stored`."""
    schema = output_schema(carried)
    absent = missing_columns(stored)
    return pa.schema([field for field in schema if field.name not in absent], schema.metadata)


def as_stored(schema: pa.Schema) -> pa.Schema:
    """Return the schema as it is read back from Parquet, which names list items differently and has coarser times."""
    return pq.read_schema(pa.BufferReader(parquet_bytes(schema.empty_table(), "none")))


def has_column(data: StoragePath, name: str) -> bool:
    return name in stored_schema(data).names
