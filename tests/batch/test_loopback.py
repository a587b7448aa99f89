"""A job on this machine: nothing that it starts, Ray's processes included, is reachable from another machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from eagle_ray.batch.cluster import _check_loopback
from eagle_ray.batch.job_errors import ClusterError
from eagle_ray.batch.ray_environment import LOCAL, LOOPBACK_VARIABLES, prepare_ray_environment
from tests.batch.nodes import start_run
from tests.conftest import small_job, token_rows
from tests.helpers.processes import Watched

RAYS = ("gcs_server", "raylet", "ray::MapWorker(MapBatches(EngineActor))", "ray::DashboardAgent")


def start_demo(directory: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "eagle_ray.cli", "demo", "-o", str(directory / "out")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_small_run(directory: Path) -> subprocess.Popen:
    return start_run(small_job(directory, token_rows(8), **{"execution.ray_address": "local"}), directory)


@pytest.mark.parametrize(
    "start", [pytest.param(start_small_run, id="run"), pytest.param(start_demo, id="demo", marks=pytest.mark.slow)]
)
def test_every_process_of_a_job_listens_on_loopback_alone(start, tmp_path, monkeypatch):
    watched = Watched()
    monkeypatch.setenv(*watched.environment.popitem())
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")  # would put Ray on the machine's own address
    process = start(tmp_path)
    try:
        watched.look_until(lambda: any((tmp_path / "out" / "data").glob("*.parquet")), process)
        assert list((tmp_path / "out" / "data").glob("*.parquet")), process.communicate()
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert watched.beyond_loopback() == {}
    assert all(watched.listeners_of(part) for part in RAYS), watched.seen


def test_a_local_ray_is_kept_on_loopback_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    prepare_ray_environment("10.0.0.1:6379")
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    prepare_ray_environment(LOCAL)
    assert os.environ.items() >= LOOPBACK_VARIABLES.items()


def test_a_local_ray_on_another_address_is_ended_and_refused(monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(ClusterError, match=r"Ray listens on 10\.9\.8\.7 instead of 127\.0\.0\.1"):
        _check_loopback("10.9.8.7")
    _check_loopback("127.0.0.1")
    assert ended == [True]
