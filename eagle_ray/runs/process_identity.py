"""Process: identify a process on a machine, and tell whether it still runs.

    >>> Process.current().is_gone()
    False

PIDs are reused and containers may share a host's name, so neither identifies a process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

# Seconds by which two readings of a process's start time may differ: the system rounds them.
SAME_START_S = 1.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """Identity of a process, from which another process on the machine can tell whether it still runs.

    Attributes:
        pids: the PID namespace, since containers may share a host's name but not its processes.
        started: start time in ticks since the machine's start; None if the process had already
            ended.

        >>> Process.current().is_gone()
        False
    """

    host: str
    pids: str
    pid: int
    started: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Process:
        """Parse a process from a record. Keys that a newer version may have added are ignored."""
        return cls(**{each.name: record[each.name] for each in fields(cls)})

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), _pid_namespace(), os.getpid(), _start_time(os.getpid()))

    def is_gone(self) -> bool | None:
        """Return whether the process has ended, or None if this machine cannot tell."""
        if (self.host, self.pids) != (socket.gethostname(), _pid_namespace()):
            return None
        now = _start_time(self.pid)
        if now is None or self.started is None:
            return now != self.started
        try:
            return abs(int(now) - int(self.started)) > SAME_START_S * TICKS_PER_S
        except ValueError:  # a date: macOS, of an earlier version
            return None


def process_name(pid: int) -> str:
    """Return the name of a process of this machine, as in rows and messages."""
    return f"{socket.gethostname()}:{pid}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _start_time(pid: int) -> str | None:
    """Return the start time, or None if there is no such process or only a zombie."""
    try:
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return (
            None
            if has_ended
            else str(round((process.create_time() - psutil.boot_time()) * TICKS_PER_S))
        )
    except psutil.NoSuchProcess:
        return None


def boot_id() -> str:
    """Return Linux's identifier of this boot of the machine, since machines may share a host name.
    Empty on other systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
