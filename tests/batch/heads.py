"""A Ray head on loopback in a process of its own, as `ray start` makes it, with a dashboard and a token."""

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
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=2"]
    command += ["--object-store-memory=104857600", "--include-dashboard=true", "--dashboard-agent-listen-port=0"]
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
