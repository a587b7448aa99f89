"""AtomicParquetSink: write Ray Data's blocks as Parquet files that are complete or absent.

A write task makes one file in each partition directory of its rows, named after the attempt and the
task's number. A repeated task finds the files that its first try published and keeps them.

Blocks hold nested rows: all rows of an id are one row of one column. Otherwise Ray could split a
table of some hundred megabytes between the rows of one id and write them to different files, so
that the id would never count as done. Nesting copies nothing.

    >>> rows = pa.table({"request_id": ["a", "a", "b"], "sample_index": [0, 1, 0]})
    >>> [[row["sample_index"] for row in nested] for nested in nest(rows)["rows"].to_pylist()]
    [[0, 1], [0]]

    dataset.write_datasink(AtomicParquetSink(run, schema, ids_per_file=1000, compression="zstd"))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from ray.actor import ActorHandle
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink

from eagle_ray.runs.part_files import part_name
from eagle_ray.runs.partitions import Partitions
from eagle_ray.runs.run import Run
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.retries import extended_retries

NESTED = "rows"  # the one column
NO_PARTITIONS = Partitions()


def nest(rows: pa.Table) -> pa.Table:
    """Return one nested row per id.

    Args:
        rows: output rows; rows of one id are adjacent.
    """
    ids = rows["request_id"].to_pylist()
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    offsets = pa.array([*starts, len(ids)], pa.int32())
    return pa.table(
        {NESTED: pa.ListArray.from_arrays(offsets, rows.to_struct_array().combine_chunks())}
    )


def unnest(bundles: pa.Table) -> pa.Table:
    """Return the rows of nested rows, without schema metadata."""
    return pa.Table.from_struct_array(pc.list_flatten(bundles[NESTED]))


class WriteTask(Protocol):
    """Ray Data's description of the task that writes."""

    task_idx: int


@dataclass(frozen=True)
class AtomicParquetSink(Datasink[None]):
    """Writes nested rows as Parquet files that appear complete or not at all.

    Attributes:
        schema: columns of the files, which may be fewer than the rows have.
        ids_per_file: number of finished ids after which a file is written; the last file may have
            fewer.
        progress: the ProgressActor, which gets the rows of each file.
    """

    run: Run
    schema: pa.Schema
    ids_per_file: int
    compression: str
    partitions: Partitions = NO_PARTITIONS
    progress: ActorHandle | None = None

    def write(self, blocks: Iterable[Block], ctx: WriteTask) -> None:
        """Write the blocks, in a Ray task. Raises FencedError if a newer attempt owns the output,
        StorageUnavailable if it is full.

        A permanent error of the operating system becomes a ConfigError.
        """
        with extended_retries():
            self._write(blocks, ctx)

    def _write(self, blocks: Iterable[Block], ctx: WriteTask) -> None:
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        nonempty = [
            unnest(table).select(self.schema.names).cast(self.schema)
            for table in tables
            if table.num_rows
        ]
        table = pa.concat_tables([self.schema.empty_table(), *nonempty])
        if table.num_rows:
            for directory, rows in self.partitions.split(table):
                file = part_name(self.run.attempt, ctx.task_idx)
                name = f"{directory}/{file}" if directory else file
                self.run.append(name, parquet_bytes(rows, self.compression))
                if self.progress is not None:
                    self.progress.add_file.remote(name, len(rows))

    @property
    def min_rows_per_write(self) -> int:
        return self.ids_per_file

    def get_name(self) -> str:
        return "parquet"
