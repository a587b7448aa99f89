"""The part files of an output: their columns read back, a file in memory at a time.

Does not know what the rows mean or who asks.

    >>> for table in tables(run.data, ["request_id", "text"]):
    ...     print(table["text"][0])
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def tables(data: Path, columns: list[str]) -> Iterator[pa.Table]:
    """These columns of every file, one file after the other."""
    for file in sorted(data.glob("*.parquet")):
        yield pq.read_table(file, columns=columns, partitioning=None)


def has_column(data: Path, name: str) -> bool:
    """Whether the files have this column; every file of a run has the same."""
    first = next(data.glob("*.parquet"), None)
    return first is not None and name in pq.read_schema(first).names
