"""The process that a driver starts before Ray: it checks the models, and engines' processes are forked from it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eagle_ray.assembly.hub import check_models
from eagle_ray.batch.worker import spare_engine
from eagle_ray.batch.worker.engine_process import EngineProcess, ProcessEnded
from eagle_ray.batch.worker.spare_engine import ForkedProcess, SpareEngine, fork_engine
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError
from tests.support.jobs import token_rows
from tests.support.workers import (
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
# A driver that has torch already, and starts a process that checks the models all the same.
DRIVER = """
import os, pickle, signal, subprocess, sys
from eagle_ray.batch.worker import spare_engine
from tests.support.forked_popen import ForkedPopen
spare_engine.has_torch = lambda: False
subprocess.Popen = ForkedPopen
spare = spare_engine.SpareEngine()
spare.start(pickle.load(open(sys.argv[1], "rb")))
print(spare.pid, flush=True)
sys.stdin.read(1)
"""


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpareEngine]:
    monkeypatch.setattr(spare_engine, "has_torch", lambda: False)
    with SpareEngine() as spare:
        yield spare


def test_engines_forked_for_actors_answer_and_outlive_the_driver(
    spare, make_job, tmp_path, monkeypatch
):
    config = make_job(token_rows(6))
    monkeypatch.setattr(os, "nice", lambda by: 15)  # as Ray's actors are
    monkeypatch.setattr(spare_engine, "MEMORY_SCORE", tmp_path / "score")
    (tmp_path / "score").write_text("900\n")
    spare.start(config)
    spare.check_models()
    first, second = (
        EngineProcess(*arguments_of(config), ignore_line, child=fork_engine(spare.address))
        for _ in range(2)
    )
    for engine in (first, second):
        engine.wait_until_ready()
    niceness = [psutil.Process(pid).nice() for pid in (spare.pid, pid_of(second.worker_id))]
    assert niceness == [psutil.Process().nice(), 15]
    assert Path(f"/proc/{pid_of(second.worker_id)}/oom_score_adj").read_text() == "900\n"
    assert len({spare.pid, pid_of(first.worker_id), pid_of(second.worker_id)}) == 3
    os.kill(pid_of(first.worker_id), signal.SIGKILL)
    (error,) = answers_or_errors(first, *batches_of(config))
    assert (
        isinstance(error, ProcessEnded)
        and str(error) == "the engine's process was ended by signal 9"
    )
    spare.close()
    wait_until(lambda: is_gone(spare.pid))
    (table,) = answers_or_errors(second, *batches_of(config))
    assert outputs(table.to_pylist()) == outputs(answers(config))
    for engine in (first, second):
        engine.close()
    wait_until(lambda: is_gone(pid_of(second.worker_id)))


def test_spare_engine_refuses_models_and_ends_with_the_driver(spare, make_job, tmp_path):
    config = make_job(token_rows(1), **{"model.target": str(tmp_path)})
    with pytest.raises(ConfigError) as here:
        check_models(config.model, config.speculative)
    spare.start(config)
    with pytest.raises(ConfigError) as there:
        spare.check_models()
    assert str(there.value) == str(here.value)
    spare.close()
    wait_until(lambda: is_gone(spare.pid))
    assert fork_engine(spare.address) is None


def test_its_end_before_the_models_are_checked_is_no_defect(spare, make_job):
    spare.start(make_job(token_rows(1)))
    os.kill(spare.pid, signal.SIGKILL)
    with pytest.raises(
        ClusterError, match=r"checks the models was ended by signal 9\. Run the same command again"
    ):
        spare.check_models()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("spare.close()", marks=pytest.mark.slow),
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_it_ends_with_its_driver_although_a_check_takes_long(make_job, tmp_path, end):
    os.mkfifo(tmp_path / "config.json")  # a file that is never read to its end
    config = make_job(token_rows(1), **{"model.target": str(tmp_path)})
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    driver = subprocess.Popen(
        [sys.executable, "-c", f"{DRIVER}{end}\nsys.stdin.read()", str(tmp_path / "config")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(driver.stdout.readline())
    with open(tmp_path / "config.json", "w"):  # opens once the check reads it
        driver.stdin.write("1")
        driver.stdin.flush()
        wait_until(lambda: is_gone(pid))
    driver.kill()
    driver.wait()


def test_without_a_spare_process_there_is_nothing_to_fork_engine():
    assert (
        fork_engine(None) is None
        and fork_engine("eagle-ray-no-such-name") is None
        and SpareEngine().address is None
    )


def test_process_with_a_reused_pid_is_not_killed():
    ended, other = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    )
    forked = ForkedProcess(ended.pid)
    forked.kill()
    assert ended.wait() == -signal.SIGKILL
    forked.pid = other.pid  # as if the system had reused it
    forked.kill()
    other.communicate(b"\n")
    assert other.returncode == 0
