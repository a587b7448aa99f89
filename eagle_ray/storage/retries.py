"""How long requests to object storage are retried.

A report should fail within seconds if the storage is unavailable. A job that has run for hours
should survive an outage of a minute:

    with extended_retries():
        file.create(data)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds between further tries: with the shorter waits before them, a minute and a half.
EXTENDED_WAITS_S = (
    16.0,
    30.0,
    30.0,
)
_lock = threading.Lock()
_num_extended = 0
_this_thread = threading.local()


@contextmanager
def extended_retries() -> Iterator[None]:
    """Retry this process's requests for longer while the context is open, except in threads that opted out."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


def disable_extended_retries() -> None:
    """Exclude this thread from extended retries, because it repeats its requests anyway and only the latest matters."""
    _this_thread.hurries = True


def extended_waits() -> tuple[float, ...]:
    """Return the seconds of the waits that extended retries add after the ordinary ones."""
    return EXTENDED_WAITS_S if _num_extended > 0 and not hasattr(_this_thread, "hurries") else ()


def _add(number: int) -> None:
    global _num_extended
    with _lock:
        _num_extended += number
