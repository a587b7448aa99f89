"""Nested rows: all rows of an id as one row of one column, so that nothing on the way to a file can part them.

Ray cuts a table of more than some hundred megabytes wherever it likes, and writes the pieces to different files: of
long prompts with many samples each an id would never be done, since its rows are to stand in one. Nothing is copied.

    >>> bundled(rows)["rows"].to_pylist()
    [[{'request_id': 'a', 'sample_index': 0, ...}, {'request_id': 'a', 'sample_index': 1, ...}]]
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

COLUMN = "rows"


def nest(rows: pa.Table) -> pa.Table:
    """rows: those of each id one after the other."""
    ids = rows["request_id"].to_pylist()
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    offsets = pa.array([*starts, len(ids)], pa.int32())
    return pa.table({COLUMN: pa.ListArray.from_arrays(offsets, rows.to_struct_array().combine_chunks())})


def unnest(bundles: pa.Table) -> pa.Table:
    """The rows again; without metadata."""
    return pa.Table.from_struct_array(pc.list_flatten(bundles[COLUMN]))
