"""--keep-going: what is transient is started again in a new process, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import duckdb
import pytest

from eagle_ray.batch.driver import auto_restart as driver
from eagle_ray.batch.driver.auto_restart import delay_s
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.cli import main as cli
from eagle_ray.config.job import RestartsConfig
from eagle_ray.runs.job_errors import TRANSIENT, RunResult
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import PAIR, token_rows
from tests.support.processes import children_of, is_running

COMMAND = [sys.executable, "-m", "eagle_ray.cli", "run", "--keep-going"]
PATIENCE_S = 300


@pytest.fixture
def flags(tmp_path) -> list[str]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(24)))
    settings = {
        "model.target": PAIR / "target",
        "speculative.method": "none",
        "sampling.max_tokens": 80,
        "execution.slots": 1,
        "execution.rows_per_file": 1,
        "execution.ray_address": "local",
        "execution.restarts": "{limit: 1, backoff_s: 0.2}",
        "on_finish.command": json.dumps(["sh", "-c", f"cat >> {tmp_path}/told"]),
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out", *sets]


def start(*flags: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [*COMMAND, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[1]
        time.sleep(0.05)


def no_cluster() -> list[str]:
    """Settings of a cluster that does not answer: nothing listens at its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return ["--set", f"execution.ray_address=127.0.0.1:{server.getsockname()[1]}"]


def test_restart_delay_doubles_up_to_a_limit_with_jitter():
    restarts = RestartsConfig(backoff_s=2.0, max_backoff_s=60.0)
    for number, longest in enumerate([2, 4, 8, 16, 32, 60, 60]):
        waits = {delay_s(restarts, number) for _ in range(200)}
        assert len(waits) > 1 and longest / 2 <= min(waits) <= max(waits) <= longest
    assert delay_s(restarts, 10_000) <= 60


def here(capfd, *flags: str) -> tuple[int, str]:
    """Return the exit code and what was said of the command in this process; attempts are processes of their own."""
    code = cli.main(["run", "--keep-going", *flags])
    return code, capfd.readouterr().err


def test_transient_end_is_restarted_to_the_limit_and_reported(flags, tmp_path, capfd, warm_python):
    code, said = here(capfd, *flags, *no_cluster())
    assert code == 5, said
    assert said.count("reading the input") == 2
    assert said.count("eagle-ray: restart 1 of 1 in ") == said.count("eagle-ray: restart ") == 1
    assert "because of: execution.ray_address: nothing answers" in said
    assert "giving up after 1 restarts in a row that added no file" in said
    told = json.loads((tmp_path / "told").read_text())
    assert (told["exit_code"], told["outcome"], told["restarts"]) == (5, "transient", 1)


@pytest.mark.parametrize("more, code", [([], 2), (["--exit-zero-if-permanent"], 0)])
def test_a_permanent_end_is_not_restarted(flags, tmp_path, more, code, capfd, warm_python):
    ended, said = here(capfd, *flags, "-i", "/nowhere/*.jsonl", *more)
    assert ended == code and "restart" not in said and said.count("reading the input") == 1
    told = json.loads((tmp_path / "told").read_text())
    assert (told["restarts"], told["exit_code"]) == (0, 2)


def test_a_busy_output_is_not_waited_for(flags, tmp_path, capfd, warm_python):
    with hold_output(StoragePath.of(tmp_path / "out")):
        code, said = here(capfd, *flags)
    assert code == 7 and "is being written by process" in said and "restart" not in said


@pytest.fixture
def heard_sighup() -> Iterator[None]:
    """What this process starts inherits a SIGHUP that nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard_sighup")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_the_wait_for_a_restart_can_be_interrupted(flags, tmp_path, number):
    run = start(*flags, *no_cluster(), "--set", "execution.restarts.backoff_s=300")
    for line in run.stderr:
        if "restart 1 of 1" in line:
            break
    run.send_signal(number)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and "Traceback" not in said, said
    assert json.loads((tmp_path / "told").read_text())["outcome"] == "interrupted"


def test_an_interrupt_that_logging_swallows_ends_the_wait(monkeypatch):
    def swallow(*line: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(driver.log, "warning", swallow)
    with pytest.raises(KeyboardInterrupt), interruptible():
        driver.wait_before_restart(RunResult(TRANSIENT, "lost"), RestartsConfig(backoff_s=300), 0)


@pytest.mark.slow
def test_interrupt_ends_an_attempt_and_a_dead_parent_its_child(flags, tmp_path):
    run = start(*flags)
    data = tmp_path / "out" / "data"
    wait_for(lambda: list(data.glob("*.parquet")), run)
    [child] = children_of(run.pid)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 130 and "eagle-ray: interrupted" in said and "restart" not in said
    assert not is_running(child)

    run = start(*flags)
    made = len(list(data.glob("*.parquet")))
    wait_for(lambda: len(list(data.glob("*.parquet"))) > made, run)
    [child] = children_of(run.pid)
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + 120
    while is_running(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet", "driver"])
def test_killed_ray_or_driver_is_restarted_with_each_id_once(flags, tmp_path, name):
    """Although the command says --overwrite: what the first attempt made stays."""
    run = start(*flags, "--overwrite")
    data = tmp_path / "out" / "data"
    wait_for(lambda: len(list(data.glob("*.parquet"))) > 2, run)
    [driver] = children_of(run.pid)
    victims = [pid for pid in children_of(driver) if name in os.path.realpath(f"/proc/{pid}/exe")]
    [victim] = [driver] if name == "driver" else victims
    os.kill(victim, signal.SIGKILL)
    kept = {file.name for file in data.glob("*.parquet")}
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said
    assert said.count("eagle-ray: restart 1 of 1 in ") == 1
    assert kept <= {file.name for file in data.glob("*.parquet")}
    rows = duckdb.sql(
        f"select count(*), count(distinct request_id) from '{data}/*.parquet'"
    ).fetchall()
    assert rows == [(24, 24)] and (tmp_path / "out" / "_SUCCESS").exists()
    told = json.loads((tmp_path / "told").read_text())
    assert (told["exit_code"], told["restarts"], told["rows"]) == (0, 1, 24)


def test_child_of_a_parent_that_already_died_ends_at_once():
    """PID 1 adopts such a child, so its parent is not the one that it was started by."""
    module = "eagle_ray.core.child_process"
    child = f"from {module} import end_with_parent\nend_with_parent(2**22 + 1, {signal.SIGTERM:d})\nprint('still here')"
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM and ended.stdout == ""
