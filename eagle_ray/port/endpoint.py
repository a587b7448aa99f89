"""An endpoint of OpenAI's protocol: its key, its list of models, and which dialect it has.

facts = look_at(config.engine, read_key(config.engine))
facts.dialect        # "vllm"
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from eagle_ray.config.engine_section import EngineConfig
from eagle_ray.core.errors import ConfigError, shortened
from eagle_ray.port.http_target import ApiKey

LOOK_S = 30.0  # seconds of each look
OWNERS = {  # owned_by of a model, or the server's name, by dialect
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama_server",
    "eagle-ray": "eagle_ray",
}
OPENAI_HOST = "api.openai.com"


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """Facts about an endpoint, from its list of models.

    Attributes:
        models: names in the list; None if the endpoint has no list.
        version: version of its software, or None.
        max_model_len: maximum tokens of a prompt and its output together; None if unknown.
    """

    dialect: str
    models: tuple[str, ...] | None
    version: str | None
    max_model_len: int | None = None


def read_key(engine: EngineConfig) -> ApiKey:
    """Return the API key of an endpoint, empty if none is configured. Raises ConfigError."""
    if engine.api_key_env is not None:
        value = os.environ.get(engine.api_key_env, "").strip()
        if not value:
            raise ConfigError(f"engine.api_key_env: {engine.api_key_env} is not set. Set it")
        return ApiKey(value)
    if engine.api_key_file is None:
        return ApiKey()
    try:
        lines = Path(engine.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"engine.api_key_file: {engine.api_key_file}: {reason}") from None
    value = lines[0].strip() if lines else ""
    if not value:
        raise ConfigError(
            f"engine.api_key_file: {engine.api_key_file} has no key in its first line"
        )
    return ApiKey(value)


def look_at(engine: EngineConfig, key: ApiKey) -> EndpointFacts:
    """Query an endpoint for its facts, such as its software and version. Raises ConfigError if it cannot be used.

    Only the list of models is read, so nothing is paid for.
    """
    assert engine.base_url is not None, "a child has its own URL"
    facts = None
    for url in engine.base_url:
        facts_of_url = _look_at_one(url, engine, key)
        facts = facts or facts_of_url
    assert facts is not None, "there is a URL"
    return facts


def look_at_server(url: str, engine: EngineConfig) -> EndpointFacts:
    """Return the facts of a server that a child process runs."""
    try:
        entries = _entries(httpx2.get(f"{url}/models", timeout=LOOK_S)) or []
    except httpx2.HTTPError:
        entries = []
    version = _version(url, engine.kind, ApiKey())
    return EndpointFacts(engine.kind, None, version, _model_len(entries, engine.model))


def _look_at_one(url: str, engine: EngineConfig, key: ApiKey) -> EndpointFacts:
    try:
        response = httpx2.get(f"{url}/models", headers=key.headers, timeout=LOOK_S)
    except httpx2.HTTPError as error:
        words = key.hidden_in(f"{type(error).__name__}: {error}")
        raise ConfigError(
            f"engine.base_url: {url} does not answer ({words}). Start the endpoint, or correct the URL"
        ) from None
    if response.status_code in (401, 403):
        raise ConfigError(
            f"engine.api_key_env: {url} refuses the key (HTTP {response.status_code}). Give the right one"
        )
    entries = _entries(response)
    models = None if entries is None else tuple(str(entry.get("id")) for entry in entries)
    if models and engine.model not in models:
        listed = shortened(", ".join(models))
        raise ConfigError(f"engine.model: {url} has no {engine.model!r}. It has: {listed}")
    dialect = engine.dialect if engine.dialect != "auto" else _dialect(url, entries or [])
    length = _model_len(entries or [], engine.model)
    return EndpointFacts(dialect, models, _version(url, dialect, key), length)


def _entries(response: httpx2.Response) -> list[dict] | None:
    """Return the list of models; None if the endpoint has none."""
    if response.status_code != 200:
        return None
    try:
        data = response.json().get("data")
    except (ValueError, AttributeError):
        return None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else None


def _model_len(entries: list[dict], model: str | None) -> int | None:
    """Return the tokens of a prompt and its output together, as vLLM, SGLang and our own endpoint list them."""
    lengths = [entry.get("max_model_len") for entry in entries if entry.get("id") == model]
    return next((length for length in lengths if isinstance(length, int)), None)


def _dialect(url: str, entries: list[dict]) -> str:
    if urlsplit(url).hostname == OPENAI_HOST:
        return "openai"
    owners = {str(entry.get("owned_by", "")).lower() for entry in entries}
    return next((dialect for owner, dialect in OWNERS.items() if owner in owners), "compatible")


def _version(url: str, dialect: str, key: ApiKey) -> str | None:
    if dialect != "vllm":
        return None
    try:
        root = url.removesuffix("/v1")
        response = httpx2.get(f"{root}/version", headers=key.headers, timeout=LOOK_S)
        return str(response.json()["version"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None
