"""Bundles: the rows are the same, and Ray cannot part those of an id."""

from itertools import pairwise

import pyarrow as pa
import pytest
from ray.data._internal.output_buffer import BlockOutputBuffer, OutputBlockSizeOption

from eagle_ray.batch.worker.sink import nest, unnest
from eagle_ray.requests.row_schema import output_schema, table_of

SCHEMA = output_schema([pa.field("category", pa.string())])
COMMON = {
    "row_index": 0,
    "source_file": "a",
    "run_id": "run",
    "attempt": 1,
    "status": "ok",
    "prompt": "long " * 200,
}


def rows_of(*samples: int) -> pa.Table:
    """So many samples of each id."""
    rows = [
        {"request_id": f"r{i}", "sample_index": j} for i, n in enumerate(samples) for j in range(n)
    ]
    return table_of([COMMON | row | {"output_token_ids": [1, 2]} for row in rows], SCHEMA)


def blocks_of(table: pa.Table, most_bytes: int) -> list[pa.Table]:
    """What Ray Data makes of what a worker yields."""
    buffer, blocks = BlockOutputBuffer(OutputBlockSizeOption(target_max_block_size=most_bytes)), []
    buffer.add_batch(table)
    buffer.finalize()
    while buffer.has_next():
        blocks.append(buffer.next())
    return blocks


@pytest.mark.parametrize("samples", [(), (1,), (3, 1, 4), (1,) * 40])
def test_what_was_bundled_is_the_same_again(samples):
    rows = rows_of(*samples)
    assert len(nest(rows)) == len(samples)
    assert unnest(nest(rows)).cast(SCHEMA).equals(rows)


def test_no_cut_parts_the_rows_of_an_id():
    rows = rows_of(*[3] * 20)
    flat = [block["request_id"].to_pylist() for block in blocks_of(rows, 5000)]
    assert any(before[-1] == after[0] for before, after in pairwise(flat)), "Ray no longer cuts"
    found = [unnest(block) for block in blocks_of(nest(rows), 5000)]
    assert len(found) > 1 and all(
        set(map(table_ids(block).count, table_ids(block))) == {3} for block in found
    )
    assert pa.concat_tables(found).cast(SCHEMA).equals(rows)


def table_ids(table: pa.Table) -> list[str]:
    return table["request_id"].to_pylist()
