"""A worker in a process of its own: it answers as one here would, and no end of either process goes unheard."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from eagle_ray.batch.worker import engine_process
from eagle_ray.batch.worker.crash_isolation import (
    Fault,
    WorkerError,
    as_config_error,
    classify_error,
)
from eagle_ray.batch.worker.engine_process import EngineProcess, LogLine, ProcessEnded
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.runs.job_errors import ClusterError, ModelUnusable
from tests.support import workers
from tests.support.jobs import PAIR, token_rows
from tests.support.workers import (
    GREEDY,
    IS_BUGGY,
    KILLER,
    LOGGED,
    LOGS,
    PATIENCE_S,
    TOO_LARGE,
    TOO_SMALL,
    answers,
    answers_or_errors,
    arguments_of,
    batches_of,
    ignore_line,
    is_gone,
    outputs,
    pid_of,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("warm_python")
LONG = {
    "sampling.max_tokens": 1000,
    "model.max_model_len": 1024,
    "sampling.ignore_eos": True,
}  # a second for each row
SILENT = {"model.dtype": "float32"}  # auto says what it chose


@contextmanager
def process_of(config: JobConfig) -> Iterator[EngineProcess]:
    worker = EngineProcess(*arguments_of(config), on_log=ignore_line)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        worker.close()


@pytest.fixture
def fragile_worker(monkeypatch) -> None:
    monkeypatch.setattr(engine_process, "WORKER", workers.CLASS)


def test_it_answers_as_a_worker_here_does_and_counts(make_job):
    config = make_job(token_rows(24), **{"sampling.temperature": 0.8, "sampling.n": 2})
    with process_of(config) as worker:
        assert worker.counters().num_steps == 0 and worker.counters().num_slots == 4
        tables = answers_or_errors(worker, *batches_of(config, batch_size=3))  # eight in flight
        assert worker.counters().num_output_tokens == sum(
            row["completion_tokens"] for table in tables for row in table.to_pylist()
        )
        worker_ids = {row["worker_id"] for table in tables for row in table.to_pylist()}
    assert worker_ids == {worker.worker_id} and pid_of(worker.worker_id) != os.getpid()
    assert outputs([row for table in tables for row in table.to_pylist()]) == outputs(
        answers(config)
    )


def test_tokens_are_counted_before_any_row_ends(make_job):
    config = make_job(token_rows(8), **LONG)

    async def count_until_beat(worker: EngineProcess) -> None:
        (table,) = batches_of(config)
        answer = asyncio.ensure_future(worker.answer(table))
        while not worker.counters().num_output_tokens and not answer.done():
            await asyncio.sleep(0.05)
        assert not answer.done() and worker.counters().num_output_tokens < 8 * 1000
        answer.cancel()

    with process_of(config) as worker:
        asyncio.run(asyncio.wait_for(count_until_beat(worker), PATIENCE_S))


def test_rows_of_many_megabytes_cross_and_hold_nobody_up(make_job):
    """Whoever waits for the large batch goes on meanwhile."""
    config = make_job([{"id": "q", "prompt_token_ids": [1, 2], "note": "n"}])
    (small,) = batches_of(config)
    note = small.schema.get_field_index("note")
    large = small.set_column(note, small.schema.field(note), pa.array(["n" * (20 << 20)]))

    async def go_on_meanwhile(worker: EngineProcess) -> tuple[pa.Table, pa.Table]:
        """Both answers; the child reads nothing until this loop has turned twenty times."""
        child = psutil.Process(pid_of(worker.worker_id))
        child.suspend()
        last_resort = threading.Timer(PATIENCE_S / 3, child.resume)
        last_resort.start()
        answer = asyncio.ensure_future(worker.answer(large))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert child.status() == psutil.STATUS_STOPPED and not answer.done()
        last_resort.cancel()
        child.resume()
        return await answer, await worker.answer(small)

    with process_of(config) as worker:
        table, other = asyncio.run(go_on_meanwhile(worker))
    assert table["note"].to_pylist() == large["note"].to_pylist() and len(other) == 1


def test_killed_process_fails_all_its_pending_and_later_batches(make_job):
    config = make_job(token_rows(80), **LONG)
    with process_of(config) as worker:

        async def kill_in_the_middle() -> list:
            asked = [
                asyncio.ensure_future(worker.answer(batch))
                for batch in batches_of(config, batch_size=20)
            ]
            await asyncio.sleep(0.5)
            os.kill(pid_of(worker.worker_id), signal.SIGKILL)
            return await asyncio.gather(*asked, return_exceptions=True)

        errors = asyncio.run(kill_in_the_middle()) + answers_or_errors(
            worker, batches_of(config)[0]
        )  # one too late
    assert [str(error) for error in errors] == ["the engine's process was ended by signal 9"] * 5
    assert all(isinstance(error, ProcessEnded) for error in errors)


def test_a_process_that_dies_by_itself_is_said_too(fragile_worker, make_job):
    config = make_job([{"id": "a", "prompt_token_ids": KILLER}])
    with process_of(config) as worker:
        (error,) = answers_or_errors(worker, *batches_of(config))
    assert classify_error(error).line == "the engine's process was ended by signal 9"


def test_close_ends_a_process_that_hangs(make_job):
    with process_of(make_job(token_rows(1))) as worker:
        os.kill(pid_of(worker.worker_id), signal.SIGSTOP)
    assert is_gone(pid_of(worker.worker_id))


def test_close_ends_the_process_and_what_is_in_flight(make_job):
    config = make_job(token_rows(40), **LONG)

    async def close_in_the_middle(worker: EngineProcess) -> pa.Table:
        asked = asyncio.ensure_future(worker.answer(batches_of(config)[0]))
        await asyncio.sleep(0.2)
        worker.close()
        return await asked

    with process_of(config) as worker, pytest.raises(EngineError):
        asyncio.run(close_in_the_middle(worker))
    assert is_gone(pid_of(worker.worker_id))


def test_a_model_that_is_not_there_is_said_as_here(make_job, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = make_job(token_rows(1), **{"model.target": "nobody/nothing"})
    with pytest.raises(ConfigError) as here:
        Worker(*arguments_of(config))
    with pytest.raises(ConfigError) as there, process_of(config):
        pass
    assert str(there.value) == str(here.value) and type(there.value) is ConfigError


def test_a_pair_that_does_not_fit_is_said_as_here(make_job):
    config = make_job(
        token_rows(1), **{"model.draft": str(PAIR / "target"), "speculative.method": "eagle2"}
    )
    with pytest.raises((ConfigError, EngineError)) as here:
        Worker(*arguments_of(config))
    with pytest.raises((ConfigError, EngineError)) as there, process_of(config):
        pass
    assert classify_error(there.value) == classify_error(here.value)


def test_memory_that_is_too_small_is_this_workers_own_fault(fragile_worker, make_job):
    with pytest.raises(WorkerError) as found, process_of(make_job(token_rows(1), name=TOO_LARGE)):
        pass
    fault = classify_error(found.value)
    assert fault.is_local and fault.line.startswith(
        "its memory is too small (OutOfMemoryError: CUDA out of memory)"
    )


def test_gpu_without_room_for_the_model_is_a_local_fault(fragile_worker, make_job):
    with pytest.raises(WorkerError) as found, process_of(make_job(token_rows(1), name=TOO_SMALL)):
        pass
    assert classify_error(found.value) == Fault("the GPU has 24 GB", is_local=True)
    assert type(as_config_error(found.value)) is ModelUnusable


def test_what_killed_the_engine_is_told(fragile_worker, make_job):
    config = make_job([{"id": "a", "prompt_token_ids": GREEDY}])
    with process_of(config) as worker:
        (error,) = answers_or_errors(worker, *batches_of(config))
    assert (
        isinstance(error, EngineError) and "its memory is too small" in classify_error(error).line
    )


def test_a_bug_is_told_and_its_traceback_logged(fragile_worker, make_job, capfd):
    config = make_job(token_rows(1), name=IS_BUGGY)
    with process_of(config) as worker:
        (error,) = answers_or_errors(worker, *batches_of(config))
    assert isinstance(error, ClusterError) and str(error) == "a worker failed: KeyError: 'a bug'"
    assert "a batch cannot be answered\nTraceback" in capfd.readouterr().err


# A process that asks: prints the worker's process id, waits for its models where it should, and
# asks for ever.
ASKER = f"""
import signal, subprocess, sys
from pathlib import Path
from tests.support import workers as t
from tests.support.forked_popen import ForkedPopen
from tests.support.jobs import small_job, token_rows
signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.argv[2] != "importing":
    subprocess.Popen = ForkedPopen
