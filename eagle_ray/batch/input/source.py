"""The source: the planned input as a Ray Dataset of requests.

Each read task parses shards with the parser that validate uses, and skips rows that are done
or that are in another shard of the job. Blocks are small, so
that every actor has work.

    >>> read_requests(plan_input(config)).schema().names[:2]      # doctest: +SKIP
    ['request_id', 'row_index']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import ray
import ray.data

from eagle_ray.batch.id_digests import EMPTY, Digests, digests, isin
from eagle_ray.batch.input.plan import InputPlan, plan_input, requests_of, shard_tables
from eagle_ray.batch.input.row_location import RowPosition
from eagle_ray.batch.input.shards import Shard
from eagle_ray.batch.output.schema import request_schema
from eagle_ray.storage.retry_budget import extended_retries

__all__ = ["InputPlan", "plan_input", "read_requests", "requests_of"]

BLOCK_ROWS = 16  # small blocks keep every actor busy until the end


def read_requests(plan: InputPlan, skip: Digests = EMPTY, rows_per_block: int = BLOCK_ROWS) -> ray.data.Dataset:
    """Return requests in file order (if execution preserves order), in blocks of about rows_per_block rows.

    skip: sorted ids to leave out; they are stored once for all read tasks.
    """
    if not plan.shards:
        return ray.data.from_arrow(request_schema(plan.passthrough).empty_table())
    numbers = {file: i for i, file in enumerate(plan.files)}
    shards = [
        {"file": numbers[s.file], "start": s.start, "num_rows": s.num_rows, **s.first._asdict()} for s in plan.shards
    ]
    reader = ShardReader(plan.for_readers, ray.put(skip))
    read = ray.data.from_items(shards).map_batches(
        reader, batch_size=1, batch_format="pyarrow", udf_modifying_row_count=True
    )
    return read.repartition(target_num_rows_per_block=rows_per_block)


@dataclass(frozen=True, slots=True)
class ShardReader:
    """A read task: shard descriptions in, tables of requests out. skip: a reference to the digests."""

    plan: InputPlan
    skip: ray.ObjectRef

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        skip = ray.get(self.skip)
        for row in batch.to_pylist():
            shard = Shard(
                self.plan.files[row["file"]], row["start"], RowPosition(row["row"], row["line"]), row["num_rows"]
            )
            with extended_retries():
                for table in shard_tables(self.plan, shard):
                    ids = digests(table["request_id"].to_pylist())
                    wanted = ~isin(ids, skip)
                    if self.plan.job_shard is not None:
                        wanted &= self.plan.job_shard.holds(ids)
                    yield table.filter(pa.array(wanted))
