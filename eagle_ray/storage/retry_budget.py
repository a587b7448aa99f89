"""Retry budget: how long requests to storage are retried.

A report should fail within seconds if the storage is away. A job that has run for hours should
outlast a server that is away for a minute.

    >>> with outlasting_outages():
    ...     file.create(data)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGER_WAITS_S = (16.0, 30.0, 30.0)  # between further tries: with the shorter waits before them, a minute and a half

_lock = threading.Lock()
_num_patient = 0
_this_thread = threading.local()


@contextmanager
def outlasting_outages() -> Iterator[None]:
    """While it is open, every request of this process is tried longer, but for those of threads that hurry."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


def hurry() -> None:
    """Never try this thread's requests longer: it makes new ones all the time, and the latest matters."""
    _this_thread.hurries = True


def longer_waits() -> tuple[float, ...]:
    """Return the waits that follow the ordinary ones now."""
    return LONGER_WAITS_S if _num_patient > 0 and not hasattr(_this_thread, "hurries") else ()


def _add(number: int) -> None:
    global _num_patient
    with _lock:
        _num_patient += number
