"""The lock of an output directory: one driver at a time.

Locally it is a file lock of the operating system, which ends with its process. In a bucket it is a lease: an object
that its holder rewrites every few seconds (heartbeat). Every change of that object is a compare-and-swap on the
version that was read.

A driver that finds a lease watches it by its own clock, since no two machines agree on the time. One change may be a
late PUT of a dead holder, so it only restarts the clock; a second change proves a live holder, and the driver is
refused. A lease without a change for LEASE_S is taken over.

A holder that cannot renew its lease does not stop at once. Why that is safe:
- To take the lease over, another driver must write its own token into the object. So if the object still holds our
  token when the storage responds again, and our compare-and-swap on that version succeeds, there was no take-over.
- SELF_FENCE_S after its last renewal, which is before a take-over is possible, the holder's process stops
  publishing: ``check`` is called before each PUT and waits until the lease is renewed or lost.
- Writers in other processes read ``_run.json`` right before each PUT instead. A new driver first raises the attempt
  number there, by compare-and-swap, so a late writer stops. A writer that read just before that and writes just
  after is harmless (``runs/fence.py``): it creates a file of its own attempt, and the new driver counts
  after such PUTs.
After OUTAGE_S the holder gives up with a transient error.

    with lock_output(StoragePath.of("s3://bucket/runs/a")) as check:
        check()
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from eagle_ray.runs.job_errors import FencedError, JobError, OutputDamaged, OutputLocked, StorageUnavailable
from eagle_ray.runs.manifest import wrap_os_errors
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.storage.path import FileVersion, StoragePath, json_bytes, parse_json_bytes
from eagle_ray.storage.retry_budget import disable_extended_retries
from eagle_ray.storage.storage_errors import is_bucket_missing

log = logging.getLogger("eagle_ray")
LOCK = "_lock"
LEASE_S = 30.0  # a lease that stays the same for so long is stale
HEARTBEAT_S = 5.0
SELF_FENCE_S = 22.0  # a holder that could not renew for so long publishes nothing, before a take-over is possible
OUTAGE_S = 600.0  # a holder that could not renew for so long stops
POLL_S = 1.0
CHANGES_OF_THE_LIVING = 2  # a dead holder may have one PUT under way, no more
FREE = json_bytes({"holder": None, "token": None, "beat": 0})

CheckLock = Callable[[], None]  # called before each publish; raises if the lock is lost


def lock_output(output: StoragePath) -> AbstractContextManager[CheckLock]:
    """Hold the lock of the output directory, which is created if missing. Raises OutputLocked if another driver holds
    it.

    If the lock is lost, the main thread is interrupted, and leaving the context raises the reason.
    """
    return _file_lock(output) if output.is_local else _lease(output)


@contextmanager
def _file_lock(output: StoragePath) -> Iterator[CheckLock]:
    """Hold a file lock, which the operating system releases when the driver ends in any way."""
    path = str(output / LOCK)
    with wrap_os_errors(output):
        output.make_directory()
        open(path, "ab").close()
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _busy(output, file.read().strip()) from None
        with wrap_os_errors(output):
            file.truncate(0)
            os.write(file.fileno(), _myself().encode())  # at once: what a full disk refuses, close would try again
        yield lambda: None


@contextmanager
def _lease(output: StoragePath) -> Iterator[CheckLock]:
    with wrap_os_errors(output):
        output.check_writable()  # a server that ignores conditions has no lease to give
        lease = Lease(output)
        lease.take()
    with lease:
        yield lease.check


class Lease:
    """A lock object in a bucket. While it is open, one thread renews it and another watches the clock.

    The object is never deleted: when released it names no holder, so every change is a compare-and-swap.
    """

    def __init__(self, output: StoragePath):
        self._output, self._file, self._token = output, output / LOCK, uuid4().hex
        self._version: int | str = ""
        self._written_at = 0.0
        self._beats = 0
        self._lost: JobError | None = None
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._keep, self._watch)]

    def take(self) -> None:
        """Acquire the lease, waiting for a silent holder's lease to expire. Raises OutputLocked if the
        holder is alive.
        """
        seen: Watched | None = None
        while not self._write(None):
            found, stamp = self._read()
            if found["holder"] is None:
                if self._write(stamp):
                    return
                continue
            if seen is None:
                seen = Watched(found["token"], stamp, time.monotonic())
                log.info("%s is held by %s: waiting %.0f s for a sign of life", self._output, found["holder"], LEASE_S)
            if seen.is_alive_after(found["token"], stamp):
                raise _busy(self._output, found["holder"])
            if time.monotonic() - seen.since >= LEASE_S and self._write(stamp):
                log.info("no sign of life: taken over")
                return
            time.sleep(POLL_S)

    def check(self) -> None:
        """Return if no other driver can hold the lease now. Waits while that is uncertain; raises if it is lost."""
        while self._lost is None and self._age() > SELF_FENCE_S:
            time.sleep(POLL_S)
        if self._lost is not None:
            raise self._lost

    def __enter__(self) -> Lease:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(HEARTBEAT_S)
        if self._lost is not None:
            if not is_interrupted():
                accept_interrupt()
            raise self._lost from None
        with suppress(OSError):  # it goes stale by itself
            self._file.replace(FREE, self._version)

    def _age(self) -> float:
        """Return the seconds since the last renewal began."""
        return time.monotonic() - self._written_at

    def _keep(self) -> None:
        disable_extended_retries()
        while not self._closing.wait(HEARTBEAT_S):
            try:
                found, stamp = self._read()
                if found["token"] != self._token or not self._write(stamp):
                    self._lose(FencedError(f"{found['holder'] or 'another driver'} has taken {self._output} over"))
            except OSError as error:
                if isinstance(error, FileNotFoundError) and not is_bucket_missing(error):
                    self._lose(OutputDamaged(f"{self._file} was deleted while this driver held it"))
                else:  # the next try may fare better; the watch has the last word
                    log.debug("the lease cannot be renewed now: %s", error)

    def _watch(self) -> None:
        is_waiting = False
        while not self._closing.wait(POLL_S):
            age = self._age()
            if age > OUTAGE_S:
                self._lose(StorageUnavailable(f"{self._file} could not be written for {OUTAGE_S:.0f} s"))
            elif age > SELF_FENCE_S and not is_waiting:
                is_waiting = True
                log.warning(
                    "%s could not be written for %.0f s: waiting up to %.0f s for the storage; nothing is published "
                    "by this process until then",
                    self._file,
                    SELF_FENCE_S,
                    OUTAGE_S,
                )
            elif age <= SELF_FENCE_S and is_waiting:
                is_waiting = False
                log.warning("%s is renewed; no other driver has taken it: going on", self._file)

    def _write(self, stamp: FileVersion | None) -> bool:
        """Write our token if the lease is unchanged since it was read (None: if there is no object); return whether it
        was.
        """
        began = time.monotonic()
        self._beats += 1  # no two beats are the same: each has its own ETag
        content = json_bytes({"holder": _myself(), "token": self._token, "beat": self._beats})
        written = self._file.create(content) if stamp is None else self._file.replace(content, stamp.version)
        if written is not None:
            self._version, self._written_at = written.version, began
        return written is not None

    def _lose(self, reason: JobError) -> None:
        if not self._closing.is_set():
            self._lost = type(reason)(f"{reason}: this driver stops")
            self._closing.set()
            interrupt()

    def _read(self) -> tuple[dict[str, Any], FileVersion]:
        data, stamp = self._file.read_with_version()
        with suppress(ValueError):
            found = parse_json_bytes(data)
            if isinstance(found, dict) and found.keys() >= {"holder", "token"}:
                return found, stamp
        return {"holder": "another program", "token": None}, stamp  # not a lease: watched like one


@dataclass(slots=True)
class Watched:
    """Another driver's lease under observation.

    Attributes:
        token: the holder's.
        stamp: version of its latest state.
        since: when that state was first seen, on the monotonic clock.
        num_changes: changes since the observation began.
    """

    token: str | None
    stamp: FileVersion
    since: float
    num_changes: int = 0

    def is_alive_after(self, token: str | None, stamp: FileVersion) -> bool:
        """Update to the state just read and return whether a live driver holds the lease; a new token proves one."""
        if stamp != self.stamp:
            self.stamp, self.since = stamp, time.monotonic()
            self.num_changes += 1
        return token != self.token or self.num_changes >= CHANGES_OF_THE_LIVING


def _busy(output: StoragePath, holder: str) -> OutputLocked:
    return OutputLocked(f"{output} is being written by {holder or 'another driver'}: wait for it to end")


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
