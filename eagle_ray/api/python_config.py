"""Configurations from Python values: an LLM's keyword arguments, or a job's file, dictionary or JobConfig.

>>> engine_config("embedded:tiny", "embedded:tiny", {"slots": 4}).execution.slots
4
>>> job_config({"input": {"path": "a.jsonl"}, "output": {"path": "runs/a"}}).output.path
'runs/a'
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from eagle_ray.config import ExecutionConfig, JobConfig, ModelConfig, SamplingConfig, SpeculativeConfig, load_config
from eagle_ray.config.job import EMBEDDED_PAIRS
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.requests.values import plain_value

ORIGIN = "Python"
UNUSED_PATHS = {"input.path": "prompts", "output.path": "outputs"}  # required keys that a call in this process ignores
EMBEDDED = "embedded:tiny"
ConfigLike = JobConfig | str | os.PathLike | Mapping[str, Any] | None
"""A configuration, a YAML file, a dictionary of sections or dotted keys, or None for the defaults."""


class EngineSettings(TypedDict, total=False):
    """Keyword arguments of an LLM: keys of `model`, of `speculative`, and capacities of `execution`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: Literal["auto", "cpu", "cuda"]
    max_model_len: int | None
    chat_template: str
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"]
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"]
    method: str
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
    prefill_tokens: Literal["auto"] | int
    require_kernels: bool


_SECTIONS: dict[str, Any] = {"model": ModelConfig, "speculative": SpeculativeConfig, "execution": ExecutionConfig}
ENGINE_KEYS = {
    name: f"{section}.{name}"
    for section, model in _SECTIONS.items()
    for name in model.model_fields
    if name in EngineSettings.__annotations__
}


def engine_config(
    target: str | os.PathLike[str], draft: str | os.PathLike[str] | None, settings: Mapping[str, Any], seed: int = 0
) -> JobConfig:
    """Return the configuration of an engine in this process. Its input and output are not used.

    Without a draft the method is none, plain decoding; an embedded pair has its own. Raises ConfigError that names an
    unknown or wrong argument.
    """
    for name in settings:
        if name not in ENGINE_KEYS:
            near = difflib.get_close_matches(name, ENGINE_KEYS, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Arguments: draft, seed, {', '.join(sorted(ENGINE_KEYS))}"
            raise ConfigError(f"LLM: unknown argument {name!r}. {hint}")
    target, draft = (_name_of(model) for model in (target, draft))
    overrides = {ENGINE_KEYS[name]: plain_value(value) for name, value in settings.items()}
    overrides |= {"model.target": target, "seed": plain_value(seed)}
    if draft is not None:
        overrides["model.draft"] = draft
    elif target not in EMBEDDED_PAIRS:
        overrides.setdefault("speculative.method", "none")
    return load_config(None, env={}, overrides=UNUSED_PATHS | overrides, origin=ORIGIN)


def sampling_config(params: SamplingParams) -> SamplingConfig:
    """Return the key `sampling` of a job with these parameters, but for their seed."""
    values = {name: getattr(params, name) for name in SamplingConfig.model_fields}
    values |= {
        "max_tokens": params.token_limit,
        "logprobs": params.wants_logprobs or params.wants_prompt_logprobs,  # a job has both or none
        "top_logprobs": max(params.num_top_logprobs, params.num_top_prompt_logprobs),
        "prompt_logprobs": params.wants_prompt_logprobs,
    }
    return SamplingConfig.model_construct(**values)


def _name_of(model: Any) -> Any:
    """Return the path of a model as text; any other value unchanged."""
    if isinstance(model, list | tuple):
        return [_name_of(one) for one in model]
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def job_config(config: ConfigLike, defaults: Mapping[str, Any] | None = None) -> JobConfig:
    """Return the configuration of a job. Raises ConfigError.

    defaults: values of dotted keys that replace the configuration's, such as the paths of a Dataset's job.
    """
    if isinstance(config, JobConfig):
        return config
    overrides = dict(config) if isinstance(config, Mapping) else {}
    path = None if config is None or isinstance(config, Mapping) else config
    return load_config(path, env=os.environ, overrides=overrides | dict(defaults or {}), origin=ORIGIN)
