"""RequestSampling: the sampling parameters of a call from Python, exported as ``eagle_ray.SamplingParams``.

    >>> SamplingParams(temperature=0.8, stop="\\n", n=2).n
    2
    >>> SamplingParams(frequency=1)
    Traceback (most recent call last):
        ...
    eagle_ray.core.errors.ConfigError: SamplingParams.frequency: unknown parameter. Did you mean frequency_penalty?

Its fields are the keys of `sampling` in a job's configuration, so a key that is added there is a parameter here.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from eagle_ray.config.job import MAX_TOP_LOGPROBS, PositiveInt, RowSampling, SamplingConfig, allowed_text
from eagle_ray.core.errors import ConfigError

NO_LIMIT = 2**31 - 1  # tokens; the engine cuts max_tokens to what the model's length leaves
PANDAS_NULLS = ("NAType", "NaTType")  # names of types: pandas is not imported here
Count = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class RequestSampling(RowSampling):
    """Sampling parameters of one prompt. Raises ConfigError that names an unknown or wrong parameter.

    The names are vLLM's; the defaults are a job's, so decoding is greedy unless a temperature is given. ``top_k=-1`` is
    off, as ``top_k=0`` is, and ``stop`` may be one string. None is a parameter's default. Numbers may be NumPy's or
    torch's, and lists may be tuples, sets or arrays.

    Attributes:
        max_tokens: None is as many as the model's length leaves.
        seed: None derives one from the seed of the LLM, the request's id and the sample's index.
        logprobs: None or False for none, True or 0 for those of the output tokens, k for the k likeliest tokens too.
        prompt_logprobs: the same for the prompt's tokens.
    """

    own_nulls: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    # mypy forbids fields that are wider than those of the base class; pydantic checks them again.
    max_tokens: PositiveInt | None = Field(default=256, description="an integer, 1 or more, or None")  # type: ignore[assignment]
    logprobs: bool | Count | None = Field(default=None, description="True, False, None or an integer, 0 or more")  # type: ignore[assignment]
    prompt_logprobs: bool | Count | None = Field(  # type: ignore[assignment]
        default=None, description="True, False, None or an integer, 0 or more"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[RequestSampling]) -> RequestSampling:
        data = plain_value(data)
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError("\n".join(_lines(error, data))) from None

    def __repr_name__(self) -> str:
        return "SamplingParams"

    def as_config(self) -> SamplingConfig:
        """Return the keys of `sampling` with these values."""
        values = {name: getattr(self, name) for name in SamplingConfig.model_fields}
        values["max_tokens"] = self.max_tokens or NO_LIMIT
        values["logprobs"] = self.wants_logprobs or self.wants_prompt_logprobs  # the engine records both or none
        values["top_logprobs"] = max(self.num_top_logprobs, self.num_top_prompt_logprobs)
        values["prompt_logprobs"] = self.wants_prompt_logprobs
        return SamplingConfig(**values)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and self.prompt_logprobs is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def num_top_logprobs(self) -> int:
        """Return how many of the likeliest tokens are recorded at each output token."""
        return max(self.top_logprobs, 0 if self.logprobs is True else int(self.logprobs or 0))

    @property
    def num_top_prompt_logprobs(self) -> int:
        return 0 if self.prompt_logprobs is True else int(self.prompt_logprobs or 0)


SamplingParams = RequestSampling


def plain_value(value: Any) -> Any:
    """Return numbers and arrays of NumPy and torch, tuples and sets as Python's numbers and lists, at any depth.

    What pandas has for a missing value, which compares with nothing, is None.
    """
    if type(value).__name__ in PANDAS_NULLS:
        return None
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_plain_key(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        is_plain = set(map(type, value)) <= {int, float, str}
        return list(value) if is_plain else [plain_value(inner) for inner in value]
    return value


def _plain_key(key: Any) -> Any:
    """Return a key's plain value; a tuple or a set as it is, since a list is no key."""
    return key if isinstance(key, tuple | frozenset) else plain_value(key)


def _lines(error: ValidationError, given: dict[str, Any]) -> list[str]:
    """Return one line for each wrong parameter; a value that fails several validators has one."""
    lines: dict[str, str] = {}
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        field = RequestSampling.model_fields.get(name)
        if field is None:
            line = f"SamplingParams.{name}: unknown parameter. {_hint(name)}"
        else:
            details = [other for other in error.errors() if other["loc"][:1] == detail["loc"][:1]]
            allowed = allowed_text(field.description or "", details)
            line = f"SamplingParams.{name}: must be {allowed}, got {reprlib.repr(given[name])}"
        lines.setdefault(name, line)
    return list(lines.values())


def _hint(name: str) -> str:
    names = list(RequestSampling.model_fields)
    near = difflib.get_close_matches(name, names, 1)
    return f"Did you mean {near[0]}?" if near else f"Parameters: {', '.join(names)}"
