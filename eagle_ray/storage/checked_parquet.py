"""Parquet files: opened so that no thread of Arrow's ever holds a Python object, and compared with their checksums.

Arrow reads a Python file object on threads of its own. If such a thread still holds the object when the interpreter
ends, it asks for a lock that is gone, and the process aborts after its work is done: "terminate called without an
active exception", exit code 134. So Arrow opens local files itself, and objects in S3 are read on the calling thread.

Arrow's errors name no file, and those of damaged pages are OSErrors like those of a storage that is away. `is_damage`
tells the two apart.

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
from eagle_ray.storage.path import FOOTER_END_BYTES, FOOTER_MARK, StorageError, StoragePath

CHECKSUM_BYTES = len(FOOTER_MARK) + 4
TAIL_BYTES = 64 << 10  # read at once, like Arrow's first read of a file


@contextmanager
def open_parquet(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Its footer and pages are compared with their checksums, if they have any.

    Raises FileNotFoundError and other OSErrors, and what is_damage recognizes.
    """
    if file.is_local:
        with open(file.text, "rb") as opened:
            _check_footer(opened)
        with pq.ParquetFile(file.text, page_checksum_verification=True) as parquet:
            yield parquet
    else:
        options = {"pre_buffer": False, "page_checksum_verification": True}
        with file.open() as opened:
            _check_footer(opened)
            with SingleThreadedParquetFile(opened, **options) as parquet:
                yield parquet


def _check_footer(opened: BinaryIO) -> None:
    """Raise ArrowInvalid if the footer is not the one that `parquet_bytes` wrote."""
    num_bytes = opened.seek(0, io.SEEK_END)
    opened.seek(max(0, num_bytes - TAIL_BYTES))
    tail = opened.read()
    size = FOOTER_END_BYTES + int.from_bytes(tail[-FOOTER_END_BYTES:-4], "little")
    if len(tail) < size + CHECKSUM_BYTES and size + CHECKSUM_BYTES <= num_bytes:
        opened.seek(num_bytes - size - CHECKSUM_BYTES)
        tail = opened.read()
    opened.seek(0)
    mark, footer = tail[-size - CHECKSUM_BYTES : -size], tail[-size:]
    if mark.startswith(FOOTER_MARK) and mark[len(FOOTER_MARK) :] != zlib.crc32(footer).to_bytes(4, "little"):
        raise pa.ArrowInvalid("its footer is not the one that was written")


def is_damage(error: Exception) -> bool:
    """Return whether a read failed because of the file's bytes, and not because of its storage.

    Arrow's own OSErrors have no errno.
    """
    if isinstance(error, OSError):
        return error.errno is None and not isinstance(error, StorageError)
    return isinstance(error, (pa.ArrowException, UnicodeError, OverflowError))


def damage_text(file: object, error: Exception) -> str:
    """Return what is wrong with a part file of a run, and what to do."""
    return f"{file} is damaged ({one_line(error)}): delete it, and the command of its run makes its rows again"


class SingleThreadedParquetFile(pq.ParquetFile):
    """A Parquet file over a Python file object, which only the calling thread reads."""

    def read(self, columns: list[str] | None = None) -> pa.Table:
        return super().read(columns=columns, use_threads=False)

    def iter_batches(self, **options: Any) -> Iterator[pa.RecordBatch]:
        return super().iter_batches(use_threads=False, **options)
