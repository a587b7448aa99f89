"""A peer of `peers.py`, asked in a process of its own: it can be stopped, and takes nothing down with it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from jobs.bench.gpu.device_checks import type_name
from jobs.bench.gpu.settings import GpuBenchSettings

MOST_SAID = 300  # characters of an error


def asked_peer(peer: str, shape: str, batch: int, settings: GpuBenchSettings, limit_s: float) -> dict[str, Any]:
    """What `jobs/bench/gpu --peer` prints, or under `failed` why it has not answered within limit_s."""
    about = {"peer": peer, "shape": shape, "batch": batch}
    asked = [sys.executable, "-m", "jobs.bench.gpu", "--peer", peer, "--peer-shape", shape, "--peer-batch", str(batch)]
    asked += ["--dtype", type_name(settings.dtype), "--device", settings.device.type]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return about | {"failed": f"no answer in {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return about | {"failed": (done.stderr.strip().splitlines() or ["no answer"])[-1][:MOST_SAID]}
    return about | json.loads(lines[-1])
