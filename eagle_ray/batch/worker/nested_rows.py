"""Nested rows: all rows of an id as one row of one column, so that they stay together on the way to a file.

Ray splits a table of more than some hundred megabytes anywhere and writes the pieces to different files. An id with
long prompts and many samples could then never be done, since its rows must be in one file. Nothing is copied.

    >>> rows = pa.table({"request_id": ["a", "a", "b"], "sample_index": [0, 1, 0]})
    >>> [[row["sample_index"] for row in nested] for nested in nest(rows)["rows"].to_pylist()]
    [[0, 1], [0]]
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

COLUMN = "rows"


def nest(rows: pa.Table) -> pa.Table:
    """Return one nested row per id. rows: those of each id are adjacent."""
    ids = rows["request_id"].to_pylist()
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    offsets = pa.array([*starts, len(ids)], pa.int32())
    return pa.table({COLUMN: pa.ListArray.from_arrays(offsets, rows.to_struct_array().combine_chunks())})


def unnest(bundles: pa.Table) -> pa.Table:
    """Return the rows, without schema metadata."""
    return pa.Table.from_struct_array(pc.list_flatten(bundles[COLUMN]))
