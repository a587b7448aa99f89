"""StartLog: log the part that a slow start is in, and each part's time once the engine is ready.

    start = StartLog()
    with start.part("read", "reading the target's weights: 0.9 GB from models/llama"):
        ...
    start.ready()

reading the target's weights: 0.9 GB from models/llama measuring the cost of steps: for up to 5 s,
kept in costs/1f0c.json for later starts ready after 9.1 s: read 1.2, measured 5.1
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("eagle_ray")
LOGGED_PART_S = 1.0  # a part that takes longer is told of; a small model's start stays silent
WAITING_LINE_S = 10.0  # seconds between two lines of a wait
MIN_SHOWN_S = 0.05  # shorter parts are left out of the last line


def configure_logging(level: str) -> None:
    """Log plain lines to stderr. A command's result goes to stdout."""
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))
        log.propagate = False


class StdoutError(OSError):
    """Stdout cannot be written, for example because the disk is full."""


class StdoutClosed(BrokenPipeError):
    """The reader of stdout has closed it, as ``| head`` does. Unlike BrokenPipeError, it is never
    raised for other files."""


class Stdout(io.TextIOWrapper):
    """A replacement for sys.stdout whose write errors are StdoutError and StdoutClosed.

    Attributes:
        before: replaced stream, which stays referenced because closing it would close the file.
        has_lost_reader: whether a write found that the pipe has no reader.
    """

    before: io.TextIOWrapper
    has_lost_reader = False

    @classmethod
    def over(cls, stdout: io.TextIOWrapper) -> Stdout:
        """Return a stream that writes to the file of this one."""
        wrapper = cls(
            stdout.buffer, stdout.encoding, stdout.errors, line_buffering=stdout.line_buffering
        )
        wrapper.before = stdout
        return wrapper

    def write(self, text: str, /) -> int:
        with self._errors():
            return super().write(text)

    def flush(self) -> None:
        with self._errors():
            super().flush()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with stdout_errors():
                yield
        except StdoutClosed:
            self.has_lost_reader = True
            raise


class Stderr(io.TextIOWrapper):
    """A replacement for sys.stderr that never raises. After a failed write all further output is discarded.

    Attributes:
        before: replaced stream, as in Stdout.
    """

    before: io.TextIOWrapper

    @classmethod
    def over(cls, stderr: io.TextIOWrapper) -> Stderr:
        """Return a stream that writes to the file of this one."""
        wrapper = cls(stderr.buffer, stderr.encoding, stderr.errors, line_buffering=True)
        wrapper.before = stderr
        return wrapper

    @classmethod
    def of(cls, number: int) -> Stderr:
        """Return a stream that writes to an open file descriptor, and closes it."""
        return cls(os.fdopen(number, "wb"), errors="backslashreplace", line_buffering=True)

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            send_to_nowhere(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            send_to_nowhere(self.fileno())
            super().flush()


def open_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if the shell has closed them (``2>&-``).

    Otherwise the next file that is opened would get their descriptor and the output meant for them.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            send_to_nowhere(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def send_to_nowhere(number: int) -> None:
    """Redirect a file descriptor to /dev/null, also for processes that are started later."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Turn errors of writing to stdout in this context into StdoutError, or StdoutClosed if its reader has gone."""
    try:
        yield
    except BrokenPipeError as error:
        raise StdoutClosed(error.errno, error.strerror) from None
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from None


def print_result(text: str) -> None:
    """Print a text that is also stored in a file. If stdout cannot be written, log one warning."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            log.warning("stdout cannot be written: %s", error.strerror)
        discard_stdout()


def discard_stdout() -> None:
    """Discard stdout's buffer and all later output."""
    send_to_nowhere(sys.stdout.fileno())


def has_reader(number: int) -> bool:
    """Return whether the pipe with this file descriptor has a reader. Other files always have one."""
    poll = select.poll()
    poll.register(number, 0)
    return all(not events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


@contextmanager
def log_while_waiting(words: str) -> Iterator[None]:
    """Log how long something takes, every WAITING_LINE_S."""
    is_over = threading.Event()
    started = time.monotonic()

    def tell() -> None:
        while not is_over.wait(WAITING_LINE_S):
            log.info("%s: %.0f s", words, time.monotonic() - started)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        is_over.set()
        telling.join()


class StartLog:
    """The timed parts of one start, which begins when this object is made."""

    def __init__(self, long_s: float = LOGGED_PART_S):
        self._long_s = long_s
        self._started = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, line: str) -> Iterator[None]:
        """Time one part of the start. Log `line` if it takes longer than long_s, while it does.

        Args:
            name: name of the part in the summary; parts with equal names are added up.
        """
        started = time.monotonic()
        telling = threading.Timer(self._long_s, log.info, [line])
        telling.daemon = True
        telling.start()
        try:
            yield
        finally:
            telling.cancel()
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - started

    def ready(self) -> None:
        """Log the start's total time and that of each part, if it took longer than long_s."""
        seconds = time.monotonic() - self._started
        if seconds < self._long_s:
            return
        parts = [f"{name} {s:.1f}" for name, s in self._parts.items() if s >= MIN_SHOWN_S]
        log.info("ready after %.1f s%s", seconds, f": {', '.join(parts)}" if parts else "")
