"""AtomicParquetSink: where Ray Data's blocks become Parquet files, each whole or not at all.

A write task makes one file, named after its attempt and its place in it, so that a task that Ray repeats replaces its
own file and nobody else's. Does not know what the rows mean.

    >>> dataset.write_datasink(AtomicParquetSink(run, schema, rows_per_file=1000, compression="zstd"))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink

from eagle_ray.data.atomic import write_parquet
from eagle_ray.data.record import Run


@dataclass(frozen=True)
class AtomicParquetSink(Datasink[None]):
    """rows_per_file: a file is written as soon as at least this many rows are done, or nothing more will come."""

    run: Run
    schema: pa.Schema
    rows_per_file: int
    compression: str

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> None:
        """Called in a Ray task. Raises Overtaken where a newer attempt owns the output."""
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        filled = [table.cast(self.schema) for table in tables if table.num_rows]
        table = pa.concat_tables([self.schema.empty_table(), *filled])
        if table.num_rows:
            name = f"part-{self.run.attempt:03d}-{ctx.task_idx:06d}.parquet"
            write_parquet(self.run.data / name, table, self.compression, self.run.check_current)

    @property
    def min_rows_per_write(self) -> int:
        return self.rows_per_file

    def get_name(self) -> str:
        return "parquet"
