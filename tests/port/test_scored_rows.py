"""Rows that an endpoint scores: what each dialect is asked, scores as our own engine has them, money and failures."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eagle_ray.batch.worker.row_worker import RowWorker
from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.port.engine_check import check_engine
from eagle_ray.port.http import HttpClient
from eagle_ray.port.http_rows import HttpRows
from eagle_ray.port.http_target import Target
from eagle_ray.port.preflight import preflight
from eagle_ray.port.prices import price_of
from eagle_ray.port.prompt_scores import PROMPT_SCORES
from eagle_ray.port.spend import SpendLog, spend_summary
from eagle_ray.port.throttle import Throttle, ThrottleSettings
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import ENGINE_FIELDS, output_schema, request_schema, table_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.prompt_scores import is_likeliest, log_prob, scored
from tests.support.scripted_endpoint import MODEL, PRICE, PROMPT_TOKENS, ScriptedEndpoint, failed

TINY = Path(__file__).parents[2] / "eagle_ray" / "assets" / "tiny" / "target"
DIALECTS = sorted(PROMPT_SCORES)
PAIR = {"prompt": "The ship sails ", "continuations": ["home", "home again", "", [5, 7]]}


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(scored) as endpoint:
        yield endpoint


Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(endpoint: ScriptedEndpoint, tmp_path: Path) -> Score:
    """Score one row, as one worker of a run does, and return its output row."""

    def score(
        row: dict[str, Any], dialect: str = "vllm", length: int | None = None, **settings: Any
    ) -> dict[str, Any]:
        config = config_of(endpoint, tmp_path, **settings)
        run = run_in(tmp_path)
        price = price_of(config.engine)
        target = Target((endpoint.url,), dialect, price=price, max_model_len=length)
        rows = HttpRows(config, {"run_id": "run", "attempt": 1})
        throttle = Throttle(ThrottleSettings())
        client = HttpClient(config, target, throttle, rows, SpendLog(run, "w"))
        worker = RowWorker(config, client, rows, output_schema(ENGINE_FIELDS), [])
        try:
            [answered] = asyncio.run(worker.answer(table_in(row))).to_pylist()
        finally:
            worker.close()
        return answered

    return score


def table_in(row: dict[str, Any]) -> pa.Table:
    continuations = row.get("continuations")
    own = {} if continuations is None else {"continuations": json.dumps(continuations)}
    whole = {"request_id": "q1", "row_index": 0, "source_file": "in.jsonl"} | row | own
    return table_of([whole], request_schema([]))


def run_in(directory: Path) -> Run:
    return Run(StoragePath.of(directory / "out"), "run", 1, "hash")


def config_of(endpoint: ScriptedEndpoint, directory: Path, **settings: Any) -> JobConfig:
    usual = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "engine.kind": "http",
        "engine.base_url": endpoint.url,
        "engine.model": MODEL,
        "engine.tokenizer": str(TINY),
        "engine.price": PRICE,
        "engine.timeout_s": 5.0,
    }
    return load_config(None, env={}, overrides=usual | settings)


def ids_of(text: str) -> list[int]:
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    return tokenizer.encode(text)


def summed(ids: list[int], first: int) -> float:
    return sum(log_prob(ids[:i], ids[i]) for i in range(first, len(ids)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scores_of_each_dialect(endpoint: ScriptedEndpoint, score: Score, dialect: str) -> None:
    row = score(PAIR, dialect)
    assert row["status"] == "ok", row["error_message"]
    # spaces at the end of a prompt belong to its continuations that are texts
    context = ids_of("The ship sails")
    home, again = ids_of("The ship sails home"), ids_of("The ship sails home again")
    behind_ids = [*ids_of("The ship sails "), 5, 7]
    first = len(context)
    assert row["scores"][:2] == pytest.approx([summed(home, first), summed(again, first)])
    assert row["scores"][2] == 0.0
    assert row["scores"][3] == pytest.approx(summed(behind_ids, len(behind_ids) - 2))
    assert row["is_greedy"][0] == all(
        is_likeliest(home[:i], home[i]) for i in range(first, len(home))
    )
    assert row["score_tokens"] == [len(home) - first, len(again) - first, 0, 2]
    assert row["best"] == 2 and (row["text"], row["completion_tokens"]) == (None, 0)
    assert row["num_verified"] is None and row["prompt_tokens"] == first
    assert row["determinism"] == ("exact" if dialect == "eagle_ray" else row["determinism"])


def test_a_request_tells_all_continuations_on_its_path(
    endpoint: ScriptedEndpoint, score: Score, tmp_path: Path
) -> None:
    row = score({"prompt": "The ship sails", "continuations": [" home", " home again", " home"]})
    assert row["status"] == "ok" and len(endpoint.asked) == 1
    assert row["cost_dollars"] == pytest.approx((PROMPT_TOKENS * 1000 + 2000) / 1e6)
    spend = spend_summary(run_in(tmp_path))
    assert (spend["requests"], spend["answered"]) == (1, 1)
    row = score({"prompt": "The lamp burns", "continuations": [" home again", " to sea"]})
    assert row["http_attempts"] == 2 and len(endpoint.asked) == 3
    assert spend_summary(run_in(tmp_path))["requests"] == 3


def test_what_was_paid_for_is_not_asked_for_again(endpoint: ScriptedEndpoint, score: Score) -> None:
    first = score(PAIR)
    num_asked = len(endpoint.asked)
    again = score(PAIR)
    assert len(endpoint.asked) == num_asked and again["scores"] == first["scores"]


def test_label_mass_is_of_the_first_tokens(score: Score) -> None:
    row = score({"prompt": "The ship sails", "continuations": [[5, 7], [6], [5]]})
    context = ids_of("The ship sails")
    expected = math.exp(log_prob(context, 5)) + math.exp(log_prob(context, 6))
    assert row["label_mass"] == pytest.approx(expected)


def test_a_long_document_is_read_in_windows(endpoint: ScriptedEndpoint, score: Score) -> None:
    text = "The ship sails home. " * 6
    row = score({"prompt": text, "score_text": True}, length=16)
    assert row["status"] == "ok", row["error_message"]
    assert max(len(asked.body["prompt"]) for asked in endpoint.asked) == 15
    assert len(endpoint.asked) > 2 and row["bytes"] == len(text)
    assert row["tokens"] in (len(ids_of(text)), len(ids_of(text)) - 1)
    assert row["bits_per_byte"] == pytest.approx(-row["loglikelihood"] / len(text) / math.log(2))


def test_choices_are_scored_without_an_output(score: Score) -> None:
    row = score(
        {"prompt": "Yes or no?", "choice": [" yes", " no"], "logprobs": True, "max_tokens": 0}
    )
    assert row["status"] == "ok", row["error_message"]
    assert len(row["scores"]) == 2 and row["text"] is None


def test_continuations_that_are_all_empty_cost_nothing(
    endpoint: ScriptedEndpoint, score: Score
) -> None:
    row = score({"prompt": "Hi", "continuations": ["", ""]})
    assert (row["status"], row["scores"]) == ("ok", [0.0, 0.0]) and not endpoint.asked


def test_a_row_that_fails_asks_for_no_more(endpoint: ScriptedEndpoint, score: Score) -> None:
    endpoint.script = lambda asked: failed(400, "the prompt is odd")
    row = score({"prompt": "Hi", "continuations": [[i] for i in range(5, 305)]})
    assert (row["status"], row["error_code"]) == ("error", "bad_request")
    assert "odd" in row["error_message"] and len(endpoint.asked) <= 64


@pytest.mark.parametrize("dialect", ["vllm", "compatible", "sglang"])
def test_an_answer_without_scores_is_an_error(
    endpoint: ScriptedEndpoint, score: Score, dialect: str
) -> None:
    def without(asked: Any) -> Any:
        reply = scored(asked)
        body = json.loads(reply.content)
        if "choices" in body:
            body["choices"][0] |= {"prompt_logprobs": None, "logprobs": None}
        else:
            body["meta_info"]["input_token_logprobs"] = []
        return type(reply)(content=json.dumps(body).encode())

    endpoint.script = without
    row = score(PAIR, dialect)
    assert row["error_code"] == "bad_request"
    assert "has no log-probabilities of the prompt's last" in row["error_message"]
    assert row["http_attempts"] == 1


def test_what_cannot_be_scored_is_refused_before_the_start(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    settings = {"engine.dialect": "llama_server"}
    with pytest.raises(ConfigError, match=r"column continuations: llama_server has no such"):
        check_engine(config_of(endpoint, tmp_path, **settings), ["continuations"])
    config = config_of(endpoint, tmp_path, **{"engine.tokenizer": None})
    with pytest.raises(ConfigError, match=r"engine.tokenizer: required by column score_text"):
        check_engine(config, ["score_text"])
    with_label = {"engine.tokenizer": None, "sampling.continuations": ["yes", "no"]}
    with pytest.raises(ConfigError, match=r"required by sampling.continuations"):
        check_engine(config_of(endpoint, tmp_path, **with_label))
    assert check_engine(config_of(endpoint, tmp_path), ["continuations"]) is not None


def test_prompt_logprobs_and_llama_cpp_are_row_errors(score: Score) -> None:
    row = score({"prompt": "Hi", "prompt_logprobs": True, "logprobs": True, "max_tokens": 0})
    assert "prompt_logprobs: vllm has no such parameter" in row["error_message"]
    choice = {"choice": ["a", "b"], "logprobs": True, "max_tokens": 0}
    row = score({"prompt": "Hi"} | choice, "llama_server")
    assert "llama_server tells no log-probabilities of a prompt" in row["error_message"]


def test_validation_sends_one_request_of_a_scored_row(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    request = Request(
        id="q", source_file="a", row_index=0, prompt="Hi", sampling={"continuations": [" a", " b"]}
    )
    config = config_of(endpoint, tmp_path)
    lines = preflight(request, config, Target((endpoint.url,), "vllm"))
    assert len(endpoint.asked) == 1 and lines[0].startswith("answer   log-probabilities of ")
