"""Our own endpoint behind our own job: rows have the tokens that the job's own engine makes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.worker.row_worker import RowWorker
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig, load_config
from eagle_ray.port.engine_check import check_engine
from eagle_ray.port.http import HttpClient
from eagle_ray.port.http_rows import HttpRows
from eagle_ray.port.spend import SpendLog
from eagle_ray.port.throttle import Throttle, ThrottleSettings
from eagle_ray.requests.row_schema import ENGINE_FIELDS, output_schema, request_schema, table_of
from eagle_ray.runs.run import Run
from eagle_ray.serve.service import Service
from eagle_ray.storage.path import StoragePath
from tests.support.serving import SETTINGS, serving

ROWS: list[dict[str, Any]] = [
    {"id": "text", "prompt": "The ship sails"},
    {"id": "chat", "messages": [{"role": "user", "content": "Where is the lamp?"}]},
    {"id": "ids", "prompt_token_ids": [5, 9, 17]},
    {"id": "choice", "prompt": "Yes or no?", "choice": ["yes", "no"]},
    {"id": "penalty", "prompt": "again and again", "repetition_penalty": 1.3, "logprobs": True},
]
SCORED: list[dict[str, Any]] = [
    {"id": "labels", "prompt": "The ship sails ", "continuations": ["home", "to sea", ""]},
    {"id": "ids", "prompt_token_ids": [5, 9, 17], "continuations": [[7], [7, 12], [8]]},
    {
        "id": "chat",
        "messages": [{"role": "user", "content": "Where is the lamp?"}],
        "continuations": ["here", "there"],
    },
    {"id": "document", "prompt": "The lamp burns. " * 60, "score_text": True},
]
EQUAL = (
    "status",
    "text",
    "output_token_ids",
    "finish_reason",
    "completion_tokens",
    "prompt_tokens",
)


def job(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> JobConfig:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "sampling.max_tokens": 16,
    }
    return load_config(None, env={}, overrides=usual | settings)


def requests_of(config: JobConfig) -> pa.Table:
    return table_of(list(request_rows(plan_input(config))), request_schema([]))


Pair = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def answers(
    app: Any, service: Service, directory: Path, rows: list[dict[str, Any]], **settings: Any
) -> Pair:
    """The rows of the job's own engine, and those of the endpoint."""
    model = {
        name: value for name, value in SETTINGS.items() if name.startswith(("model", "speculative"))
    }
    own = job(directory, rows, **model)
    run = Run(StoragePath.of(directory / "out"), "run", 1, "hash")
    worker = Worker(own, run, [], WorkerPlan())
    try:
        wanted = asyncio.run(worker.answer(requests_of(own))).to_pylist()
    finally:
        worker.close()
    with serving(app) as served:
        base = f"{served.url}v1"
        model_name = service.config.model_name
        settings |= {"engine.kind": "http", "engine.base_url": base, "engine.model": model_name}
        config = job(directory, rows, **settings)
        target = check_engine(config)
        assert target is not None and target.dialect == "eagle_ray"
        made = HttpRows(config, {name: wanted[0][name] for name in ("run_id", "attempt")})
        client = HttpClient(config, target, Throttle(ThrottleSettings()), made, SpendLog(run, "w"))
        endpoint = RowWorker(config, client, made, output_schema(ENGINE_FIELDS), [])
        found = asyncio.run(endpoint.answer(requests_of(config))).to_pylist()
        endpoint.close()
    assert [row["request_id"] for row in found] == [row["request_id"] for row in wanted]
    return wanted, found


def test_rows_have_the_tokens_of_our_own_engine(app: Any, service: Service, tmp_path: Path) -> None:
    wanted, found = answers(app, service, tmp_path, ROWS)
    for row, own_row in zip(found, wanted, strict=True):
        assert {name: row[name] for name in EQUAL} == {name: own_row[name] for name in EQUAL}
        assert (row["determinism"], row["http_attempts"]) == ("exact", 1)
    assert found[4]["token_logprobs"] == wanted[4]["token_logprobs"]
    assert found[0]["num_spec_steps"] is not None


def test_scored_rows_have_the_columns_of_our_own_engine(
    app: Any, service: Service, tmp_path: Path
) -> None:
    tokenizer = {"engine.tokenizer": "embedded:tiny"}
    wanted, found = answers(app, service, tmp_path, SCORED, **tokenizer)
    assert {row["status"] for row in wanted} == {"ok"}
    equal = {*EQUAL, "best", "best_by_byte", "score_tokens", "score_bytes", "tokens", "bytes"}
    equal |= {"is_greedy", "prompt", "continuations", "max_tokens", "temperature", "structured"}
    near = ("loglikelihood", "bits_per_byte", "label_mass")
    for row, own_row in zip(found, wanted, strict=True):
        assert {name: row[name] for name in equal} == {name: own_row[name] for name in equal}
        assert row["scores"] == (own_row["scores"] and pytest.approx(own_row["scores"], abs=1e-4))
        for name in near:
            assert row[name] == (own_row[name] and pytest.approx(own_row[name], abs=1e-3)), name
        assert row["determinism"] == "exact" and row["num_verified"] is None
