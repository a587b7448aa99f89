"""Lease: ensures that one process at a time writes a run directory (a driver's job, or a batch of an endpoint).

Locally it is a file lock of the operating system, which ends with its process. In a bucket it is an
object that its holder rewrites every few seconds (heartbeat). Every change of that object is a
compare-and-swap on the version that was read.

A process that finds such an object watches it by its own clock, since the clocks of two machines
differ. One change may be a late PUT of a dead holder, so it only restarts the clock; a second
change proves a live holder. An object without a change for LEASE_S is taken over, or at once if its
holder was a process of this machine that has ended.

A holder that cannot renew its lease does not stop at once. Why that is safe: - To take the lease
over, another process must write its own token into the object. So if the object still holds our
  token when the storage responds again, and our compare-and-swap on that version succeeds, there was no take-over.
- SELF_FENCE_S after its last renewal, which is before a take-over is possible, the holder's process
stops
  publishing: ``check`` is called before each PUT and waits until the lease is renewed or lost.
- Writers in other processes read ``_run.json`` right before each PUT instead. A new holder first
raises the attempt
  number there, by compare-and-swap, so a late writer stops. A writer that read just before that and writes just
  after is harmless (``runs/run.py``): it creates a file of its own attempt, and the new holder counts after such PUTs.
After OUTAGE_S the holder gives up with a transient error.

    with hold(StoragePath.of("s3://bucket/runs/a"), on_loss=interrupt) as lease:
        lease.check()

A start makes its checks before it takes the lease, so that a refusal changes nothing, not even the
lock:

    lease = free_lease(output)       # raises OutputLocked
    ...                              # reads, and may raise
    with hold_lease(lease):
        ...
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from eagle_ray.runs.job_errors import (
    FencedError,
    JobError,
    OutputDamaged,
    OutputLocked,
    StorageUnavailable,
)
from eagle_ray.runs.layout import RUN, wrap_os_errors
from eagle_ray.runs.process_identity import Process, boot_id
from eagle_ray.storage.path import StoragePath, json_bytes, parse_json_bytes
from eagle_ray.storage.retries import disable_extended_retries
from eagle_ray.storage.store import FileVersion, check_bucket, is_bucket_missing

log = logging.getLogger("eagle_ray")
LOCK = "_lock"
LEASE_S = 30.0  # a lease that stays the same for so long is stale
HEARTBEAT_S = 5.0
SELF_FENCE_S = 22.0  # a holder that could not renew for so long publishes nothing, before a take-over is possible
OUTAGE_S = 600.0  # a holder that could not renew for so long stops
LEASE_POLL_S = 1.0
CHANGES_OF_THE_LIVING = 2  # a dead holder may have one PUT under way, no more
FREE = json_bytes({"holder": None, "token": None, "beat": 0})
MAX_LOCK_BYTES = 1024  # bytes of a lock file: the name of a process


def do_nothing() -> None:
    """Do nothing."""


@contextmanager
def hold(
    output: StoragePath,
    on_loss: Callable[[], None] = do_nothing,
    after_loss: Callable[[], None] = do_nothing,
) -> Iterator[Lease]:
    """Hold the lease of a run directory, which is created if missing. Raises OutputLocked if another process holds it.

    If the lease is lost, leaving the context raises the reason.

    Args:
        on_loss: callback, from another thread, when the lease is lost; it must stop the work in the
            context.
        after_loss: callback right before the reason is raised; it undoes on_loss.
    """
    with hold_lease(Lease.of(output, on_loss), after_loss) as lease:
        yield lease


def free_lease(output: StoragePath, on_loss: Callable[[], None] = do_nothing) -> Lease:
    """Return the lease of a run directory if no live process holds it. Nothing is written.

    Raises OutputLocked if another process holds it.
    """
    lease = Lease.of(output, on_loss)
    with wrap_os_errors(output):
        lease.wait_until_free()
    return lease


@contextmanager
def hold_lease(lease: Lease, after_loss: Callable[[], None] = do_nothing) -> Iterator[Lease]:
    """Take a lease object and hold it while the context is open, as `hold` does."""
    with wrap_os_errors(lease.output):
        lease.take()
    try:
        yield lease
    finally:
        lease.release()
        if lease.lost is not None:
            after_loss()
            raise lease.lost from None


class Lease:
    """The lease of one run directory: a file lock.

    Use one object for repeated tries, because it remembers since when another process has given no
    sign of life. It can be taken again after its release. Methods block on storage and raise
    OSError if it fails.
    """

    def __init__(self, output: StoragePath, on_loss: Callable[[], None] = do_nothing):
        self.output = output
        self.on_loss = on_loss
        self.lost: JobError | None = None
        self.holder = ""  # name of another process, as the last try has found it
        self._handle: int | None = None
        self._content = b""  # content of the lock file before this process took it
        self._is_new = False  # whether this process has made the lock file

    @staticmethod
    def of(output: StoragePath, on_loss: Callable[[], None] = do_nothing) -> Lease:
        return (Lease if output.is_local else BucketLease)(output, on_loss)

    def try_take(self) -> bool:
        """Take the lease if it is free or stale. Return whether this process holds it. Does not wait."""
        self.output.make_directory()
        path = str(self.output / LOCK)
        is_new = not os.path.exists(path)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600 if self.output.is_private else 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(path, handle):  # deleted meanwhile: other processes lock another file
                os.close(handle)
                return self.try_take()
            content = os.pread(handle, MAX_LOCK_BYTES, 0)
            _overwrite(handle, _myself().encode())
        except BlockingIOError:
            self.holder = _text_in(handle)
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        self._content = content
        self._is_new = is_new
        return True

    def is_free(self) -> bool:
        """Return whether the lease is free or stale. Nothing is written."""
        try:
            handle = os.open(str(self.output / LOCK), os.O_RDONLY)
        except OSError:  # no lock yet, or one that try_take names
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            self.holder = _text_in(handle)
            return False
        finally:
            os.close(handle)

    def wait_until_free(self) -> None:
        """Wait as `take` does, without taking the lease. Raises OutputLocked if the holder is alive."""
        self._wait_for(self.is_free)

    def take(self) -> None:
        """Take the lease, waiting for a silent holder's to become stale. Raises OutputLocked if the holder is alive."""
        self._wait_for(self.try_take)

    def _wait_for(self, attempt: Callable[[], bool]) -> None:
        is_waiting = False
        while not attempt():
            if self.is_holder_alive():
                holder = self.holder or "another driver"
                raise OutputLocked(
                    f"{self.output} is being written by {holder}: wait for it to end"
                )
            if not is_waiting:
                log.info(
                    "%s is held by %s: waiting %.0f s for a sign of life",
                    self.output,
                    self.holder,
                    LEASE_S,
                )
            is_waiting = True
            time.sleep(LEASE_POLL_S)

    def is_holder_alive(self) -> bool:
        """Return whether the holder that the last try found is known to be alive."""
        return True

    def check(self) -> None:
        """Return if this process certainly holds the lease. Waits while that is uncertain; raises
        if the lease is lost."""

    def release(self) -> None:
        """Give the lease up if this process holds it. If a bucket does not respond, the lease ends when it is stale.

        The lock file gets its former content back. If this process created it and no run has begun,
        it is deleted, so that a refused start leaves no trace.
        """
        if self._handle is not None:
            with suppress(OSError):
                _overwrite(self._handle, self._content)
                if self._is_new and not (self.output / RUN).exists():
                    os.unlink(str(self.output / LOCK))
            os.close(self._handle)
            self._handle = None


