"""The source: the planned input as a Ray Dataset of requests.

Each read task parses slices with the parser that validate uses, and skips rows that are done or that are in another
shard of the job. Blocks are small, so that every actor has work.

    plan = plan_input(config)
    read_requests(plan.reader, plan.slices).schema().names[:2]      # ['request_id', 'row_index']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray.batch.reader.carried_columns import CarriedColumn
from eagle_ray.batch.reader.file_slices import FileSlice, chunks_in
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.requests.columns import RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.request import table_of_requests
from eagle_ray.requests.row_schema import request_schema
from eagle_ray.requests.rows import InputRow, parse_row
from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.row_index import digests
from eagle_ray.storage.store import extended_retries

BLOCK_ROWS = 16  # small blocks keep every actor busy until the end


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads slices of the input as requests. Pickled into every read task.

    Attributes:
        columns: what requests are made of.
        carried_columns: in order.
        job_shard: the part of the rows that this process runs; None for all.
    """

    files: tuple[InputFile, ...]
    columns: RequestColumns
    carried_columns: tuple[CarriedColumn, ...]
    job_shard: JobShard | None = None

    def rows(self, file_slice: FileSlice) -> Iterator[tuple[InputRow, RowLocation]]:
        """Yield the rows of a slice as they are read, with their places."""
        for chunk in chunks_in(file_slice, self.columns.needed, self._source_types):
            yield from ((row, file_slice.file.location_of(position)) for position, row in chunk.rows)

    def tables(self, file_slice: FileSlice) -> Iterator[pa.Table]:
        """Yield the requests of a slice in small tables, with their carried columns."""
        for chunk in chunks_in(file_slice, self.columns.needed, self._source_types):
            locations = (file_slice.file.location_of(position) for position, _ in chunk.rows)
            rows = (row for _, row in chunk.rows)
            requests = [parse_row(row, self.columns, place) for row, place in zip(rows, locations, strict=True)]
            table = table_of_requests(requests)
            for column in self.carried_columns:
                table = table.append_column(column.name, chunk.carried[column.source])
            yield table

    @property
    def carried_fields(self) -> list[pa.Field]:
        """Return the output columns of the carried columns."""
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
                left = ~np.unpackbits(np.frombuffer(row["done"], np.uint8), count=file_slice.num_rows).astype(bool)
            start = 0
            with extended_retries():
                for table in self.tables(file_slice):
                    wanted = left[start : start + len(table)]
                    start += len(table)
                    if self.job_shard is not None:  # whatever the bits say, no row of another shard
                        wanted = wanted & self.job_shard.holds(digests(table["request_id"].to_pylist()))
                    yield table.filter(pa.array(wanted))


def read_requests(
    reader: RequestReader,
    slices: Iterable[FileSlice],
    done: np.ndarray | None = None,
    rows_per_block: int = BLOCK_ROWS,
) -> Any:
    """Return requests in file order (if execution preserves order), in blocks of about rows_per_block rows.

    done: for each row of the slices, in order, whether to leave it out. A slice whose rows are all done is not read.
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
            facts = {"file": numbers[file_slice.file], "start": file_slice.start, "num_rows": file_slice.num_rows}
            described.append(facts | file_slice.first._asdict() | {"done": skipped})
    if not described:
        return ray.data.from_arrow(request_schema(reader.carried_fields).empty_table())
    read = ray.data.from_items(described).map_batches(
        reader, batch_size=1, batch_format="pyarrow", udf_modifying_row_count=True
    )
    return read.repartition(target_num_rows_per_block=rows_per_block)
