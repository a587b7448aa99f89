"""The section `engine` of a job: which engine answers its rows, and how it is reached.

    EngineConfig(kind="http", base_url="https://api.example.com/v1", model="org/name")

`engine_faults` names the keys that do not go with `engine.kind`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from eagle_ray.config.section import (
    Name,
    Names,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    priced_by,
)

OWN = "own"
CHILDREN = ("vllm", "sglang", "llama_server")  # kinds whose server a worker starts itself
DIALECTS = ("openai", "compatible", "vllm", "sglang", "llama_server", "eagle_ray")
Dialect = Literal["auto", "openai", "compatible", "vllm", "sglang", "llama_server", "eagle_ray"]
FLAG = re.compile(r"[a-z][a-z0-9-]*")


def _endpoint(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError if it is none, or has a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        raise ValueError("no http or https URL")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a URL with a user, a password or a query, which logs would show")
    return url.rstrip("/")


def _flag(name: str) -> str:
    if not FLAG.fullmatch(name):
        raise ValueError(f"{name!r} is no flag without its dashes")
    return name


Url = Annotated[str, AfterValidator(_endpoint)]
Urls = Annotated[
    Annotated[list[Url], Field(min_length=1)],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class AttemptsConfig(StrictModel):
    """Attempts at one request, counted apart by what went wrong.

    limited: after answers that say that a limit is reached. failed: after a lost connection, a server's
    error or an answer that cannot be read. invalid: after an answer that is not of the form asked for.
    """

    limited: PositiveInt = Field(default=20, description="a number of attempts, 1 or more")
    failed: PositiveInt = Field(default=3, description="a number of attempts, 1 or more")
    invalid: PositiveInt = Field(default=1, description="a number of attempts, 1 or more")


class PriceConfig(StrictModel):
    """Dollars for a million tokens. cached: prompt tokens that the endpoint had; null is the price of input."""

    input: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="dollars for a million prompt tokens, 0 or more"
    )
    cached: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="dollars for a million cached prompt tokens, 0 or more, or null"
    )
    output: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="dollars for a million output tokens, 0 or more"
    )


class EngineConfig(StrictModel):
    """The engine that answers a job's rows. With own, it is this package's, and the other keys are not read.

    kind: http is an endpoint that runs already; vllm, sglang and llama_server are servers that a worker
    starts as its child.
    base_url: one or several; each request goes to the one with the fewest requests in flight.
    tokenizer: what prompts that are scored are tokenized with here. With null, that of model if a worker
        starts the engine's server.
    dialect: which parameters exist, and how they are spelled. auto looks at the endpoint's list of models;
        compatible is OpenAI's protocol with max_tokens, and with nothing of other systems.
    api_key_env, api_key_file: where the key is read; it is in no record, log or error.
    requests_per_minute, tokens_per_minute: over all workers. With null, what the endpoint's answers say.
    gone_after_s: seconds without any connection after which the job stops.
    price: auto is what the package genai-prices knows of the model at base_url when a run starts.
    max_dollars: what all attempts may cost; then the job ends with exit code 8.
    command, serve_args: the program of a server that is a child, and its flags without their dashes.
    """

    kind: Literal["own", "http", "vllm", "sglang", "llama_server"] = Field(
        default="own", description="own, http, vllm, sglang or llama_server"
    )
    base_url: Urls | None = Field(
        default=None,
        description="an http:// or https:// URL that ends before /chat/completions, a list of them, or null",
    )
    model: Name | None = Field(
        default=None, description="the name of a model as the engine takes it, or null with own"
    )
    tokenizer: Name | None = Field(
        default=None,
        description="a directory or a repository with the tokenizer of engine.model, or null",
    )
    dialect: Dialect = Field(default="auto", description=f"auto, {', '.join(DIALECTS)}")
    api_key_env: Name | None = Field(
        default=None, description="the name of an environment variable, or null"
    )
    api_key_file: Name | None = Field(
        default=None, description="a file whose first line is the key, or null"
    )
    concurrency: Literal["auto"] | PositiveInt = Field(
        default="auto", description="auto or a number of requests in flight, 1 or more"
    )
    requests_per_minute: PositiveFloat | None = Field(
        default=None, description="a number, above 0, or null"
    )
    tokens_per_minute: PositiveFloat | None = Field(
        default=None, description="a number of prompt and output tokens, above 0, or null"
    )
    attempts: AttemptsConfig = AttemptsConfig()
    timeout_s: PositiveFloat = Field(default=600.0, description="a number of seconds, above 0")
    gone_after_s: PositiveFloat = Field(default=120.0, description="a number of seconds, above 0")
    price: Literal["auto"] | PriceConfig | None = Field(
        default=None, description="{input: A, cached: B, output: C} in dollars, auto, or null"
    )
    max_dollars: PositiveFloat | None = Field(
        default=None, description="dollars, above 0, next to engine.price, or null"
    )
    extra_body: dict[str, Any] = Field(
        default={}, description="further fields of each request's body"
    )
    command: Annotated[
        Names | None,
        BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value),
    ] = Field(default=None, description="a command line, a list of arguments, or null")
    serve_args: dict[Annotated[str, AfterValidator(_flag)], Any] = Field(
        default={}, description="flags of the server without their dashes, with their values"
    )
    start_timeout_s: PositiveFloat = Field(
        default=600.0, description="a number of seconds, above 0"
    )

    _has_price = field_validator("max_dollars")(priced_by("engine.price"))

    @property
    def is_own(self) -> bool:
        """Return whether the engine is this package's."""
        return self.kind == OWN

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the tokenizer of the model is available to this job."""
        return self.tokenizer is not None or self.is_child

    @property
    def is_child(self) -> bool:
        """Return whether a worker starts the engine's server."""
        return self.kind in CHILDREN


def engine_faults(engine: EngineConfig, keys: Collection[str]) -> list[str]:
    """Return an error line for each key that does not go with engine.kind.

    Args:
        keys: dotted keys that a source sets to other values than their defaults.
    """
    if engine.is_own:
        others = sorted(key for key in keys if key.startswith("engine.") and key != "engine.kind")
        return [
            f"{key}: it is for another engine. Set engine.kind, or leave it out" for key in others
        ]
    faults = []
    if engine.model is None:
        faults.append(f"engine.model: required with engine.kind {engine.kind}")
    if engine.api_key_env is not None and engine.api_key_file is not None:
        faults.append("engine.api_key_file: engine.api_key_env is set as well. Leave one out")
    if engine.is_child:
        wrong = ("base_url", "api_key_env", "api_key_file", "price", "max_dollars")
        faults += [
            f"engine.{name}: it is for engine.kind http. Leave it out"
            for name in wrong
            if getattr(engine, name) is not None
        ]
    else:
        if engine.base_url is None:
            faults.append("engine.base_url: required with engine.kind http")
        if "execution.max_dollars" in keys:
            faults.append("execution.max_dollars: it is for workers. Set engine.max_dollars")
    if not engine.is_child and engine.command is not None:
        faults.append("engine.command: it is for engines that a worker starts. Leave it out")
    return faults
