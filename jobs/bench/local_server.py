"""`eagle-ray serve` as users run it, in a process of its own, for the jobs that load it.

with Served(["--set", "serving.slots=64"]) as served:
    served.until_ready()
    print(served.url, served.processes())
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "serve_demo.yaml"
TITLES = {
    "replica": "ServeReplica:eagle-ray:engine",
    "proxy": "ProxyActor",
    "controller": "ServeController",
}
TITLES |= {
    "metrics": "ServeReplica:eagle-ray:metrics",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
}
ENDS_WITHIN_S = 90.0


class Served:
    """A server on a free port of this machine, with a Ray of its own; it ends with the block."""

    def __init__(self, flags: list[str], environment: dict[str, str] | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = tempfile.TemporaryDirectory(prefix="served-")
        command = [
            sys.executable,
            "-m",
            "eagle_ray.cli",
            "serve",
            "-c",
            str(CONFIG),
            "--port",
            str(self.port),
        ]
        command += ["--set", "serving.ray_address=local", *flags]
        given = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=given, stderr=log)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(ENDS_WITHIN_S)
        self._directory.cleanup()

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return Path(self._directory.name) / "log"

    def until_ready(self, seconds: float = 120.0) -> None:
        """Raises RuntimeError with the server's own words where it does not get there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.text("/health")
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"no server: {self.log}")

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def metrics(self) -> dict[str, float]:
        """/metrics by name and labels, without our prefix."""
        lines = [
            line.rsplit(" ", 1)
            for line in self.text("/metrics").splitlines()
            if not line.startswith("#")
        ]
        return {name.removeprefix("eagle_ray_"): float(value) for name, value in lines}

    def processes(self) -> dict[str, list[int]]:
        """Process ids by what they are, of those in TITLES, and "driver"."""
        titles: dict[int, str] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # gone meanwhile
                titles[child.pid] = " ".join(child.cmdline())
        found = {
            name: [pid for pid, title in titles.items() if part in title]
            for name, part in TITLES.items()
        }
        return found | {"driver": [self.process.pid]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
