"""Turn a Ray Dataset of prompts into a Ray Dataset of completions, lazily.

    answered = generate_dataset(ray.data.read_parquet("prompts/"), config)
    answered.take(1)[0]["text"]                                                 # 'Paris.'

Nothing is stored on the way, so an execution that fails starts again from its inputs;
``run_dataset_job`` has a job's output, progress and resume. The columns of the input travel with
each request as one opaque value, which keeps their types. Columns that a user's function adds
travel as one opaque value, too: a block's column has one Arrow type, so a row's value could be
converted because of the values of other rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from ray import cloudpickle

from eagle_ray.assembly.worker_plan import usual_slots
from eagle_ray.batch.driver.cluster import plan_workers
from eagle_ray.batch.driver.execute import map_engine
from eagle_ray.batch.reader.carried_columns import output_names
from eagle_ray.batch.reader.input_columns import request_columns, settings_line, template_of
from eagle_ray.batch.reader.parquet import ERROR_KEY, arrow_rows
from eagle_ray.batch.worker.actor import EngineActor
from eagle_ray.batch.worker.progress import start_progress
from eagle_ray.batch.worker.sink import unnest
from eagle_ray.config import InputConfig, JobConfig, config_hash, flatten_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.columns import RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.parameters import SamplingParams, match_unsupported
from eagle_ray.requests.refused import has_effect
from eagle_ray.requests.request import Request, parse_row, with_checked_texts
from eagle_ray.requests.row_schema import OUTPUT_FIELDS, ROW_FIELDS, request_schema, table_of
from eagle_ray.requests.values import describe_value, plain_value
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
INPUT_ROW = pa.field("_input_row", pa.binary())  # an Arrow stream of one row: the input's columns
# Column of pickled dictionaries: what a function added to each row.
ADDED_VALUES = pa.field("_added_values", pa.binary())
# A column of dictionaries, as Ray Data's own LLM processors take it.
SAMPLING_PARAMS = "sampling_params"
ERROR_COLUMN = "max_tokens"  # holds the error of a row whose sampling_params are none; any column that is read does
# Place of every row: a row of a Dataset has none of its own.
DATASET_LOCATION = RowLocation("dataset", "dataset", RowPosition(0, None))
# Output columns that have a meaning in a job's files alone.
WITHOUT_MEANING = (
    "row_index",
    "source_file",
    "run_id",
    "attempt",
    "config_hash",
)
ADDED = tuple(field.name for field in OUTPUT_FIELDS if field.name not in WITHOUT_MEANING)
RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
# Input columns that the output's replace.
READ = frozenset(field.name for field in ROW_FIELDS) | {"prompt"}
# Keys that are required and not read.
PATHS = {
    "input": {"path": "dataset"},
    "output": {"path": "dataset"},
}
# Keys, or their beginnings, of a job's input files, its output and what it does at its end.
JOB_ONLY_KEYS = (
    "engine.kind",
    "input.format",
    "input.allow_unfinished",
    "execution.ray_address",
    "execution.rows_per_file",
    "execution.max_error_rate",
    "execution.price_per_hour",
    "execution.on_late",
    "execution.workers",
    "execution.finish_by",
    "execution.max_dollars",
    "execution.restarts.",
    "execution.shard",
    "output.partition_by",
    "output.compression",
    "output.if_exists",
    "report.",
    "on_finish.",
    "logging.progress_every_s",
)


class DatasetActor(EngineActor):
    """An EngineActor without a driver that watches it: a failed start fails the execution."""

    def _cannot_start(self, error: Exception, fault: object) -> NoReturn:
        raise error from None


def generate_dataset(dataset: ray.data.Dataset, config: JobConfig) -> ray.data.Dataset:
    """Return the input's columns and the output columns ADDED, one row per sample.

    Rows have the columns of a job's input: prompt, messages or prompt_token_ids as input.columns
    names them, an id, and sampling parameters, also as a dictionary sampling_params. A row without
    an id gets one from its content, so that seeds depend on neither order nor blocks. A row that
    cannot be answered has status error. An input column with the name of an output column gets the
    prefix ``input_``. Raises ConfigError if the models cannot be used, ClusterError if the cluster
    lacks the GPUs.
    """
    from eagle_ray.assembly.draft_choice import with_checked_models  # torch

    _check_keys(config)
    config = with_checked_models(config)
    execution = config.execution
    limit = config.input.limit
    if limit is not None:
        dataset = dataset.limit(limit)
    if execution.preserve_order:
        # Every Dataset made from it has this context, too.
        dataset.context.execution_options.preserve_order = True
    log.setLevel(config.logging.level.upper())
    columns = dataset.columns(fetch_if_missing=False)  # None where a function makes them
    if columns is not None:
        name_settings(tuple(columns))
    workers = plan_workers(config)
    batch_size = max(1, usual_slots(execution.slots, workers.num_gpus > 0) // 2)
    run = Run(StoragePath.of("dataset"), "dataset", 1, config_hash(config))
    actor_args = (config, run, [INPUT_ROW], workers, start_progress(workers.min_workers))
    requests = dataset.map_batches(
        RequestMaker(
            request_columns(config.input.columns, template_of(config.input)),
            config.input,
            names_settings=columns is None,
            is_private=not config.output.store_prompt,
        ),
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
    )
    nested = map_engine(requests, batch_size, workers, actor_args, DatasetActor)
    return nested.map_batches(
        OutputMaker(config.input.passthrough),
        batch_format="pyarrow",
        batch_size=None,
        udf_modifying_row_count=True,
    )


def _check_keys(config: JobConfig) -> None:
    """Raise ConfigError if the configuration has keys that only work for a job, because they need a stored output."""
    usual = flatten_config(JobConfig.model_validate(PATHS).model_dump(mode="json"))
    given = flatten_config(config.model_dump(mode="json"))
    wrong = [
        key
        for key in given
        if key.startswith(JOB_ONLY_KEYS) and given[key] and given[key] != usual.get(key)
    ]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: of no meaning to eagle_ray.generate without output_path, which stores nothing. Leave "
            "them out, or give output_path."
        )


@cache
def name_settings(columns: tuple[str, ...]) -> None:
    """Log once per process which columns set parameters of their rows."""
    if (line := settings_line(READ.intersection(columns) - {"prompt"})) is not None:
        log.warning("%s", line)


def add_columns(dataset: ray.data.Dataset, function: RowFunction) -> ray.data.Dataset:
    """Return the Dataset with the columns that the function returns for each row, added or in place of its own."""
    return dataset.map_batches(ColumnAdder(function), batch_format="pyarrow", batch_size=None)


@dataclass(frozen=True, slots=True)
class ColumnAdder:
    """A task that calls a function on each row of a block and keeps what it returns in the column ADDED_VALUES."""

    function: RowFunction

    def __call__(self, batch: pa.Table) -> pa.Table:
        added = [with_checked_texts(self.function(row)) for row in batch.to_pylist()]
        values = pa.array([cloudpickle.dumps(row) for row in added], ADDED_VALUES.type)
        return batch.append_column(ADDED_VALUES, values)


def split_added(batch: pa.Table) -> tuple[pa.Table, list[dict[str, Any]]]:
    """Split a block into its columns without ADDED_VALUES, and the added values of each row as a dictionary."""
    if ADDED_VALUES.name not in batch.column_names:
        return batch, [{}] * len(batch)
    added = [cloudpickle.loads(value) for value in batch[ADDED_VALUES.name].to_pylist()]
    return batch.drop_columns([ADDED_VALUES.name]), added


def with_added_columns(
    table: pa.Table, added: list[dict[str, Any]], but: Container[str]
) -> pa.Table:
    """Return the table with added values as columns; rows without a value keep the one in their own column.

    Args:
        added: names and values added to each row.
        but: names to leave out.
    """
    for name in dict.fromkeys(name for row in added for name in row if name not in but):
        has_column = name in table.column_names
        own = [None] * len(added)
        if has_column and any(name not in row for row in added):
            own = table[name].to_pylist()
        values = [row.get(name, value) for row, value in zip(added, own, strict=True)]
        if has_column:
            table = table.drop_columns([name])
        table = table.append_column(name, any_column(values))
    return table


def any_column(values: list[Any]) -> pa.Array:
    """Return any values as an Arrow column; values that have no common type become JSON texts."""
    values = [None if isinstance(value, RequestError) else value for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeError, TypeError, ValueError, OverflowError):
        return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else value_json(value)


def value_json(value: Any) -> str:
    """Return JSON text for any value. NaN is kept, so that the reader can refuse it by the field's name."""
    return json.dumps(plain_value(value, _opened), default=_json_form)