config = small_job(Path(sys.argv[1]), token_rows(100), **{LONG | SILENT!r})
worker = t.EngineProcess(*t.arguments_of(config), on_log=t.ignore_line)
print(t.pid_of(worker.worker_id), flush=True)
if sys.argv[2] == "answering":
    worker.wait_until_ready()
    print("ready", flush=True)
t.answers_or_errors(worker, *t.batches_of(config))
"""


@contextmanager
def parent_process(directory: Path, does: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The process that asks, in a group of its own, and its worker's process id."""
    command = [sys.executable, "-c", ASKER, str(directory), does]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": os.getcwd()}, start_new_session=True, **pipes
    )
    try:
        worker = int(process.stdout.readline())
        if does == "answering":
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.15)  # somewhere in the middle
        yield process, worker
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("does", ["loading", "answering"])
def test_where_the_one_who_asks_is_killed_the_worker_ends(tmp_path, does):
    with parent_process(tmp_path, does) as (process, worker):
        assert not is_gone(worker)
        process.kill()
        wait_until(lambda: is_gone(worker))


@pytest.mark.parametrize(
    ("number", "does"),
    [
        (signal.SIGINT, "importing"),
        pytest.param(signal.SIGTERM, "importing", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "loading", marks=pytest.mark.slow),
        (signal.SIGTERM, "loading"),
        (signal.SIGINT, "answering"),
        pytest.param(signal.SIGTERM, "answering", marks=pytest.mark.slow),
    ],
)
def test_signals_to_both_end_both_without_a_word(tmp_path, number, does):
    with parent_process(tmp_path, does) as (process, worker):
        os.killpg(process.pid, number)
        wait_until(lambda: is_gone(worker))
        _, err = process.communicate(timeout=PATIENCE_S)
    wrong = [
        word for word in ("Traceback", "Error", "Interrupt", "stopped") if word in err
    ]  # a slow start may log more
    assert not wrong and process.returncode == -number, err


