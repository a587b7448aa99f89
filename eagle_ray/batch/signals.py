"""Signals that end a job: Ctrl-C, a scheduler's SIGTERM, a terminal's SIGHUP, and interrupts by the job's own threads.

All raise KeyboardInterrupt in the main thread. After the first signal from outside, later ones are ignored, so that
the job can report how it ends.

    >>> with interruptible():
    ...     work()
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_WITHIN = signal.SIGUSR1


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM, SIGHUP and ``interrupt`` act like Ctrl-C. Signals that the parent ignores, as under nohup, stay
    ignored.

    Only the main thread gets signals; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*FROM_OUTSIDE, FROM_WITHIN)}
    heard = {number for number in FROM_OUTSIDE if before[number] is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, _interrupted)
    signal.signal(FROM_WITHIN, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _clear_interrupt()
        raise
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not _ignore:
                signal.signal(number, handler)


def _clear_interrupt() -> None:
    """Let the process end with its exit code.

    Under ``python -m`` CPython ends by SIGINT instead if an interrupt has left a text that ``exec`` or ``eval`` ran, as
    dataclasses do while a module is imported, although it was caught later. Running another text clears that.
    """
    exec("")


def interrupt() -> None:
    """Interrupt the main thread from any thread, by a real signal, which ends whatever it waits for.

    Outside ``interruptible`` it acts like Ctrl-C.
    """
    is_expected = signal.getsignal(FROM_WITHIN) is signal.default_int_handler
    signal.pthread_kill(threading.main_thread().ident, FROM_WITHIN if is_expected else signal.SIGINT)


def is_interrupted() -> bool:
    """Return whether a signal has arrived. Libraries may swallow its exception; callers raise it again."""
    return signal.getsignal(signal.SIGINT) is _ignore


def check_not_interrupted() -> None:
    """Raise KeyboardInterrupt again in the main thread, after code that may have swallowed it, such as imports."""
    if is_interrupted():
        raise KeyboardInterrupt


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    for other in FROM_OUTSIDE:
        signal.signal(other, _ignore)
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore the signal without SIG_IGN, which child processes would inherit."""