def _json_form(value: Any) -> Any:
    if isinstance(value, RequestError):
        return {ERROR_KEY: [value.code, str(value)]}
    return list(value) if isinstance(value, bytes) else str(value)


def _opened(value: Any) -> Any:
    """Return a user's object as plain values: a pydantic model becomes its schema, keys become texts."""
    if isinstance(value, SamplingParams):
        return value.given()
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_unset=True)
    return (
        {str(name): item for name, item in value.items()} if isinstance(value, Mapping) else value
    )


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """A Ray Data function that turns blocks of input rows into request rows.

    Attributes:
        columns: columns that hold a row's prompt and id.
        settings: the `input` section, which says how bad rows and unknown parameters are treated.
        names_settings: whether to log which columns are read as request parameters.
        is_private: whether errors must not quote values of rows.
    """

    columns: RequestColumns
    settings: InputConfig
    names_settings: bool = False
    is_private: bool = False

    def __call__(self, batch: pa.Table) -> pa.Table:
        inputs, added = split_added(batch)
        if self.names_settings:
            name_settings(tuple(inputs.column_names))
        table = with_added_columns(inputs, added, READ | {SAMPLING_PARAMS})

        rows = []
        for i, own in enumerate(arrow_rows(inputs)):
            values = own | added[i]
            row = {name: plain_value(value, _opened) for name, value in values.items()}
            request = self._request(with_checked_texts(row))

            # Rows of a dataset have no place, so a row without an id gets one of its content.
            if self.columns.id.column_in(row) is None or request.id == DATASET_LOCATION.id:
                request = replace(request, id=content_id(request))
            if request.error is not None and self.settings.on_bad_row == "fail":
                message = str(request.error).removeprefix(f"{DATASET_LOCATION}: ")
                raise ConfigError(f"dataset: {message} (input.on_bad_row is fail)")

            carried = stream_bytes(table.slice(i, 1))
            rows.append(request.to_row() | {INPUT_ROW.name: carried})
        return table_of(rows, request_schema([INPUT_ROW]))

    def _request(self, row: dict[str, Any]) -> Request:
        row = with_sampling_params(row)
        for name, value in row.items() if self.settings.on_unknown != "carry" else ():
            parameter = match_unsupported(name)
            if parameter is None or not has_effect(parameter, value):
                continue
            problem = f"dataset: column {name!r} is a request parameter that rows cannot set"
            if self.settings.on_unknown == "refuse":
                raise ConfigError(
                    f"{problem}. Drop it, or treat it as data (input.on_unknown=carry)."
                )
            log.warning("%s. It is treated as data.", problem)
        return parse_row(row, self.columns, DATASET_LOCATION, self.is_private)