class BucketLease(Lease):
    """A lease in a bucket. While it is held, one thread renews it and another watches the clock.

    The object is never deleted: when released it names no holder, so every change is a
    compare-and-swap.
    """

    def __init__(self, output: StoragePath, on_loss: Callable[[], None] = do_nothing):
        super().__init__(output, on_loss)
        self._file = output / LOCK
        self._token = uuid4().hex
        self._version: int | str = ""
        self._written_at = 0.0
        self._beats = 0
        self._seen: Watched | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def try_take(self) -> bool:
        is_free, stamp = self._look()
        if not is_free or not self._write(stamp):
            return False
        if self._seen is not None:
            log.info(
                "%s: its holder, %s, gives no sign of life: taken over", self.output, self.holder
            )
        return self._begin()

    def is_free(self) -> bool:
        return self._look()[0]

    def _look(self) -> tuple[bool, FileVersion | None]:
        """Return whether the lease is free or stale, and its version; None if the object does not exist."""
        try:
            record, stamp = self._read()
        except FileNotFoundError as error:
            check_bucket(error)
            self._seen = None
            return True, None
        if record["holder"] is None:
            self._seen = None
            return True, stamp
        self.holder = record["holder"]
        self._seen = self._seen or Watched(record["token"], stamp, time.monotonic())
        self._seen.update(record["token"], stamp)
        return self._seen.is_stale() or _has_ended_here(record), stamp

    def take(self) -> None:
        self.output.check_writable()  # a server that ignores conditions has no lease to give
        super().take()

    def is_holder_alive(self) -> bool:
        return self._seen is not None and self._seen.is_alive

    def check(self) -> None:
        while self.lost is None and self._age() > SELF_FENCE_S:
            time.sleep(LEASE_POLL_S)
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(HEARTBEAT_S)
        if self._threads and self.lost is None:
            with suppress(OSError):  # it goes stale by itself
                self._file.replace(FREE, self._version)
        self._threads = []

    def _begin(self) -> bool:
        self._seen = None
        self.lost = None
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._keep, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        return True

    def _age(self) -> float:
        """Return the seconds since the last renewal began."""
        return time.monotonic() - self._written_at

    def _keep(self) -> None:
        disable_extended_retries()
        while not self._closing.wait(HEARTBEAT_S):
            try:
                record, stamp = self._read()
                if record["token"] != self._token or not self._write(stamp):
                    self._lose(
                        FencedError(
                            f"{record['holder'] or 'another driver'} has taken {self.output} over"
                        )
                    )
            except OSError as error:
                if isinstance(error, FileNotFoundError) and not is_bucket_missing(error):
                    self._lose(OutputDamaged(f"{self._file} was deleted while this driver held it"))
                else:  # the next try may fare better; the watch has the last word
                    log.debug("the lease cannot be renewed now: %s", error)

    def _watch(self) -> None:
        is_waiting = False
        while not self._closing.wait(LEASE_POLL_S):
            age = self._age()
            if age > OUTAGE_S:
                self._lose(
                    StorageUnavailable(f"{self._file} could not be written for {OUTAGE_S:.0f} s")
                )
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
        """Write our token if the lease is unchanged since it was read (None: if there is no
        object); return whether it was.
        """
        began = time.monotonic()
        self._beats += 1  # no two beats are the same: each has its own ETag
        facts = {"holder": _myself(), "token": self._token, "beat": self._beats}
        content = json_bytes(facts | {"process": asdict(Process.current()), "boot": boot_id()})
        written = (
            self._file.create(content)
            if stamp is None
            else self._file.replace(content, stamp.version)
        )
        if written is not None:
            self._version = written.version
            self._written_at = began
        return written is not None

    def _lose(self, reason: JobError) -> None:
        if not self._closing.is_set():
            self.lost = type(reason)(f"{reason}: this driver stops")
            self._closing.set()
            self.on_loss()

    def _read(self) -> tuple[dict[str, Any], FileVersion]:
        data, stamp = self._file.read_with_version()
        with suppress(ValueError):
            record = parse_json_bytes(data)
            if isinstance(record, dict) and record.keys() >= {"holder", "token"}:
                return record, stamp
        return {"holder": "another program", "token": None}, stamp  # not a lease: watched like one


