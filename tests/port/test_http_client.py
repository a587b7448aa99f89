"""An endpoint behind the port: rows of its answers, what is tried again, what ends a row and what stops the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.errors import RequestError
from eagle_ray.port.engine_client import AdmissionStopped, Call
from eagle_ray.port.http import HttpClient
from eagle_ray.port.http_rows import HttpRows
from eagle_ray.port.http_target import ApiKey, Target
from eagle_ray.port.prices import price_of
from eagle_ray.port.spend import SpendLog, drop_answers, spend_summary
from eagle_ray.port.throttle import Throttle, ThrottleSettings
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import ENGINE_FIELDS, output_schema, table_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from tests.support.scripted_endpoint import (
    DOLLARS,
    FAULTS,
    HANG,
    MODEL,
    PRICE,
    Reply,
    Script,
    ScriptedEndpoint,
    answered,
    error_in_200,
    failed,
    limited,
)

KEY = "sk-secret-4711"


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as endpoint:
        yield endpoint


Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask(endpoint: ScriptedEndpoint, tmp_path: Path) -> Ask:
    """Ask for the samples of one request, as one worker of a run does, and return its rows."""

    def ask(
        samples: int = 1, attempt: int = 1, dialect: str = "vllm", **settings: Any
    ) -> list[dict[str, Any]]:
        request = settings.pop("request", None) or request_of(prompt="Hi")
        config = config_of(endpoint, tmp_path, **settings)
        run = run_in(tmp_path, attempt)

        async def answer() -> list[dict[str, Any]]:
            throttle = Throttle(ThrottleSettings())
            price = price_of(config.engine)
            target = Target((endpoint.url,), dialect, ApiKey(KEY), price=price)
            rows = HttpRows(config, {"run_id": "run", "attempt": attempt})
            client = HttpClient(config, target, throttle, rows, SpendLog(run, f"w{attempt}"))
            try:
                return await client.answer(request, range(samples), Call())
            except AdmissionStopped:
                assert throttle.stopped is not None
                raise RuntimeError(throttle.stopped.kind) from None
            finally:
                client.close()

        return schema_rows(asyncio.run(answer()))

    return ask


def run_in(directory: Path, attempt: int = 1) -> Run:
    return Run(StoragePath.of(directory / "out"), "run", attempt, "hash")


def schema_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table: pa.Table = table_of(rows, output_schema(ENGINE_FIELDS))
    return table.to_pylist()


def config_of(endpoint: ScriptedEndpoint, directory: Path, **settings: Any) -> JobConfig:
    usual = {
        "input.path": "in.jsonl",
        "output.path": str(directory / "out"),
        "engine.kind": "http",
        "engine.base_url": endpoint.url,
        "engine.model": MODEL,
        "engine.price": PRICE,
        "engine.timeout_s": 0.5,
    }
    return load_config(None, env={}, overrides=usual | settings)


def request_of(**fields: Any) -> Request:
    return Request(id="q1", source_file="in.jsonl", row_index=0, **fields)


def first(fault: Script) -> Script:
    """The fault, then a good answer."""
    return lambda asked: fault(asked) if asked.tries == 0 else answered(asked)


def test_a_row_has_what_the_answer_tells(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    [row] = ask()
    assert (row["status"], row["text"], row["finish_reason"]) == ("ok", 'answer to "Hi"', "stop")
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_prompt_tokens"]) == (
        10,
        5,
        0,
    )
    assert row["cost_dollars"] == pytest.approx(DOLLARS)
    assert (row["engine"], row["served_model"], row["system_fingerprint"]) == ("http", MODEL, "fp1")
    assert (row["provider_request_id"], row["http_attempts"], row["determinism"]) == (
        "r0",
        1,
        "engine",
    )
    assert row["e2e_s"] > 0 and row["finished_at"] >= row["started_at"]
    [asked] = endpoint.asked
    assert asked.path == "/v1/completions" and asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.body == {
        "model": MODEL,
        "prompt": "Hi",
        "temperature": 0.0,
        "max_tokens": 256,
        "return_token_ids": True,
    }


def test_each_sample_is_a_request_with_a_seed_of_its_own(
    endpoint: ScriptedEndpoint, ask: Ask
) -> None:
    rows = ask(3, **{"sampling.temperature": 0.5, "sampling.n": 3})
    assert [row["sample_index"] for row in rows] == [0, 1, 2]
    seeds = {asked.body["seed"] for asked in endpoint.asked}
    assert len(seeds) == 3 and all(0 <= seed < 2**31 for seed in seeds)


def test_messages_tools_and_reasoning(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "because"}
    endpoint.script = lambda asked: answered(asked, message=message, finish_reason="tool_calls")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = json.dumps([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    chat = {"tools": json.dumps([tool]), "tool_choice": '"required"'}
    [row] = ask(request=request_of(messages=messages, chat=chat))
    assert json.loads(row["tool_calls"]) == [call] and row["reasoning_content"] == "because"
    body = endpoint.asked[0].body
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["tools"] == [tool] and body["tool_choice"] == "required"


@pytest.mark.parametrize("fault", [*FAULTS, lambda asked: HANG], ids=lambda fault: None)
def test_what_may_pass_is_tried_again(endpoint: ScriptedEndpoint, ask: Ask, fault: Script) -> None:
    endpoint.script = first(fault)
    [row] = ask()
    assert (row["status"], row["http_attempts"]) == ("ok", 2)
    assert row["cost_dollars"] == pytest.approx(DOLLARS)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (failed(400, "This model's maximum context length is 10 tokens"), "context_too_long"),
        (failed(400, "bad", code="context_length_exceeded"), "context_too_long"),
        (failed(422, "no such field"), "bad_request"),
        (failed(400, "blocked", code="content_filter"), "content_filtered"),
        (failed(503), "endpoint_failed"),
        (error_in_200(400, "wrong"), "bad_request"),
        (error_in_200(), "endpoint_failed"),
    ],
)
def test_an_error_of_one_row(endpoint: ScriptedEndpoint, ask: Ask, reply: Reply, code: str) -> None:
    endpoint.script = lambda asked: reply
    [row] = ask(**{"engine.attempts": {"failed": 2}})
    assert (row["status"], row["error_code"]) == ("error", code)
    assert len(endpoint.asked) == (2 if code == "endpoint_failed" else 1)


def test_a_request_without_an_answer_may_have_been_paid(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    endpoint.script = first(lambda asked: HANG)
    ask()
    summary = spend_summary(run_in(tmp_path))
    assert (summary["requests"], summary["dollars"]) == (2, pytest.approx(DOLLARS))
    assert summary["perhaps_dollars"] > DOLLARS  # nothing is known yet: the most that it may cost
    endpoint.script = first(lambda asked: failed(503))
    ask(attempt=2, request=request_of(prompt="Other"))
    after = spend_summary(run_in(tmp_path))
    assert after["requests"] == 4 and after["perhaps_dollars"] == summary["perhaps_dollars"]


def test_refused_and_filtered_answers_are_paid_for(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    message = {"role": "assistant", "content": None, "refusal": "I cannot"}
    endpoint.script = lambda asked: answered(asked, message=message)
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    [row] = ask(request=request_of(messages=messages))
    assert (row["error_code"], row["refusal"]) == ("refused", "I cannot")
    endpoint.script = lambda asked: answered(asked, finish_reason="content_filter")
    [row] = ask(attempt=2)
    assert row["error_code"] == "content_filtered"
    assert spend_summary(run_in(tmp_path))["dollars"] == pytest.approx(2 * DOLLARS)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (failed(401), "bad_key"),
        (failed(402), "insufficient_quota"),
        (
            failed(429, "You exceeded your current quota", code="insufficient_quota"),
            "insufficient_quota",
        ),
        (error_in_200(401, "key"), "bad_key"),
        (failed(404, "no", code="model_not_found"), "unknown_model"),
    ],
)
def test_what_stops_the_job(endpoint: ScriptedEndpoint, ask: Ask, reply: Reply, kind: str) -> None:
    endpoint.script = lambda asked: reply
    with pytest.raises(RuntimeError, match=kind):
        ask()
    assert len(endpoint.asked) == 1


def test_an_endpoint_is_gone_once_no_connection_is_made_for_long(
    endpoint: ScriptedEndpoint, ask: Ask
) -> None:
    endpoint.__exit__()
    with pytest.raises(RuntimeError, match="endpoint_gone"):
        ask(**{"engine.gone_after_s": 0.2})


def test_limits_and_failures_have_budgets_of_their_own(
    endpoint: ScriptedEndpoint, ask: Ask
) -> None:
    endpoint.script = lambda asked: limited("0.01") if asked.tries < 6 else answered(asked)
    [row] = ask(**{"engine.attempts": {"failed": 1, "limited": 7}})
    assert (row["status"], row["http_attempts"]) == ("ok", 7)


def test_an_answer_of_another_form_is_asked_for_again(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    texts = ["no", '{"a": "x"}', '{"a": 1}']
    endpoint.script = lambda asked: answered(asked, texts[asked.tries])
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    settings = {"sampling.json_schema": schema}
    [row] = ask(**settings, **{"engine.attempts": {"invalid": 3}})
    assert (row["status"], row["text"], row["structured"]) == ("ok", '{"a": 1}', "json_schema")
    assert spend_summary(run_in(tmp_path))["dollars"] == pytest.approx(3 * DOLLARS)


def test_a_wrong_form_at_last_is_an_error(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    [row] = ask(**{"sampling.choice": ["yes", "no"]})
    assert row["error_code"] == "invalid_form" and len(endpoint.asked) == 1


def test_a_paid_answer_is_not_asked_for_again(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    [before] = ask()
    [after] = ask(attempt=2)
    assert len(endpoint.asked) == 1
    assert before | {"attempt": 2} == after
    drop_answers(run_in(tmp_path))
    ask(attempt=3)
    assert len(endpoint.asked) == 2
    summary = spend_summary(run_in(tmp_path))
    assert (summary["answered"], summary["dollars"]) == (2, pytest.approx(2 * DOLLARS))


def test_a_cut_line_of_a_killed_worker_is_left_out(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    ask()
    [file] = (tmp_path / "out" / "spend").iterdir()
    file.write_bytes(file.read_bytes() + b'{"key": "x", "colu')
    ask(attempt=2)
    assert len(endpoint.asked) == 1


def test_a_parameter_that_the_dialect_lacks_is_not_sent(
    endpoint: ScriptedEndpoint, ask: Ask
) -> None:
    request = request_of(prompt="Hi", sampling={"top_k": 5})
    with pytest.raises(RequestError, match="top_k: openai has no such parameter"):
        ask(dialect="openai", request=request)
    assert not endpoint.asked


def test_the_key_is_in_no_error_and_no_file(
    endpoint: ScriptedEndpoint, ask: Ask, tmp_path: Path
) -> None:
    endpoint.script = lambda asked: failed(422, f"what is {asked.headers['authorization']}?")
    [row] = ask()
    assert "***" in row["error_message"] and KEY not in str(row)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in repr(ApiKey(KEY))
