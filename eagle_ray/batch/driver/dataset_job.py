"""Run a job over a Ray Dataset: write its rows to Parquet files next to the output, and use them as input.

    run_dataset_job(ray.data.read_parquet("prompts/"), config)

A job resumes by the ids and files of its input, so each row needs a fixed file and position. Files
are written in the Dataset's order, and a file that already has this content is left alone: a
repeated call resumes the job, and a call with other rows is refused like a changed input. Prompts
and parameters that came from a function or from `sampling_params` are stored as JSON, since a
column of a file has one type.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from typing import Any

import pyarrow as pa
import ray.data

from eagle_ray.batch.driver.dataset import (
    ERROR_COLUMN,
    SAMPLING_PARAMS,
    split_added,
    value_json,
    with_added_columns,
    with_sampling_params,
)
from eagle_ray.batch.driver.job_plan import join_cluster
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.batch.reader.input_columns import ROW_SETTINGS, request_columns, template_of
from eagle_ray.batch.reader.parquet import JSON_VALUES, arrow_rows
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RequestColumns
from eagle_ray.requests.request import unreadable, with_checked_texts
from eagle_ray.runs.layout import data_of, output_of, wrap_os_errors
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
ROWS_PER_FILE = 10_000
COMPRESSION = "zstd"


def run_dataset_job(dataset: ray.data.Dataset, config: JobConfig) -> ray.data.Dataset:
    """Run the job to its end and return the Dataset of its output files, with a job's columns.

    Raises ConfigError before anything has started, JobError if the job cannot be completed.
    """
    if config.execution.shard:
        raise ConfigError(
            "execution.shard: the rows of a Dataset are one job on one cluster. Leave the key out."
        )
    join_cluster(config)
    output = output_of(config)
    directory = output.parent / f"{output.name}.input"
    with wrap_os_errors(directory):
        write_input_files(
            dataset, directory, request_columns(config.input.columns, template_of(config.input))
        )
    source = config.input.model_copy(update={"path": str(directory), "format": "parquet"})
    complete_job(config.model_copy(update={"input": source}))
    files = [str(file) for file in data_of(output).glob("**/*.parquet")]
    return ray.data.read_parquet(files)


def write_input_files(
    dataset: ray.data.Dataset, directory: StoragePath, columns: RequestColumns
) -> None:
    """Write the rows in order as files of ROWS_PER_FILE rows; files with other content are replaced."""
    dataset.context.execution_options.preserve_order = True
    directory.make_directory()
    names = []
    for number, batch in enumerate(
        dataset.iter_batches(batch_size=ROWS_PER_FILE, batch_format="pyarrow")
    ):
        name = f"rows-{number:06d}.parquet"
        names.append(name)
        data = parquet_bytes(input_table(batch, columns), COMPRESSION)
        file = directory / name
        if not (file.exists() and file.read_bytes() == data):
            file.write_atomic(data)
    for file in directory.glob("rows-*.parquet"):
        if file.name not in names:
            file.remove()
    log.info("%d files of rows in %s", len(names), directory.display_path)


def input_table(batch: pa.Table, columns: RequestColumns) -> pa.Table:
    """Return rows as the table that a job reads as its input.

    Prompts and parameters become JSON if they were added by a function, came from sampling_params
    or have a type of Ray Data, such as arrays and columns of several types. All other columns keep
    their types.
    """
    inputs, added = split_added(batch)
    prompts = [name for path in columns.prompts.values() for name in path.names]
    read = {*ROW_SETTINGS, *prompts, *columns.id.names, SAMPLING_PARAMS}
    table = with_added_columns(inputs, added, read)

    # Values of each row that become JSON.
    encoded = [SAMPLING_PARAMS]
    for field in inputs.schema:
        if isinstance(field.type, pa.BaseExtensionType):
            encoded.append(field.name)
    encoded = [name for name in encoded if name in read]
    values = []
    for own, row in zip(_rows_of(inputs, encoded), added, strict=True):
        checked = with_checked_texts(own)
        values.append(_request_values(checked | row, read))

    # A column with such a value is JSON in every row.
    for name in dict.fromkeys(name for row in values for name in row):
        texts = _json_texts(inputs, name, values)
        field = pa.field(name, pa.string(), metadata=JSON_VALUES)
        table = _without(table, name).append_column(field, texts)
    return _without(table, SAMPLING_PARAMS).combine_chunks()


def _json_texts(inputs: pa.Table, name: str, values: list[dict[str, Any]]) -> pa.Array:
    """Return a column as JSON texts; a row without a value in `values` has that of the input."""
    texts = []
    for row, own in zip(values, _rows_of(inputs, [name]), strict=True):
        value = row.get(name, own.get(name))
        texts.append(value_json(value))
    return pa.array(texts)


def _rows_of(table: pa.Table, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the named columns that the table has, as rows."""
    present = [name for name in names if name in table.column_names]
    return arrow_rows(table.select(present)) if present else [{}] * len(table)


def _without(table: pa.Table, name: str) -> pa.Table:
    return table.drop_columns([name]) if name in table.column_names else table


def _request_values(row: dict[str, Any], read: Container[str]) -> dict[str, Any]:
    """Return the values that a request is made of. An error of another value stands in a column that is read."""
    values = with_sampling_params({name: value for name, value in row.items() if name in read})
    error = unreadable(row)
    return values if error is None else values | {ERROR_COLUMN: error}