ALONE = """
import pickle, sys
from eagle_ray.batch.worker.actor import EngineActor
from eagle_ray.batch.worker.engine_process import EngineProcess
config, run, carried, plan, batch = pickle.load(sys.stdin.buffer)
worker = EngineProcess(config, run, carried, plan, on_log=repr)
worker.wait_until_ready()
import asyncio
table = asyncio.run(worker.answer(batch))
maps = open(f"/proc/{worker.worker_id.rpartition(':')[2]}/maps").read()
print(len(table), "torch" in sys.modules, "transformers" in sys.modules, "_raylet" in maps, "libtorch" in maps)
"""


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="Linux says which libraries a process has"
)
def test_who_asks_has_no_torch_and_who_answers_no_ray(make_job, monkeypatch):
    import pickle

    monkeypatch.undo()  # fresh interpreters
    config = make_job(token_rows(2))
    given = pickle.dumps((*arguments_of(config), *batches_of(config)))
    said = subprocess.run(
        [sys.executable, "-c", ALONE], input=given, capture_output=True, check=True
    ).stdout
    assert said.decode().split() == ["2", "False", "False", "False", "True"]


def test_what_a_worker_logs_while_it_starts_is_told_here(make_job, monkeypatch):
    monkeypatch.setattr(engine_process, "WORKER", workers.CLASS)
    told: list[LogLine] = []
    worker = EngineProcess(*arguments_of(make_job(token_rows(1), name=LOGS)), on_log=told.append)
    try:
        worker.wait_until_ready()
        assert LogLine(logging.INFO, LOGGED) in told
    finally:
        worker.close()
