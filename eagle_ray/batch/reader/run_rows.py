"""Rows of another run as input: ``input.path: run:runs/first`` reads the part files of that run.

A finished row becomes an input row with the columns CONTEXT and the run's carried columns. The
first run's sampling parameters and measurements are not read, so they do not become parameters of
the new row. For sample 0 the id is the one in the first run. Further samples get ``#1``, ``#2``
..., and later turns of a conversation ``@1`` before that: ``q7@1#2``. request_id and sample_index
are carried as input_request_id and input_sample_index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.batch.reader.files import RUN_PREFIX
from eagle_ray.batch.reader.parquet import BATCH_ROWS, arrow_rows
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.request import InputRow
from eagle_ray.requests.row_schema import OUTPUT_FIELDS, RENDERED, SCHEMA_VERSION, VERSION_KEY
from eagle_ray.requests.values import json_error
from eagle_ray.runs.partitions import partition_types, with_partition_columns
from eagle_ray.text.strict_json import parse_json

RUN_ID = "__id__"  # the column with the ids that are made here; not carried
CONTEXT = (
    "request_id",
    "sample_index",
    "turn_index",
    "prompt",
    "messages",
    "text",
    "finish_reason",
)
_READ = (*CONTEXT, "status", "error_code", "error_message")


def run_schema(parquet: pq.ParquetFile, path: str) -> pa.Schema:
    """Return the columns of a run's part file that are read as input. Raises ConfigError for a file
    that no run wrote."""
    stored = parquet.schema_arrow
    if (stored.metadata or {}).get(VERSION_KEY) != SCHEMA_VERSION:
        raise ConfigError(
            f"input.path: {path} was not written by a run of this version: name it without {RUN_PREFIX}"
        )
    own = {field.name for field in OUTPUT_FIELDS}
    context = [stored.field(name) for name in CONTEXT if name in stored.names]
    carried = [field for field in stored if field.name not in own]
    partitions = [field for field in partition_types(stored) if field.name not in own]
    return pa.schema([*context, *carried, *partitions])


def batches_in_run(
    parquet: pq.ParquetFile,
    path: str,
    needed: Iterable[str],
    groups: list[int],
    carried: Iterable[str] = (),
) -> Iterator[tuple[list[InputRow], pa.RecordBatch]]:
    """Yield batches of a run's part file: needed columns as Python rows, carried ones as Arrow
    columns. An error row is a bad row."""
    schema = run_schema(parquet, path)
    partitions = partition_types(parquet.schema_arrow)
    carried_names = [name for name in dict.fromkeys(carried) if name in schema.names]
    wanted = [name for name in dict.fromkeys(needed) if name in schema.names]

    # Partition columns are in the path and not in the file.
    read = dict.fromkeys([*_READ, *wanted, *carried_names])
    stored = [name for name in read if name in parquet.schema_arrow.names]
    for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=stored):
        table = with_partition_columns(pa.Table.from_batches([batch]), partitions, path)
        rows = [_input_row(row, wanted) for row in arrow_rows(table)]
        columns = pa.record_batch({})
        if carried_names:
            columns = table.select(carried_names).combine_chunks().to_batches()[0]
        yield rows, columns


def _input_row(row: dict[str, Any], wanted: Iterable[str]) -> InputRow:
    input_row: dict[str, Any] = {RUN_ID: _id_of(row)} | {name: row[name] for name in wanted}
    if row["status"] != "ok":
        input_row["text"] = RequestError(
            "earlier_run_failed", f"it is an error row of the first run: {_error_of(row)}"
        )
    if row.get("messages") is not None:
        input_row[RENDERED] = True
    if isinstance(input_row.get("messages"), str):
        input_row["messages"] = _messages_of(input_row["messages"])
    return input_row


def _messages_of(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        return json_error("column 'messages'", error)


def _id_of(row: dict[str, Any]) -> str:
    turn = row.get("turn_index")
    sample = row["sample_index"]
    return f"{row['request_id']}{f'@{turn}' if turn else ''}{f'#{sample}' if sample else ''}"


def _error_of(row: dict[str, Any]) -> str:
    return f"{row['error_code']}: {row['error_message']}"