@dataclass(slots=True)
class Watched:
    """Another process's lease under observation.

    Attributes:
        token: token of the first holder.
        stamp: version of its latest state.
        since: when that state was first seen, on the monotonic clock.
        num_changes: changes since the observation began.
        is_alive: whether a live process holds it, which a new token proves.
    """

    token: str | None
    stamp: FileVersion
    since: float
    num_changes: int = 0
    is_alive: bool = False

    def update(self, token: str | None, stamp: FileVersion) -> None:
        """Compare with the state just read."""
        if stamp != self.stamp:
            self.stamp = stamp
            self.since = time.monotonic()
            self.num_changes += 1
        self.is_alive = (
            self.is_alive or token != self.token or self.num_changes >= CHANGES_OF_THE_LIVING
        )

    def is_stale(self) -> bool:
        return time.monotonic() - self.since >= LEASE_S


def _has_ended_here(record: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this machine, since its last start, that has ended."""
    try:
        return record["boot"] == boot_id() != "" and Process.of(record["process"]).is_gone() is True
    except (KeyError, TypeError):  # a lease of an earlier version, or not one of ours
        return False


def _is_at(path: str, handle: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(handle))
    return False


def _overwrite(handle: int, content: bytes) -> None:
    """Replace the content of an open file; if the disk is full it stays as it is."""
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, content)
    os.ftruncate(handle, len(content))


def _text_in(handle: int) -> str:
    return os.pread(handle, MAX_LOCK_BYTES, 0).decode(errors="replace").strip()


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
