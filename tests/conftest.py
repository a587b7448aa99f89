"""Fixtures of all tests: one Ray session, an S3 server, and small jobs over the goldens' pair."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch: threads that spin take the cores of other workers

import pytest
import torch

from eagle_ray.batch.driver.ray_environment import (
    LOCAL,
    LOOPBACK_VARIABLES,
    prepare_ray_environment,
)
from eagle_ray.batch.worker.spare_engine import SpareEngine
from tests.support.brief_costs import measure_briefly
from tests.support.extent import VARIABLE
from tests.support.jobs import SPARE, MakeJob, small_job
from tests.support.messages import messages  # noqa: F401
from tests.support.s3 import bucket, outside, s3_server  # noqa: F401
from tests.support.warm_python import WarmPopen, warm_python  # noqa: F401
from tests.support.warm_ray import warm_workers

pytest_plugins = ["tests.support.lanes", "tests.support.durations"]
gc.disable()  # until all tests are collected: nothing of what is imported and collected becomes garbage
sys.dont_write_bytecode = (
    False  # or each process would compile the package and rewrite the tests again
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if (
    not torch.cuda.is_available()
):  # tests/kernels: Triton looks at it when it is imported, which torch may do any time
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.update(LOOPBACK_VARIABLES)  # before any test module imports Ray, which reads it then
torch.set_num_threads(1)  # small matrices: more threads only wait for each other
# A shell's background jobs inherit a SIGINT that is ignored, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Let tests/support/extent.py know whether slow tests run: before test modules are imported."""
    if config.getoption("markexpr") != "not slow":
        os.environ[VARIABLE] = "1"


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make only."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures, which make random weights, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test random numbers of its own, the same in every run: what fails in CI fails again here."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(autouse=True)
def untouched_log() -> None:
    """Jobs and libraries set the log up as they need it: each test finds it as Python makes one."""
    logging.disable(logging.NOTSET)
    log = logging.getLogger("eagle_ray")
    log.setLevel(logging.NOTSET)
    log.propagate, log.disabled, log.handlers[:] = True, False, []


@pytest.fixture(scope="session", autouse=True)
def costs_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What steps cost under test is nobody else's business, and is measured for a moment."""
    measure_briefly()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_RAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def s3_endpoint() -> Iterator[str]:
    """Where tests/batch/s3 starts its server; in the environment from the start, so that Ray's workers have it."""
    with socket.socket() as found, pytest.MonkeyPatch.context() as patch:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(
            ("127.0.0.1", 0)
        )  # to the end: nothing else gets the port, and the server may bind to it as well
        endpoint = f"http://127.0.0.1:{found.getsockname()[1]}"
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        values = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
        for name, value in {**values, "ENDPOINT_URL": endpoint}.items():
            patch.setenv(f"AWS_{name}", value)
        yield endpoint


@pytest.fixture(scope="session")
def ray_session(s3_endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray for the whole session: it takes seconds to start. Ends only what it started."""
    prepare_ray_environment(LOCAL)
    import ray

    from eagle_ray.batch.driver import cluster

    options = {
        "num_cpus": 2,
        "object_store_memory": 100 << 20,
        "_system_config": {
            "metrics_report_interval_ms": 1000,
            "worker_niceness": 0,
        },  # what tests wait for
    }

    def start() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster, "LOCAL_OPTIONS", cluster.LOCAL_OPTIONS | options)
            cluster.connect(LOCAL)  # never a cluster that happens to run on this machine

    with spare_engine(tmp_path_factory.mktemp("spare")), warm_workers(start):
        yield
        ray.shutdown()


@contextmanager
def spare_engine(directory: Path) -> Iterator[None]:
    """Fork the engines of all jobs in this process from one that has imported torch: it takes seconds of CPU."""
    with SpareEngine() as spare, pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as start:
            start.setattr("eagle_ray.batch.worker.spare_engine.has_torch", lambda: False)
            start.setattr(subprocess, "Popen", WarmPopen)
            spare.start(small_job(directory))
        patch.setattr(SpareEngine, "address", spare.address)
        patch.setenv(SPARE, str(spare.address))
        yield


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """small_job in the test's own directory: make_job(rows, **{"sampling.n": 2})."""
    return partial(small_job, tmp_path)
