"""Convert Python arguments: an LLM's keywords and prompts, and a job's file, dictionary or JobConfig.

    >>> engine_config("embedded:tiny", "embedded:tiny", {"slots": 4}).execution.slots
    4
    >>> job_config({"input": {"path": "a.jsonl"}, "output": {"path": "runs/a"}}).output.path
    'runs/a'
    >>> [request.prompt for request in prompt_requests(["Once", {"prompt": "Twice", "temperature": 0.5}])]
    ['Once', 'Twice']

Prompts become requests by the code that reads a job's input rows. A prompt that cannot be read
becomes a request with an error, like a bad row of a job.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import pyarrow as pa
from typing_extensions import TypedDict

from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.parquet import arrow_rows
from eagle_ray.config import (
    ColumnsConfig,
    ExecutionConfig,
    JobConfig,
    ModelConfig,
    SamplingConfig,
    SpeculativeConfig,
    load_config,
)
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.columns import PROMPT_NAME, RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.parameters import match_unsupported, python_hint
from eagle_ray.requests.refused import has_effect
from eagle_ray.requests.request import Request, parse_row, with_checked_texts
from eagle_ray.requests.values import plain_value

ORIGIN = "Python"
# Required keys that a call in this process ignores.
UNUSED_PATHS = {
    "input.path": "prompts",
    "output.path": "outputs",
}
EMBEDDED_TINY = "embedded:tiny"
ConfigLike = JobConfig | str | os.PathLike | Mapping[str, Any] | None
"""A configuration, a YAML file, a dictionary of sections or dotted keys, or None for the defaults."""


class EngineSettings(TypedDict, total=False):
    """Keyword arguments of an LLM: task, keys of `model`, of `speculative`, and capacities of `execution`."""

    task: Literal["generate", "embed"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["none", "fp8"]
    device: Literal["auto", "cpu", "cuda"]
    max_model_len: int | None
    chat_template: str
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"]
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"]
    method: str
    sources: list[str] | None
    max_depth: int
    top_k: int
    max_nodes: int
    budget: Literal["global", "uniform"]
    ranking: Literal["published", "calibrated", "coupled"]
    datastore: str | None
    draft_vocab: str | None
    draft_vocab_size: int | None
    stats: Literal["summary", "detailed"]
    slots: Literal["auto"] | int
    kv_tokens: Literal["auto"] | int | None
    kv_dtype: Literal["auto", "fp8"]
    tensor_parallel: Literal["auto"] | int
    prefill_tokens: Literal["auto"] | int
    require_kernels: bool


_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "speculative": SpeculativeConfig,
    "execution": ExecutionConfig,
}
ENGINE_KEYS = {
    name: f"{section}.{name}"
    for section, model in _SECTIONS.items()
    for name in model.model_fields
    if name in EngineSettings.__annotations__
} | {"task": "task"}


def engine_config(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    seed: int = 0,
) -> JobConfig:
    """Return the configuration of an engine in this process. Its input and output are not used.

    Without a draft only lookups draft; an embedded pair has its own draft, and auto is replaced by
    the best head. Raises ConfigError that names an unknown or wrong argument.
    """
    for name in settings:
        if name not in ENGINE_KEYS:
            near = difflib.get_close_matches(name, ENGINE_KEYS, 1)
            hint = (
                f"Did you mean {near[0]}?"
                if near
                else f"Arguments: draft, seed, {', '.join(sorted(ENGINE_KEYS))}"
            )
            raise ConfigError(f"LLM: unknown argument {name!r}. {hint}")
    target, draft = (_name_of(model) for model in (target, draft))
    overrides = {ENGINE_KEYS[name]: plain_value(value) for name, value in settings.items()}
    overrides |= {"model.target": target, "seed": plain_value(seed)}
    if draft is not None:
        overrides["model.draft"] = draft
    config = load_config(None, env={}, overrides=UNUSED_PATHS | overrides, origin=ORIGIN)
    from eagle_ray.assembly.draft_choice import with_chosen_draft  # torch

    return with_chosen_draft(config)


def sampling_config(params: SamplingSettings) -> SamplingConfig:
    """Return these parameters as a job's `sampling` section, without the seed."""
    values = {name: getattr(params, name) for name in SamplingConfig.model_fields}
    values |= {
        "max_tokens": params.token_limit,
        "logprobs": params.wants_logprobs or params.wants_prompt_logprobs,  # a job has both or none
        "top_logprobs": max(params.num_top_logprobs, params.num_top_prompt_logprobs),
        "prompt_logprobs": params.wants_prompt_logprobs,
    }
    return SamplingConfig.model_construct(**values)


