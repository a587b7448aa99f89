"""Signals: what ends a job from outside (Ctrl-C, a scheduler's SIGTERM, a terminal's SIGHUP), and from within.

All of them raise KeyboardInterrupt in the main thread. The first from outside is the last: while the job says its last
words a second one would only cut them short.

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
    """SIGTERM, SIGHUP and ``interrupt`` do what Ctrl-C does. What the parent ignores, as under nohup, stays ignored.

    Signals belong to the main thread: in another one nothing changes. After an interrupt from outside the process is
    about to end, and no other one is heard.
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
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not _ignore:
                signal.signal(number, handler)


def interrupt() -> None:
    """From any thread: interrupt the main thread, by a real signal, which ends whatever it waits for.

    Outside ``interruptible`` it is as Ctrl-C.
    """
    is_expected = signal.getsignal(FROM_WITHIN) is signal.default_int_handler
    signal.pthread_kill(threading.main_thread().ident, FROM_WITHIN if is_expected else signal.SIGINT)


def is_interrupted() -> bool:
    """Return whether a signal has arrived. Libraries may swallow its exception; callers raise it again."""
    return signal.getsignal(signal.SIGINT) is _ignore


def check_not_interrupted() -> None:
    """In the main thread, after imports and whatever else may have lost a KeyboardInterrupt: raise it again."""
    if is_interrupted():
        raise KeyboardInterrupt


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    for other in FROM_OUTSIDE:
        signal.signal(other, _ignore)
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which child processes would inherit."""
