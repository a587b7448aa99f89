"""A job on this machine: nothing that it starts, Ray's processes included, is reachable from another machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from eagle_ray.batch.driver import ray_environment
from eagle_ray.batch.driver.cluster import ModulePath, check_loopback
from eagle_ray.batch.driver.ray_environment import (
    LOCAL,
    LOOPBACK_VARIABLES,
    MAX_TMPDIR_BYTES,
    prepare_ray_environment,
    temporary_directory,
    user_environment,
)
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import ClusterError
from tests.support.clusters import start_run
from tests.support.jobs import small_job, token_rows
from tests.support.processes import ListenerWatch

RAYS = ("gcs_server", "raylet", "ray::MapWorker(MapBatches(EngineActor))", "ray::DashboardAgent")
UNUSED = ("monitor.py", "dashboard.py")  # of Ray: the autoscaler and the API server


def start_demo(directory: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "eagle_ray.cli", "demo", "-o", str(directory / "out")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def start_small_run(directory: Path) -> subprocess.Popen:
    return start_run(
        small_job(directory, token_rows(8), **{"execution.ray_address": "local"}), directory
    )


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start_small_run, id="run", marks=pytest.mark.slow),
        pytest.param(start_demo, id="demo", marks=pytest.mark.slow),
    ],
)
def test_every_process_of_a_job_listens_on_loopback_alone(start, tmp_path, monkeypatch):
    watched = ListenerWatch()
    monkeypatch.setenv(*watched.environment.popitem())
    monkeypatch.setenv(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1"
    )  # would put Ray on the machine's own address
    process = start(tmp_path)
    try:
        watched.look_until(lambda: any((tmp_path / "out" / "data").glob("*.parquet")), process)
        assert list((tmp_path / "out" / "data").glob("*.parquet")), process.communicate()
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), (
            "the driver takes seconds to import it"
        )
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert watched.beyond_loopback() == {}
    assert all(watched.listeners_of(part) for part in RAYS), watched.seen
    assert not any(watched.listeners_of(part) for part in UNUSED), watched.seen


def test_local_ray_listens_on_loopback_whatever_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    prepare_ray_environment("10.0.0.1:6379")
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    prepare_ray_environment(LOCAL)
    assert os.environ.items() >= LOOPBACK_VARIABLES.items()


@pytest.mark.parametrize(("host", "is_alone"), [("127.0.0.1", True), ("", False)])
def test_a_head_on_loopback_alone_is_joined_there(monkeypatch, host, is_alone):
    """Ray would take its address for the machine's own, where nothing answers."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    monkeypatch.setattr(ray_environment, "own_host", lambda: "127.0.0.2")
    with socket.create_server((host, 0)) as server:
        prepare_ray_environment(f"127.0.0.1:{server.getsockname()[1]}")
    assert (os.environ.items() >= LOOPBACK_VARIABLES.items()) == is_alone


def test_long_tmpdir_is_replaced_and_long_ray_tmpdir_is_refused(tmp_path):
    long = str(tmp_path / ("x" * MAX_TMPDIR_BYTES))
    assert temporary_directory({}) == temporary_directory({"TMPDIR": long}) == "/tmp"
    fits = "/tmp/" + "x" * (MAX_TMPDIR_BYTES - len("/tmp/"))
    assert temporary_directory({"TMPDIR": fits}) == fits
    with pytest.raises(
        ConfigError,
        match=rf"^RAY_TMPDIR: {long} has .* room for {MAX_TMPDIR_BYTES}. Set RAY_TMPDIR",
    ):
        temporary_directory({"RAY_TMPDIR": long, "TMPDIR": "/tmp"})
    with pytest.raises(
        ConfigError, match=r"^RAY_TMPDIR: /dev/null/ray cannot be written. Set RAY_TMPDIR"
    ):
        temporary_directory({"RAY_TMPDIR": "/dev/null/ray"})


@pytest.fixture
def no_token(monkeypatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_TMPDIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray_environment, "variables_before", {})


@pytest.mark.parametrize("home", ["/dev/null", "writable", "of a user with a token"])
def test_a_local_ray_leaves_no_token_in_the_home_directory(no_token, monkeypatch, tmp_path, home):
    monkeypatch.setenv("HOME", home if home.startswith("/") else str(tmp_path))
    if has_token := home == "of a user with a token":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("theirs")
    prepare_ray_environment(LOCAL)
    assert ("RAY_AUTH_TOKEN" in os.environ) == (not has_token)  # Ray makes a file if it finds none


def test_a_hook_of_the_user_gets_the_environment_of_the_user(no_token, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    before = dict(os.environ)
    prepare_ray_environment(LOCAL)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # by Ray, once it starts
    assert os.environ["RAY_AUTH_TOKEN"] and user_environment() == before


def test_workers_of_ray_do_not_look_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/scripts", *sys.path])
    directories = ModulePath()
    directories.extend(["/scripts", str(tmp_path)])  # as Ray does
    assert directories == ["/scripts"]


def test_a_local_ray_on_another_address_is_ended_and_refused(monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(ClusterError, match=r"Ray listens on 10\.9\.8\.7 instead of 127\.0\.0\.1"):
        check_loopback("10.9.8.7")
    check_loopback("127.0.0.1")
    assert ended == [True]
