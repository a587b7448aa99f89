"""Rows that end the process that answers them: they become error rows, and nobody else pays."""

from __future__ import annotations

import os
import signal

import pyarrow as pa
import pytest
import torch

from eagle_ray.data import pipeline
from eagle_ray.data.actor import EngineActor
from eagle_ray.errors import EngineError
from eagle_ray.job import run_job
from tests.conftest import token_rows
from tests.data.test_job import rows_of

KILLER, GREEDY = [7, 7, 7], [8, 8, 8]


class FragileActor(EngineActor):
    """The real one, in a process that dies of one prompt and runs out of memory over another."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self._isolation.respond = self._respond

    async def _respond(self, rows: pa.Table) -> pa.Table:
        good = [row for row in rows.to_pylist() if row["error_code"] is None]
        if KILLER in [row["prompt_token_ids"] for row in good]:
            os.kill(os.getpid(), signal.SIGKILL)
        if GREEDY in [row["prompt_token_ids"] for row in good]:
            raise EngineError("the engine failed") from torch.OutOfMemoryError("CUDA out of memory")
        return await self._worker.answer(rows)


class DiesFirst(EngineActor):
    """Killed as it loads, the first time; Ray keeps no actor whose start failed."""

    def __init__(self, config, run, *args: object):
        mark = run.output / "_loaded_once"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(config, run, *args)


@pytest.fixture
def with_actor(monkeypatch):
    return lambda actor: monkeypatch.setattr(pipeline, "EngineActor", actor)


def test_killers_are_error_rows_and_every_other_row_is_answered(ray_session, make_job, with_actor, messages):
    rows = [*token_rows(24), {"id": "killer", "prompt_token_ids": KILLER}, *token_rows(12, start=30)]
    rows.insert(9, {"id": "greedy", "prompt_token_ids": GREEDY})
    with_actor(FragileActor)
    config = make_job(rows, **{"execution.actors": 2})
    assert run_job(config) == 0
    found = {row["request_id"]: row for row in rows_of(config)}
    assert len(rows_of(config)) == len(rows) and found.keys() == {row["id"] for row in rows}
    errors = {id: row["error_message"] for id, row in found.items() if row["status"] == "error"}
    assert errors.keys() == {"killer", "greedy"} and found["killer"]["error_code"] == "worker_died"
    assert "row 25: 4 workers died while they answered it (the process was killed)" in errors["killer"]
    assert "CUDA out of memory" in errors["greedy"] and "set execution." in errors["greedy"]
    assert any("ends: its memory is too small" in line for line in messages)


def test_a_death_while_the_model_loads_is_made_good(ray_session, make_job, with_actor):
    with_actor(DiesFirst)
    config = make_job(token_rows(6), **{"execution.actors": 1})
    assert run_job(config) == 0
    assert len(rows_of(config)) == 6
