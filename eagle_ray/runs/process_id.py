"""Process: an identity of a process on a machine, by which another process there can tell whether it still runs.

PIDs are reused, so a PID alone does not identify a process.

    >>> Process.current().is_gone()
    False
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Process:
    """started: start time as reported by the system, constant for its life. pids: the PID namespace."""

    host: str
    pids: str
    pid: int
    started: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Process:
        """Return the process of a record, which a newer version may have written with more in it."""
        return cls(**{each.name: record[each.name] for each in fields(cls)})

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), _pid_namespace(), os.getpid(), _start_time(os.getpid()))

    def is_gone(self) -> bool | None:
        """Return whether the process has ended; None if it runs, or ran, elsewhere."""
        if (self.host, self.pids) != (socket.gethostname(), _pid_namespace()):
            return None
        return _start_time(self.pid) != self.started


def process_name(pid: int) -> str:
    """Return the name of a process of this machine, as in rows and messages."""
    return f"{socket.gethostname()}:{pid}"


def _pid_namespace() -> str:
    """Return the PID namespace: containers may share a host's name but not its processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _start_time(pid: int) -> str | None:
    """Return the start time, or None if there is no such process or only a zombie."""
    if not Path("/proc/self/stat").exists():  # macOS
        output = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
        return output.strip() or None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]  # in ticks since the machine started
