"""Rows that end the process that answers them: they become error rows, and nobody else pays."""

from __future__ import annotations

import os

import pytest

from eagle_ray.batch.driver import execute
from eagle_ray.batch.worker import actor, engine_process
from eagle_ray.batch.worker.actor import EngineActor
from tests.support import workers
from tests.support.jobs import exit_code, ids_of, rows_of, token_rows
from tests.support.workers import ACTOR_PID, CRASHES, GREEDY, KILLER, ORPHAN, TOO_LARGE


class FragileActor(EngineActor):
    """The real one, beside a fragile worker."""

    def __init__(self, *args: object):
        engine_process.WORKER = workers.CLASS
        actor.RESTART_DELAY_S = 0.5
        os.environ[ACTOR_PID] = str(os.getpid())
        super().__init__(*args)


@pytest.fixture(autouse=True)
def fragile_actor(ray_session, monkeypatch) -> None:
    monkeypatch.setattr(execute, "EngineActor", FragileActor)


def test_where_no_worker_can_start_the_job_ends_with_the_reason(make_job, messages):
    assert exit_code(make_job(token_rows(4), **{"name": TOO_LARGE, "execution.actors": 2})) == 5
    assert "stopped: a worker cannot start: its memory is too small" in messages[-1]
    assert "set execution.kv_tokens" in messages[-1] and "\n" not in messages[-1]


@pytest.mark.parametrize(
    ("prompt", "reason", "last_words"),
    [
        pytest.param(KILLER, "the engine's process was ended by signal 9", 5, id="engine"),
        pytest.param(ORPHAN, "the process was killed", 1, id="actor", marks=pytest.mark.slow),
        pytest.param(GREEDY, "CUDA out of memory", 5, id="memory", marks=pytest.mark.slow),
    ],
)
def test_crashing_row_is_an_error_row_and_others_are_answered(
    make_job, messages, prompt, reason, last_words
):
    """One of the last words is spoken over the worker that dies as it loads."""
    rows = [*token_rows(9), {"id": "killer", "prompt_token_ids": prompt}, *token_rows(20, start=9)]
    config = make_job(rows, **{"name": CRASHES, "execution.actors": 2})
    assert exit_code(config) == 0
    assert ids_of(config) == sorted(row["id"] for row in rows)
    (bad,) = [row for row in rows_of(config) if row["status"] == "error"]
    assert (bad["request_id"], bad["error_code"]) == ("killer", "worker_died")
    assert "line 10: 4 workers died while they answered it" in bad["error_message"]
    assert reason in bad["error_message"] and "set execution." in bad["error_message"]
    assert sum(line.startswith("worker ") and " ends: " in line for line in messages) == last_words
