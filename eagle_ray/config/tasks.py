"""Check that a configuration fits its `task`: keys of generated text are refused for embeddings, and the reverse.

for_task(load_config(None, sets=["task=embed", "sampling.top_k=4", ...]))
# ConfigError: sampling.top_k: it is for generated text, and task is embed. Leave it out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from eagle_ray.config.engine_section import engine_faults
from eagle_ray.config.job import JobConfig
from eagle_ray.config.serve import ServeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.parameters import faults_of_scored

Config = TypeVar("Config", JobConfig, ServeConfig)
# Keys, or their beginnings, that nothing reads in the other task.
OF_TEXT = (
    "sampling.",
    "speculative.",
    "chat.",
    "model.draft",
    "model.chat_template",
    "model.tool_parser",
    "model.reasoning_parser",
    "report.baseline_rows",
    "report.verify_rows",
)
EMBEDDING_KEYS = ("embedding.",)
# Keys, or their beginnings, that only our own engine reads.
OWN_ENGINE_KEYS = ("model.", "speculative.", "report.baseline_rows", "report.verify_rows")
NO_DRAFT = ("speculative.method", "none")  # the task sets it itself


def for_task(config: Config, given: Mapping[str, Any]) -> Config:
    """Check the keys of `task`. Return the configuration, without drafts for embeddings. Raises
    ConfigError for another task's keys.

    Args:
        given: values of the dotted keys that a source sets; null and a key's default have no
            effect.
    """
    is_text = config.task == "generate"
    others, what = (EMBEDDING_KEYS, "embeddings") if is_text else (OF_TEXT, "generated text")
    for key, value in given.items():
        is_default = value == _default_of(type(config), key)
        asks = value is not None and not is_default and (key, value) != NO_DRAFT
        if asks and key.startswith(others):
            raise ConfigError(f"{key}: it is for {what}, and task is {config.task}. Leave it out.")
    if is_text:
        return config
    _check_ranks(config)
    model = config.model.model_copy(update={"draft": None})
    speculative = config.speculative.model_copy(update={"method": "none"})
    return config.model_copy(update={"model": model, "speculative": speculative})


def check_scored(config: JobConfig, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of `sampling` that have no effect because other keys make every row a scored one.

    Args:
        given: values of the dotted keys that a source sets, as for for_task.
    """
    section = "sampling."
    params = SamplingSettings(**dict(config.sampling))
    keys = [key for key, value in given.items() if key.startswith(section) and value is not None]
    names = {key.split(".")[1] for key in keys}
    own = {name: getattr(config.sampling, name) for name in names}
    faults = [f"{section}{line}" for line in faults_of_scored(params, own)]
    if faults:
        raise ConfigError("\n".join(faults))


def for_engine(config: JobConfig, given: Mapping[str, Any]) -> JobConfig:
    """Return the configuration for another engine: with the model name that its rows show, and without drafts.

    Raises ConfigError for keys that do not go with engine.kind.

    Args:
        given: values of the dotted keys that a source sets, as for for_task.
    """
    engine = config.engine
    wanted = {
        key
        for key, value in given.items()
        if value is not None and value != _default_of(JobConfig, key)
    }
    faults = engine_faults(engine, wanted)
    if not engine.is_own:
        if config.execution.is_elastic:
            late = config.execution.on_late
            faults.append(
                f"execution.on_late: {late} is for engine.kind own. Set it to warn or stop"
            )
        if config.task != "generate":
            faults.append(f"task: must be generate with engine.kind {engine.kind}")
        faults += [
            f"{key}: only our own engine reads it, and engine.kind is {engine.kind}. Leave it out"
            for key in given
            if key in wanted and key.startswith(OWN_ENGINE_KEYS) and (key, given[key]) != NO_DRAFT
        ]
    if faults:
        raise ConfigError("\n".join(faults))
    if engine.is_own:
        return config
    assert engine.model is not None, "engine_faults names it"
    model = config.model.model_copy(update={"target": engine.model, "draft": None})
    speculative = config.speculative.model_copy(update={"method": "none"})
    return config.model_copy(update={"model": model, "speculative": speculative})


def _default_of(root: type[BaseModel], key: str) -> Any:
    """Return the default of a dotted key; None of a key that has none."""
    section, _, rest = key.partition(".")
    field = root.model_fields.get(section)
    if field is None:
        return None
    if not rest:
        return None if field.is_required() else field.get_default(call_default_factory=True)
    model = field.annotation
    if isinstance(model, type) and issubclass(model, BaseModel):
        return _default_of(model, rest)
    return None


def _check_ranks(config: JobConfig | ServeConfig) -> None:
    name = "execution" if isinstance(config, JobConfig) else "serving"
    ranks = getattr(config, name).tensor_parallel
    if ranks not in ("auto", 1):
        raise ConfigError(
            f"{name}.tensor_parallel: {ranks}, and embeddings are computed in one process. Set it to auto: the "
            "target's layers are placed on several GPUs in turn."
        )