def _name_of(model: Any) -> Any:
    """Return a model's path as text, and any other value unchanged."""
    if isinstance(model, list | tuple):
        return [_name_of(one) for one in model]
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def job_config(config: ConfigLike, defaults: Mapping[str, Any] | None = None) -> JobConfig:
    """Return the configuration of a job. Raises ConfigError.

    Args:
        defaults: values of dotted keys that replace the configuration's, such as the paths of a
            Dataset's job.
    """
    if isinstance(config, JobConfig):
        return config
    overrides = dict(config) if isinstance(config, Mapping) else {}
    path = None if config is None or isinstance(config, Mapping) else config
    return load_config(
        path, env=os.environ, overrides=overrides | dict(defaults or {}), origin=ORIGIN
    )


class ArrowTable(Protocol):
    """Protocol of a table with Arrow's stream interface: pyarrow's, pandas' from 2.2 on, polars'."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with prompt, messages or prompt_token_ids, sampling values and an id."""
Prompts = Prompt | Iterable[Prompt] | ArrowTable
"""One prompt, several, an Arrow table, or a data frame (pandas, polars) with the columns of a job's input."""
SOURCE = "prompts"  # stands for a file in messages
MULTIMODAL = (
    "multi_modal_data",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
)


def prompt_requests(prompts: Prompts) -> list[Request]:
    """Return one request per prompt, whose id is None if the prompt has no id.

    Raises ConfigError if the value holds no prompts, or keys without effect.
    """
    columns = request_columns(ColumnsConfig())
    return [_request(row, i, columns) for i, row in enumerate(_input_rows(prompts))]


def _input_rows(prompts: Prompts) -> list[Mapping[str, Any]]:
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [_input_row(plain_value(prompts))]
    # The value is a table, and no column of one.
    if hasattr(prompts, "__arrow_c_stream__") and not hasattr(prompts, "tolist"):
        return _table_rows(cast(ArrowTable, prompts))
    if not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts: must be a text, a list of prompts or a table, got {type(prompts).__name__}"
        )
    plain = plain_value(prompts if hasattr(prompts, "tolist") else list(prompts))
    items = plain if isinstance(plain, list) else [plain]
    if items and all(type(item) is int for item in items):
        return [_input_row(items)]
    return [_input_row(item) for item in items]


def _table_rows(table: ArrowTable) -> list[Mapping[str, Any]]:
    try:
        return list(arrow_rows(pa.table(table)))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"prompts: the table cannot be read as an Arrow table: {error}"
        ) from error


def _input_row(prompt: Any) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    # Their items are no token ids.
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return {"prompt_token_ids": list(prompt)}
    raise ConfigError(
        f"prompts: a prompt is a text, a list of token ids or a dict with prompt, messages or prompt_token_ids, got "
        f"{type(prompt).__name__}"
    )


def _request(row: Mapping[str, Any], number: int, columns: RequestColumns) -> Request:
    check_keys(row)
    location = RowLocation(SOURCE, SOURCE, RowPosition(number, None))
    request = parse_row(with_checked_texts(row), columns, location)
    # The reader numbers prompts without an id.
    is_numbered = request.id == location.id != row.get("id")
    if is_numbered:
        request = replace(request, id=None)
    if row.get(PROMPT_NAME) is None:
        return request
    return replace(request, carried={PROMPT_NAME: row[PROMPT_NAME]})


def check_keys(row: Mapping[str, Any]) -> None:
    """Raise ConfigError if a prompt has keys that prompts cannot set. A job refuses such columns, too."""
    for name, value in row.items():
        parameter = name if name in MULTIMODAL else match_unsupported(name)
        if parameter is not None and has_effect(parameter, value):
            fix = python_hint(name) or "Leave it out."
            raise ConfigError(
                f"prompts: {name!r} is not supported and would change the output. {fix}"
            )
