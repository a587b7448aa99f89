"""Rows that end the process that answers them: they become error rows, and nobody else pays."""

from __future__ import annotations

import os
import signal

import pyarrow as pa
import pytest
import ray
import torch

from eagle_ray.data import pipeline
from eagle_ray.data.actor import EngineActor, Line
from eagle_ray.errors import EngineError
from eagle_ray.job import run_job
from tests.conftest import token_rows
from tests.data.test_job import ids_of, rows_of

KILLER, GREEDY = [7, 7, 7], [8, 8, 8]


class FragileActor(EngineActor):
    """The real one, killed as it loads for the first time, by one prompt always, and out of memory over another."""

    def __init__(self, config, run, *args: object):
        mark = run.output / "_loaded_once"
        if not mark.exists():
            mark.write_whole(b"")
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(config, run, *args)
        self._isolation.respond = self._respond

    async def _respond(self, rows: pa.Table) -> pa.Table:
        prompts = [row["prompt_token_ids"] for row in rows.to_pylist() if row["error_code"] is None]
        if KILLER in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if GREEDY in prompts:
            raise EngineError("the engine failed") from torch.OutOfMemoryError("CUDA out of memory")
        return await self._worker.answer(rows)


class TooLarge(EngineActor):
    """The real one, on a device without the memory for it."""

    def __init__(self, config, run, passthrough, threads, progress):
        self._line = Line(progress, ray.get_runtime_context().get_actor_id())
        self._line.started()
        self._cannot_start(torch.OutOfMemoryError("CUDA out of memory"))


def test_where_no_worker_can_start_the_job_ends_with_the_reason(ray_session, make_job, monkeypatch, messages):
    monkeypatch.setattr(pipeline, "EngineActor", TooLarge)
    assert run_job(make_job(token_rows(4), **{"execution.actors": 2})) == 5
    assert "stopped: a worker cannot start: its memory is too small" in messages[-1]
    assert "set execution.kv_tokens" in messages[-1] and "\n" not in messages[-1]


@pytest.mark.parametrize(
    ("prompt", "reason", "last_words"),
    [
        pytest.param(KILLER, "the process was killed", 0, id="killed"),
        pytest.param(GREEDY, "CUDA out of memory", 4, id="memory", marks=pytest.mark.slow),
    ],
)
def test_a_killer_is_an_error_row_and_every_other_row_is_answered(
    ray_session, make_job, monkeypatch, messages, prompt, reason, last_words
):
    monkeypatch.setattr(pipeline, "EngineActor", FragileActor)
    rows = [*token_rows(9), {"id": "killer", "prompt_token_ids": prompt}, *token_rows(20, start=9)]
    config = make_job(rows, **{"execution.actors": 2})
    assert run_job(config) == 0
    assert ids_of(config) == sorted(row["id"] for row in rows)
    (bad,) = [row for row in rows_of(config) if row["status"] == "error"]
    assert (bad["request_id"], bad["error_code"]) == ("killer", "worker_died")
    assert "line 10: 4 workers died while they answered it" in bad["error_message"]
    assert reason in bad["error_message"] and "set execution." in bad["error_message"]
    assert sum("ends: its memory is too small" in line for line in messages) == last_words
