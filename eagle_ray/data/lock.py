"""The lock of an output directory: one driver at a time.

Locally the system's own, which dies with its process. In a bucket a lease: an object that its holder writes anew every
few seconds, each time by compare-and-swap. Whoever finds one watches it by his own clock, since no two machines agree
on the time: one that changes is alive and he is refused; one that stays the same for the lease's time is taken over.
A holder that could not write for most of that time stops its job. Does not know runs, attempts or rows.

    >>> with lock_output(Location.of("s3://bucket/runs/a")):
    ...     ...
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from uuid import uuid4

from eagle_ray.data.interrupts import interrupt
from eagle_ray.data.record import naming_output
from eagle_ray.data.stops import OutputBusy, Overtaken
from eagle_ray.data.storage import Location, Stamp, json_bytes

log = logging.getLogger("eagle_ray")
LOCK = "_lock"
LEASE_S = 30.0  # a lease that stays the same for so long is stale
BEAT_S = 5.0
GIVE_UP_S = 22.0  # a holder that could not beat for so long stops, before anybody can take over
LOOK_S = 1.0
FREE = json_bytes({"holder": None, "token": None, "beat": 0})


def lock_output(output: Location) -> AbstractContextManager[None]:
    """Hold the output directory, made where it is missing; raises OutputBusy where another driver holds it.

    Leaving raises Overtaken where the lock was lost on the way; the main thread was interrupted then.
    """
    return _file_lock(output) if output.is_local else _lease(output)


@contextmanager
def _file_lock(output: Location) -> Iterator[None]:
    """The system frees the lock when the driver dies, however it dies."""
    path = str(output / LOCK)
    with naming_output(output):
        output.make_directory()
        open(path, "ab").close()
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _busy(output, file.read().strip()) from None
        with naming_output(output):
            file.truncate(0)
            os.write(file.fileno(), _myself().encode())  # at once: what a full disk refuses, close would try again
        yield


@contextmanager
def _lease(output: Location) -> Iterator[None]:
    with naming_output(output):
        output.check_writable()  # a server that ignores conditions has no lease to give
        lease = Lease(output)
        lease.take()
    with lease:
        yield


class Lease:
    """A lock object in a bucket; while it is open one thread keeps it and another watches the clock.

    The object is never deleted: released, it names no holder, so that every change is a compare-and-swap.
    """

    def __init__(self, output: Location):
        self._output, self._file, self._token = output, output / LOCK, uuid4().hex
        self._version: int | str = ""
        self._written_at, self._beats, self._lost = 0.0, 0, ""
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._keep, self._watch)]

    def take(self) -> None:
        """Waits for a silent holder's lease to go stale; raises OutputBusy as soon as the holder is seen alive."""
        first: Stamp | None = None
        while not self._write(None):
            found, stamp = self._read()
            if found["holder"] is None:
                if self._write(stamp):
                    return
                continue
            if first is None:
                first, since = stamp, time.monotonic()
                log.info("%s is held by %s: waiting %.0f s for a sign of life", self._output, found["holder"], LEASE_S)
            if stamp != first:
                raise _busy(self._output, found["holder"])
            if time.monotonic() - since >= LEASE_S and self._write(stamp):
                log.info("no sign of life: taken over")
                return
            time.sleep(LOOK_S)

    def __enter__(self) -> Lease:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(BEAT_S)
        if self._lost:
            raise Overtaken(self._lost) from None
        with suppress(OSError):  # it goes stale by itself
            self._file.replace(FREE, self._version)

    def _keep(self) -> None:
        while not self._closing.wait(BEAT_S):
            with suppress(OSError):  # the next beat may fare better; the watch has the last word
                found, stamp = self._read()
                if found["token"] != self._token or not self._write(stamp):
                    self._lose(f"{found['holder'] or 'somebody'} has taken {self._output} over")

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            if time.monotonic() - self._written_at > GIVE_UP_S:
                self._lose(f"{self._file} could not be written for {GIVE_UP_S:.0f} s")

    def _write(self, stamp: Stamp | None) -> bool:
        """Make the lease ours where it is still what was read; None: where there is none."""
        began, self._beats = time.monotonic(), self._beats + 1  # no two beats are the same: each has its own ETag
        content = json_bytes({"holder": _myself(), "token": self._token, "beat": self._beats})
        written = self._file.create(content) if stamp is None else self._file.replace(content, stamp.version)
        if written is not None:
            self._version, self._written_at = written.version, began
        return written is not None

    def _lose(self, reason: str) -> None:
        if not self._closing.is_set():
            self._lost = f"{reason}: this driver stops"
            self._closing.set()
            interrupt()

    def _read(self) -> tuple[dict[str, Any], Stamp]:
        data, stamp = self._file.read_stamped()
        try:
            return json.loads(data), stamp
        except ValueError:  # nobody of ours: watched like any other
            return {"holder": "somebody", "token": None}, stamp


def _busy(output: Location, holder: str) -> OutputBusy:
    return OutputBusy(f"{output} is being written by {holder or 'another driver'}: wait for it to end")


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
