"""Ray clusters on this machine: of several nodes with fake GPUs, or a head by the command, and jobs on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment
from eagle_ray.config import JobConfig

MODEST = {
    "num_cpus": 1,
    "object_store_memory": 100 << 20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}
ON_FAKE_GPUS = {"model.device": "cpu", "execution.gpus_per_actor": 1}


@contextmanager
def cluster_of(num_workers: int) -> Iterator:
    """A head without a GPU and workers with one each; what was started is ended."""
    prepare_ray_environment(LOCAL)
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args=MODEST | {"dashboard_agent_listen_port": 0}
    )
    try:
        for _ in range(num_workers):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster, kind: str | None = None):
    resources = {"resources": {f"accelerator_type:{kind}": 1}} if kind else {}
    return cluster.add_node(**MODEST | {"num_gpus": 1} | resources)


def start_run(config: JobConfig, directory: Path, *flags: str) -> subprocess.Popen:
    """``eagle-ray run`` in a process of its own."""
    (directory / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [
        sys.executable,
        "-m",
        "eagle_ray.cli",
        "run",
        "-c",
        str(directory / "job.yaml"),
        *flags,
    ]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def raylet_of(node) -> int:
    return node.all_processes["raylet"][0].process.pid


PATIENCE_S = 180


@contextmanager
def head_in(directory: Path, **environment: str) -> Iterator[str]:
    """The dashboard's URL; who asks it inherits the token. Ended by its own process."""
    port, dashboard, client = free_port(), free_port(), free_port()
    (token := directory / "token").write_text("0123456789abcdef" * 2)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": os.getcwd()}
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
    ]
    command += [
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        "--num-cpus=2",
    ]
    command += [
        "--object-store-memory=104857600",
        "--include-dashboard=true",
        "--dashboard-agent-listen-port=0",
    ]
    command += [f"--ray-client-server-port={client}", f"--temp-dir={directory}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or listens(dashboard))
        assert process.poll() is None, (directory / "log").read_text()
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        monkeypatch.undo()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)
