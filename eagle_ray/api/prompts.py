"""Turn the prompts of a call into requests, as a job's reader makes them of input rows.

    >>> [request.prompt for request in prompt_requests(["Once", {"prompt": "Twice", "temperature": 0.5}])]
    ['Once', 'Twice']

A prompt that cannot be read becomes a request with an error, like a bad row of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import pyarrow as pa

from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.parquet import arrow_rows
from eagle_ray.config import ColumnsConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.parameters import match_unsupported, python_hint
from eagle_ray.requests.refused import has_effect
from eagle_ray.requests.request import Request, parse_row, with_checked_texts
from eagle_ray.requests.values import plain_value


class ArrowTable(Protocol):
    """A table with Arrow's stream protocol: pyarrow's, pandas' from 2.2 on, polars'."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with prompt, messages or prompt_token_ids, sampling values and an id."""
Prompts = Prompt | Iterable[Prompt] | ArrowTable
"""One prompt, several, an Arrow table, or a data frame (pandas, polars) with the columns of a job's input."""
SOURCE = "prompts"  # in place of a file, in messages
MULTIMODAL = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_prompt", "decoder_prompt")


def prompt_requests(prompts: Prompts) -> list[Request]:
    """Return one request per prompt, whose id is None if the prompt has no id.

    Raises ConfigError if the value holds no prompts, or keys without effect.
    """
    columns = request_columns(ColumnsConfig())
    return [_request(row, i, columns) for i, row in enumerate(_input_rows(prompts))]


def _input_rows(prompts: Prompts) -> list[Mapping[str, Any]]:
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [_input_row(plain_value(prompts))]
    if hasattr(prompts, "__arrow_c_stream__") and not hasattr(prompts, "tolist"):  # a table, and no column of one
        return _table_rows(cast(ArrowTable, prompts))
    if not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts: must be a text, a list of prompts or a table, got {type(prompts).__name__}")
    plain = plain_value(prompts if hasattr(prompts, "tolist") else list(prompts))
    items = plain if isinstance(plain, list) else [plain]
    if items and all(type(item) is int for item in items):
        return [_input_row(items)]
    return [_input_row(item) for item in items]


def _table_rows(table: ArrowTable) -> list[Mapping[str, Any]]:
    try:
        return list(arrow_rows(pa.table(table)))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"prompts: the table cannot be read as an Arrow table: {error}") from error


def _input_row(prompt: Any) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):  # their items are no token ids
        return {"prompt_token_ids": list(prompt)}
    raise ConfigError(
        f"prompts: a prompt is a text, a list of token ids or a dict with prompt, messages or prompt_token_ids, got "
        f"{type(prompt).__name__}"
    )


def _request(row: Mapping[str, Any], number: int, columns: RequestColumns) -> Request:
    check_keys(row)
    location = RowLocation(SOURCE, SOURCE, RowPosition(number, None))
    request = parse_row(with_checked_texts(row), columns, location)
    is_numbered = request.id == location.id != row.get("id")  # by the reader, for a prompt without an id
    return replace(request, id=None) if is_numbered else request


def check_keys(row: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that ask for what prompts cannot set, as a job refuses such columns."""
    for name, value in row.items():
        parameter = name if name in MULTIMODAL else match_unsupported(name)
        if parameter is not None and has_effect(parameter, value):
            fix = python_hint(name) or "Leave it out."
            raise ConfigError(f"prompts: {name!r} is not supported and would change the output. {fix}")