def with_sampling_params(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the entries of its column sampling_params as columns of their own.

    A value that is not an object becomes the row's error.
    """
    params = plain_value(row.get(SAMPLING_PARAMS), _opened)
    rest = {name: value for name, value in row.items() if name != SAMPLING_PARAMS}
    if params is None:
        return rest
    if isinstance(params, RequestError):
        return rest | {ERROR_COLUMN: params}
    if not isinstance(params, Mapping):
        wrong = f"column {SAMPLING_PARAMS!r} must be an object of sampling values, got {describe_value(params)}"
        return rest | {ERROR_COLUMN: RequestError("bad_type", wrong)}
    return rest | {name: value for name, value in params.items() if value is not None}


def content_id(request: Request) -> str:
    """Return an id made from a hash of the request, so equal requests have equal ids and equal samples."""
    values = {
        name: value
        for name, value in request.to_row().items()
        if name != "request_id" and value is not None
    }
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=8).hexdigest()


def stream_bytes(table: pa.Table) -> bytes:
    """Return the table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True, slots=True)
class OutputMaker:
    """A Ray Data function that turns blocks of nested output rows into rows of the result.

    Attributes:
        carried: value of input.passthrough, which says which input columns the result has.
    """

    carried: str | list[str]

    def __call__(self, nested: pa.Table) -> pa.Table:
        return with_input_columns(nested, self.carried)


def with_input_columns(nested: pa.Table, carried: str | list[str] = "all") -> pa.Table:
    """Return the rows of a block with the columns of their input rows in front of the output columns.

    Args:
        carried: "all", "none" or a list of names, as in input.passthrough.
    """
    rows = unnest(nested)
    streams = [
        pa.ipc.open_stream(value.as_buffer()).read_all()
        for value in rows[INPUT_ROW.name].combine_chunks()
    ]
    outputs = rows.select(ADDED)
    messages = pc.replace_substring(
        outputs["error_message"], f"{DATASET_LOCATION}: ", "", max_replacements=1
    )
    outputs = outputs.set_column(
        outputs.column_names.index("error_message"), "error_message", messages
    )
    if not streams:
        return outputs
    inputs = _concatenated(streams)
    listed = (
        {"all": inputs.column_names, "none": []}[carried] if isinstance(carried, str) else carried
    )
    carried_names = [
        name
        for name in inputs.column_names
        if name in listed and name not in READ and name != SAMPLING_PARAMS
    ]
    names = output_names(carried_names, ADDED)
    inputs = inputs.select(list(names)).rename_columns(list(names.values()))
    for field, column in zip(outputs.schema, outputs.columns, strict=True):
        inputs = inputs.append_column(field, column)
    return inputs.combine_chunks()


def _concatenated(tables: list[pa.Table]) -> pa.Table:
    """Return tables as one. Columns whose types have no common type become texts and JSON texts."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        names = dict.fromkeys(name for table in tables for name in table.column_names)
        return pa.table({name: _joined(name, tables) for name in names})


def _joined(name: str, tables: list[pa.Table]) -> pa.ChunkedArray | pa.Array:
    parts = [
        table[name] if name in table.column_names else pa.nulls(len(table)) for table in tables
    ]
    try:
        return pa.concat_tables(
            [pa.table([part], [name]) for part in parts], promote_options="permissive"
        )[name]
    except pa.ArrowException:
        return any_column([value for part in parts for value in part.to_pylist()])
