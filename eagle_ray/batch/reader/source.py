"""The source: the planned input as a Ray Dataset of requests.

Each read task parses slices with the parser that validate uses, and skips rows that are done or that are in another
shard of the job. Blocks are small, so that every actor has work.

    read_requests(plan_input(config)).schema().names[:2]      # ['request_id', 'row_index']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import ray
import ray.data

from eagle_ray.batch.driver.input_plan import InputPlan, slice_tables
from eagle_ray.batch.reader.file_slices import FileSlice
from eagle_ray.requests.columns import RowPosition
from eagle_ray.requests.row_schema import request_schema
from eagle_ray.runs.row_index import digests
from eagle_ray.storage.retry_budget import extended_retries

BLOCK_ROWS = 16  # small blocks keep every actor busy until the end


def read_requests(
    plan: InputPlan, done: np.ndarray | None = None, rows_per_block: int = BLOCK_ROWS
) -> ray.data.Dataset:
    """Return requests in file order (if execution preserves order), in blocks of about rows_per_block rows.

    done: for each row of the plan, in order, whether to leave it out. A slice whose rows are all done is not read.
    """
    numbers = {file: i for i, file in enumerate(plan.files)}
    slices = []
    place = 0
    for file_slice in plan.slices:
        flags = None if done is None else done[place : place + file_slice.num_rows]
        place += file_slice.num_rows
        if flags is None or not flags.all():
            skipped = None if flags is None or not flags.any() else np.packbits(flags).tobytes()
            described = {"file": numbers[file_slice.file], "start": file_slice.start, "num_rows": file_slice.num_rows}
            slices.append(described | file_slice.first._asdict() | {"done": skipped})
    if not slices:
        return ray.data.from_arrow(request_schema(plan.passthrough).empty_table())
    read = ray.data.from_items(slices).map_batches(
        SliceReader(plan.for_readers), batch_size=1, batch_format="pyarrow", udf_modifying_row_count=True
    )
    return read.repartition(target_num_rows_per_block=rows_per_block)


@dataclass(frozen=True, slots=True)
class SliceReader:
    """A read task: slice descriptions in, tables of requests out. Their bits `done` mark the rows to leave out."""

    plan: InputPlan

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for row in batch.to_pylist():
            first = RowPosition(row["row"], row["line"])
            file_slice = FileSlice(self.plan.files[row["file"]], row["start"], first, row["num_rows"])
            left = np.ones(file_slice.num_rows, bool)
            if row["done"] is not None:
                left = ~np.unpackbits(np.frombuffer(row["done"], np.uint8), count=file_slice.num_rows).astype(bool)
            start = 0
            with extended_retries():
                for table in slice_tables(self.plan, file_slice):
                    wanted = left[start : start + len(table)]
                    start += len(table)
                    if self.plan.job_shard is not None:  # whatever the bits say, no row of another shard
                        wanted = wanted & self.plan.job_shard.holds(digests(table["request_id"].to_pylist()))
                    yield table.filter(pa.array(wanted))
