"""The table of dialects: every parameter has a row, and bodies say all that a request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.port.dialects import SPELLINGS, body_of, can_say, unsaid_settings
from eagle_ray.requests.parameters import CHAT, SAMPLING, Api, rows_at
from eagle_ray.requests.request import Request
from tests.support.parameter_values import VALUES


def config_of(**settings: Any) -> JobConfig:
    usual = {
        "input.path": "a.jsonl",
        "output.path": "out",
        "engine.kind": "http",
        "engine.base_url": "http://127.0.0.1:1/v1",
        "engine.model": "m",
    }
    return load_config(None, env={}, overrides=usual | settings)


def request_of(**fields: Any) -> Request:
    return Request(id="q", source_file="a", row_index=0, **fields)


def test_every_parameter_of_the_table_has_a_row() -> None:
    assert set(SPELLINGS) == {*SAMPLING, *CHAT}


def test_our_own_endpoint_is_told_what_it_reads_by_its_own_name() -> None:
    readable = set(rows_at(Api.CHAT)) & set(SPELLINGS)
    said = {name for name in SPELLINGS if can_say(name, "eagle_ray")}
    assert readable - said == {"top_logprobs"}  # whose tokens have no ids over HTTP
    body = body_of(request_of(prompt="a", sampling={"regex": "a+"}), config_of(), "eagle_ray", 1)[1]
    assert body["regex"] == "a+"


@pytest.mark.parametrize(
    "dialect", ["openai", "compatible", "vllm", "sglang", "llama_server", "eagle_ray"]
)
@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_changes_the_body_or_is_refused(name: str, dialect: str) -> None:
    config = config_of(**{"sampling.temperature": 0.4})
    plain = body_of(request_of(prompt="a"), config, dialect, 1)[1]
    request = request_of(prompt="a", sampling={name: VALUES[name]})
    if can_say(name, dialect):
        seed = 2 if name == "seed" else 1  # as the row's own seed makes another one
        assert body_of(request, config, dialect, seed)[1] != plain
    else:
        with pytest.raises(RequestError, match=f"{name}: {dialect} has no such parameter"):
            body_of(request, config, dialect, 1)


def test_spellings_that_differ() -> None:
    config = config_of()

    def body(dialect: str, **sampling: Any) -> dict[str, Any]:
        return body_of(
            request_of(messages='[{"role": "user", "content": "a"}]', sampling=sampling),
            config,
            dialect,
            1,
        )[1]

    assert body("openai", max_tokens=7)["max_completion_tokens"] == 7
    assert body("vllm", choice=["a"])["structured_outputs"] == {"choice": ["a"]}
    assert body("sglang", choice=["a.", "b"])["regex"] == r"(a\.|b)"
    assert body("llama_server", choice=["a", "b"])["grammar"] == 'root ::= "a" | "b"'
    assert body("llama_server", repetition_penalty=1.5)["repeat_last_n"] == -1
    assert body("vllm", thinking_budget=9)["thinking_token_budget"] == 9
    schema = body("openai", json_schema='{"type": "object"}')["response_format"]["json_schema"]
    assert schema["schema"] == {"type": "object"}
    assert json.dumps(body("openai", logit_bias={3: 1.0})["logit_bias"]) == '{"3": 1.0}'


def test_settings_that_cannot_be_sent_are_named() -> None:
    config = config_of(**{"sampling.top_k": 5, "sampling.min_p": 0.1})
    lines = unsaid_settings(config, "openai")
    assert [line.partition(":")[0] for line in lines] == ["sampling.top_k", "sampling.min_p"]
    assert not unsaid_settings(config, "vllm")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"engine.model": None}, "engine.model"),
        ({"engine.base_url": None}, "engine.base_url"),
        ({"engine.base_url": "https://me:secret@host/v1"}, "engine.base_url"),
        ({"engine.max_dollars": 1.0}, "engine.max_dollars"),
        ({"engine.kind": "vllm"}, "engine.base_url"),
        ({"engine.kind": "own"}, "engine.base_url"),
        ({"engine.api_key_env": "A", "engine.api_key_file": "b"}, "engine.api_key_file"),
        ({"model.target": "a/b"}, "model.target"),
        ({"speculative.method": "eagle3"}, "speculative.method"),
        ({"execution.price_per_hour": 1.0, "execution.max_dollars": 1.0}, "execution.max_dollars"),
        ({"task": "embed"}, "task"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"(?m)^{key}:"):
        config_of(**settings)
