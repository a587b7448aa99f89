"""A command in a process of its own, and the sockets on which anything that it starts listens."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

import psutil

from eagle_ray.serve.access import Listener, listeners

MARK = "EAGLE_RAY_TEST_MARK"  # inherited, so that processes are found after their parent has ended


class ListenerWatch:
    """Listeners by the title of their process; the command must be started with ``environment``."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self.seen: dict[str, set[Listener]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return dict([self._mark.split("=")])

    def look(self, pid: int) -> None:
        """Add what listens now, of a process and of all that it started."""
        pids = {pid, *descendants(pid), *self._marked()}
        for listener in listeners(pids):
            self.seen.setdefault(title_of(listener.pid), set()).add(listener)

    def look_until(
        self, condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 240.0
    ) -> None:
        deadline = time.monotonic() + seconds
        while process.poll() is None and not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.look(process.pid)
            time.sleep(0.5)

    def listeners_of(self, part: str) -> set[Listener]:
        """Return the listeners of the processes whose title contains the part."""
        return {listener for title, some in self.seen.items() if part in title for listener in some}

    def beyond_loopback(self) -> dict[str, list[str]]:
        found = {
            title: [str(one) for one in some if not one.is_loopback]
            for title, some in self.seen.items()
        }
        return {title: some for title, some in found.items() if some}

    def running(self) -> set[int]:
        """Return the processes that inherited the mark and have not ended, zombies left out."""
        return {pid for pid in self._marked() if is_running(pid)}

    def _marked(self) -> set[int]:
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is not ours
                if self.environment.items() <= process.environ().items():
                    found.add(process.pid)
        return found - {os.getpid()}


def descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def parent_of(pid: int) -> int:
    """An engine's is its actor, whose own is its node's raylet."""
    return psutil.Process(pid).ppid()


def is_running(pid: int) -> bool:
    """A zombie does not run; who reaps it is not a test's business."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def title_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return "ended"
