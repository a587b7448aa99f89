"""Shards: small consecutive parts of input files that can be read on their own, and the two formats they are read from.

JSONL is cut at line ends and parsed line by line, so that a malformed line is one bad row; Parquet is cut at row
groups. Memory is bounded by a line or a batch. Does not know what the columns mean.

    >>> [row for _, row in rows_in(shard)]  # doctest: +SKIP
    [{'prompt': 'Hi'}]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.config import ConfigError
from eagle_ray.data.input.carried import join_into, type_in_parquet, type_of
from eagle_ray.data.input.files import InputFile
from eagle_ray.data.input.parquet import check_unique, dicts_in
from eagle_ray.data.input.row import Row
from eagle_ray.data.storage import Location, StorageError
from eagle_ray.errors import RequestError

SHARD_ROWS = 512
UNREADABLE = (OSError, pa.ArrowException, OverflowError)  # pyarrow's own words for a damaged or foreign file

SeeRow = Callable[[int, Row], None]  # told of every row: its index in the file, and what is needed of it


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of one file. start: byte offset (JSONL) or row group (Parquet). first_row: index in the file.

    Blank lines of JSONL are no rows, but are counted by row indices.
    """

    file: InputFile
    start: int
    first_row: int
    num_rows: int

    def cut(self, num_rows: int) -> Shard:
        """Its first rows only."""
        return dataclasses.replace(self, num_rows=num_rows)


@dataclass(frozen=True, slots=True)
class FileScan:
    """What a file holds: its columns with the types to carry them under, in order, and its shards."""

    types: dict[str, pa.DataType]
    shards: tuple[Shard, ...]


def scan(file: InputFile, needed: Iterable[str], see: SeeRow) -> FileScan:
    """Look through one file once, telling see of every row (of Parquet, its needed columns only).

    Raises ConfigError where the file cannot be read at all.
    """
    try:
        return {"jsonl": _scan_jsonl, "parquet": _scan_parquet}[file.format](file, needed, see)
    except StorageError:  # the storage is at fault, not the file
        raise
    except UNREADABLE as error:
        raise _cannot_read(file, error) from None


def rows_in(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[int, Row]]:
    """Each row's index in its file, and the row (of Parquet, its needed columns only).

    Raises OSError where the file has changed since it was scanned, ConfigError where it cannot be read after all.
    """
    shard.file.check_unchanged()
    read = {"jsonl": _jsonl_rows, "parquet": _parquet_rows}[shard.file.format]
    return islice(read(shard, needed), shard.num_rows)


def _cannot_read(file: InputFile, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read {file.path} as {file.format}: {error}")


def _scan_jsonl(file: InputFile, needed: Iterable[str], see: SeeRow) -> FileScan:
    types: dict[str, pa.DataType] = {}
    shards: list[Shard] = []
    for offset, index, line in _lines(file.location, 0, 0):
        if not shards or shards[-1].num_rows == SHARD_ROWS:
            shards.append(Shard(file, offset, index, 0))
        shards[-1] = shards[-1].cut(shards[-1].num_rows + 1)
        row = _parse(line)
        if isinstance(row, dict):
            join_into(types, {name: type_of(value) for name, value in row.items()})
        see(index, row)
    return FileScan(types, tuple(shards))


def _jsonl_rows(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[int, Row]]:
    for _, index, line in _lines(shard.file.location, shard.start, shard.first_row):
        yield index, _parse(line)


def _lines(file: Location, start: int, index: int) -> Iterator[tuple[int, int, bytes]]:
    """Byte offset, line number and bytes of every line that is not blank."""
    with file.open() as stream:
        stream.seek(start)
        for number, line in enumerate(stream, index):
            if line.strip():
                yield start, number, line
            start += len(line)


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except UnicodeError as error:
        return RequestError("bad_encoding", f"the line is not UTF-8 text ({error}): write it as UTF-8")
    except (ValueError, RecursionError) as error:
        return RequestError("bad_json", f"the line is not JSON ({error}): write one object a line")
    if not isinstance(row, dict):
        return RequestError("bad_json", f"the line holds a {type(row).__name__}: write one object a line")
    return row


def _scan_parquet(file: InputFile, needed: Iterable[str], see: SeeRow) -> FileScan:
    with file.location.open() as opened, pq.ParquetFile(opened) as parquet:
        types = {field.name: type_in_parquet(field.type) for field in parquet.schema_arrow}
        check_unique(parquet, file)
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        for index, row in enumerate(dicts_in(parquet, file, needed, list(range(len(sizes))))):
            see(index, row)
    starts = list(accumulate(sizes, initial=0))
    return FileScan(types, tuple(Shard(file, i, starts[i], size) for i, size in enumerate(sizes) if size))


def _parquet_rows(shard: Shard, needed: Iterable[str]) -> Iterator[tuple[int, Row]]:
    try:
        with shard.file.location.open() as opened, pq.ParquetFile(opened) as parquet:
            yield from enumerate(dicts_in(parquet, shard.file, needed, [shard.start]), shard.first_row)
    except StorageError:
        raise
    except UNREADABLE as error:
        raise _cannot_read(shard.file, error) from None
