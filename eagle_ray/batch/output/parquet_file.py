"""Parquet files, opened so that no thread of Arrow's ever holds a Python object.

Arrow reads a Python file object on threads of its own. If such a thread still holds the object when the interpreter
ends, it asks for a lock that is gone, and the process aborts after its work is done: "terminate called without an
active exception", exit code 134. So Arrow opens local files itself, and objects in S3 are read on the calling thread.

    >>> with open_parquet(StoragePath.of("runs/a/data/part-001-000000.parquet")) as parquet:      # doctest: +SKIP
    ...     parquet.read(columns=["request_id"])
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.storage.path import StoragePath


@contextmanager
def open_parquet(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises FileNotFoundError and other OSErrors, and ArrowException if it is damaged."""
    if file.is_local:
        with pq.ParquetFile(file.text) as parquet:
            yield parquet
    else:
        with file.open() as opened, SingleThreadedParquetFile(opened, pre_buffer=False) as parquet:
            yield parquet


class SingleThreadedParquetFile(pq.ParquetFile):
    """A Parquet file over a Python file object, which only the calling thread reads."""

    def read(self, columns: list[str] | None = None) -> pa.Table:
        return super().read(columns=columns, use_threads=False)

    def iter_batches(self, **options: Any) -> Iterator[pa.RecordBatch]:
        return super().iter_batches(use_threads=False, **options)
