"""Part files that are read through one function, which names a file that is damaged.

with open_part(StoragePath.of("runs/a/data/part-001-000000.parquet")) as parquet:
    read_columns(parquet, ["request_id"])
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.storage.checked_parquet import damage_text, is_damage, open_parquet
from eagle_ray.storage.path import StoragePath


@contextmanager
def open_part(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a part file. Raises OutputDamaged, naming it, if it or what the body reads of it is damaged."""
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
    """Return these columns, or all, with valid texts. Raises ArrowInvalid if one is missing or invalid."""
    table = parquet.read(columns=columns)
    if missing := [name for name in columns or () if name not in table.column_names]:
        raise pa.ArrowInvalid(f"no column {', '.join(missing)}")
    table.validate(full=True)
    return table
