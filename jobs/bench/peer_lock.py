"""A lock on a file, as flock(1) takes it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

YIELD_S = 0.5  # in which a process that waits for the lock can take it


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock on a file; without a file there is nothing to hold."""
    if file is None:
        yield
        return
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    time.sleep(YIELD_S)
