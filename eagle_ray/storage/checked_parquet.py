"""Open Parquet files so that no Arrow thread holds a Python object, and verify their checksums.

Arrow reads a Python file object on threads of its own. If such a thread still holds the object when
the interpreter ends, it asks for a lock that is gone, and the process aborts after its work is
done: "terminate called without an active exception", exit code 134. So Arrow opens local files
itself, and objects in S3 are read on the calling thread.

Arrow's errors name no file, and those of damaged pages are OSErrors like those of a storage that is
away. `is_damage` tells the two apart.

    with open_parquet(StoragePath.of("runs/a/data/part-001-000000.parquet")) as parquet:
        parquet.read(columns=["request_id"])
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.core.errors import one_line
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import StorageError

FOOTER_MARK = b"footer checksum:"  # bytes of a Parquet file before the CRC-32 of its footer
MAGIC_BYTES = 4  # Parquet's magic number, which begins the file
FOOTER_END_BYTES = 8  # the footer's size and Parquet's magic number, which end the file
CHECKSUM_BYTES = len(FOOTER_MARK) + 4
TAIL_BYTES = 64 << 10  # read at once, like Arrow's first read of a file


def parquet_bytes(table: pa.Table, compression: str) -> bytes:
    """Return a table as a whole Parquet file in memory. Each page has a checksum.

    Parquet defines no checksum for the footer, so it is written before the footer, behind
    FOOTER_MARK, where readers ignore it.
    """
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression=compression, write_page_checksum=True)
    data = buffer.getvalue().to_pybytes()
    start = len(data) - FOOTER_END_BYTES - int.from_bytes(data[-FOOTER_END_BYTES:-4], "little")
    return (
        data[:start] + FOOTER_MARK + zlib.crc32(data[start:]).to_bytes(4, "little") + data[start:]
    )


@contextmanager
def open_parquet(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Its footer and pages are compared with their checksums, if they have any.

    Raises FileNotFoundError and other OSErrors, and what is_damage recognizes.
    """
    if file.is_local:
        with open(file.text, "rb") as opened:
            num_bytes = _check_footer(opened)
        with pq.ParquetFile(file.text, page_checksum_verification=True) as parquet:
            _check_length(parquet.metadata, num_bytes)
            yield parquet
    else:
        options = {"pre_buffer": False, "page_checksum_verification": True}
        with file.open() as opened:
            num_bytes = _check_footer(opened)
            with SingleThreadedParquetFile(opened, **options) as parquet:
                _check_length(parquet.metadata, num_bytes)
                yield parquet


def _check_footer(opened: BinaryIO) -> int | None:
    """Return how many bytes stand before the footer that `parquet_bytes` wrote, or None for a file of another program.

    Raises ArrowInvalid if the footer is not the one that was written.
    """
    num_bytes = opened.seek(0, io.SEEK_END)
    opened.seek(max(0, num_bytes - TAIL_BYTES))
    tail = opened.read()

    # The last bytes have the footer's size. A large footer is read again, whole.
    size = FOOTER_END_BYTES + int.from_bytes(tail[-FOOTER_END_BYTES:-4], "little")
    size_with_mark = size + CHECKSUM_BYTES
    if len(tail) < size_with_mark <= num_bytes:
        opened.seek(num_bytes - size_with_mark)
        tail = opened.read()
    opened.seek(0)

    mark = tail[-size_with_mark:-size]
    footer = tail[-size:]
    if not mark.startswith(FOOTER_MARK):
        return None
    checksum = zlib.crc32(footer).to_bytes(4, "little")
    if mark[len(FOOTER_MARK) :] != checksum:
        raise pa.ArrowInvalid("its footer is not the one that was written")
    return num_bytes - size_with_mark


def _check_length(metadata: pq.FileMetaData, num_bytes: int | None) -> None:
    """Raise ArrowInvalid if the pages that the footer names do not fill the bytes before it.

    A file that stands twice in one, for instance, has a whole footer, and pages whose checksums are
    right.
    """
    if num_bytes is None:
        return
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    ends = [
        _start_of(column) + column.total_compressed_size
        for column in columns
        if column.total_compressed_size
    ]
    end = max(ends, default=MAGIC_BYTES)
    if end != num_bytes:
        raise pa.ArrowInvalid(
            f"it has {num_bytes:,} bytes before its footer, and {end:,} were written"
        )


def _start_of(column: pq.ColumnChunkMetaData) -> int:
    """Return the offset of a column's first page."""
    return min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))


def is_damage(error: Exception) -> bool:
    """Return whether a read failed because the file is damaged, and not because of its storage.

    Arrow's own OSErrors have no errno.
    """
    if isinstance(error, OSError):
        return error.errno is None and not isinstance(error, StorageError)
    return isinstance(error, (pa.ArrowException, UnicodeError, OverflowError))


def damage_text(file: object, error: Exception) -> str:
    """Return the error text for a damaged part file, with advice."""
    return (
        f"{file} is damaged ({one_line(error)}): put it back from a copy, or delete it, and the command of its run "
        "makes its rows again"
    )


class SingleThreadedParquetFile(pq.ParquetFile):
    """A Parquet file over a Python file object, which only the calling thread reads."""

    def read(self, columns: list[str] | None = None) -> pa.Table:
        return super().read(columns=columns, use_threads=False)

    def iter_batches(self, **options: Any) -> Iterator[pa.RecordBatch]:
        return super().iter_batches(use_threads=False, **options)
