"""StartLog: tell what a start is doing while it takes long, and how long each part took once the engine is ready.

start = StartLog()
with start.part("read", "reading the target's weights: 0.9 GB from models/llama"):
    ...
start.ready()

reading the target's weights: 0.9 GB from models/llama
measuring the cost of steps: for up to 5 s, kept in costs/1f0c.json for later starts
ready after 9.1 s: read 1.2, measured 5.1
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("eagle_ray")
LONG_S = 1.0  # a part that takes longer is told of; a small model's start stays silent
WAITING_LINE_S = 10.0  # between two lines of a wait
MIN_SHOWN_S = 0.05  # shorter parts are left out of the last line


def configure_logging(level: str) -> None:
    """Log plain lines to stderr. A command's result goes to stdout."""
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))
        log.propagate = False


class StdoutError(OSError):
    """Stdout cannot be written, as on a full disk."""


class Stdout(io.TextIOWrapper):
    """A stdout whose errors cannot be taken for those of another file.

    before: it writes where this one does, and would close the file with its own end.
    """

    before: io.TextIOWrapper

    @classmethod
    def over(cls, stdout: io.TextIOWrapper) -> Stdout:
        """Return one that writes where this one does."""
        wrapper = cls(stdout.buffer, stdout.encoding, stdout.errors, line_buffering=stdout.line_buffering)
        wrapper.before = stdout
        return wrapper

    def write(self, text: str, /) -> int:
        with stdout_errors():
            return super().write(text)

    def flush(self) -> None:
        with stdout_errors():
            super().flush()


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Raise StdoutError for an error in writing to stdout, except for a reader that has gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from None


def print_result(text: str) -> None:
    """Print what is stored elsewhere, too. A stdout that cannot be written, as on a full disk, is one warning."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        log.warning("stdout cannot be written: %s", error.strerror)
        discard_stdout()


def discard_stdout() -> None:
    """Send stdout, and what it has buffered, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    """The parts of one start, from the moment at which this is made."""

    def __init__(self, long_s: float = LONG_S):
        self._long_s = long_s
        self._started = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, line: str) -> Iterator[None]:
        """Time one part of the start. Log `line` if it takes longer than long_s, while it does.

        name: of the part in the last line; parts of one name are added up.
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
        """Log how long the start took, in all and by part, if it took longer than long_s."""
        seconds = time.monotonic() - self._started
        if seconds < self._long_s:
            return
        parts = [f"{name} {s:.1f}" for name, s in self._parts.items() if s >= MIN_SHOWN_S]
        log.info("ready after %.1f s%s", seconds, f": {', '.join(parts)}" if parts else "")
