"""Turn signals into KeyboardInterrupt: SIGINT, SIGTERM, SIGHUP, and interrupts from the job's own threads.

All raise KeyboardInterrupt in the main thread. Libraries may swallow it, for example compiled code
that imports a module. So it is raised again every AGAIN_S until the main thread unwinds, and an
error of a half-imported module in its place counts as the interrupt. Signals that arrive while the
main thread unwinds, or later, are ignored, so that the job can clean up and report how it ended.

    with interruptible():
        work()
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_WITHIN = signal.SIGUSR1
AGAIN = signal.SIGALRM  # signal of a timer that runs while an interrupt has not arrived
AGAIN_S = 0.2  # seconds between two attempts to raise an interrupt


@dataclass(slots=True)
class Interrupts:
    """State of the interrupts of this process.

    Attributes:
        depth: number of open ``interruptible`` contexts.
        is_from_outside: whether a signal of FROM_OUTSIDE has arrived in the outermost of them.
        is_pending: whether an interrupt was raised whose exception no handler has accepted yet.
        error_before: exception that was being handled when the outermost context was entered.
        handlers_before: signal handlers to restore.
        alarm_before: handler of AGAIN to restore.
        report_before: ``sys.unraisablehook`` to restore.
    """

    depth: int = 0
    is_from_outside: bool = False
    is_pending: bool = False
    error_before: BaseException | None = None
    handlers_before: dict[int, Any] = field(default_factory=dict)
    alarm_before: Any = signal.SIG_DFL
    report_before: Callable[[Any], Any] = sys.unraisablehook


_state = Interrupts()


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM, SIGHUP and ``interrupt`` act like Ctrl-C while the context is open.

    Signals that the parent ignores, for example under nohup, stay ignored. A signal from outside
    always leaves this context as KeyboardInterrupt, even if a library turned it into another error,
    unless ``accept_interrupt`` was called. Only the main thread gets signals; in another thread
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    depth = _state.depth
    try:
        if depth == 0:
            _take_over()
        _state.depth = depth + 1
        yield
        check_not_interrupted()
    except (Exception, SystemExit) as error:
        if is_interrupted():
            raise KeyboardInterrupt from error
        raise
    finally:
        accept_interrupt()
        _clear_interrupt()
        _state.depth = depth
        if depth == 0:
            _put_back()


def _take_over() -> None:
    """Take over the signals that are not ignored, and exceptions that no caller gets."""
    _state.is_from_outside = False
    _state.error_before = sys.exc_info()[1]
    _state.report_before = sys.unraisablehook
    handlers = {number: signal.getsignal(number) for number in (*FROM_OUTSIDE, FROM_WITHIN)}
    _state.handlers_before = {
        n: before for n, before in handlers.items() if before not in (signal.SIG_IGN, None)
    }
    sys.unraisablehook = _report_unless_interrupt
    for number in _state.handlers_before:
        signal.signal(number, _interrupted)


def _put_back() -> None:
    """Restore the signal handlers."""
    for number, handler in _state.handlers_before.items():
        if signal.getsignal(number) is _interrupted:
            signal.signal(number, handler)
    sys.unraisablehook = _state.report_before
    _state.error_before = None


def _clear_interrupt() -> None:
    """Make the process exit with its own exit code although an interrupt was caught before.

    Under ``python -m`` CPython ends by SIGINT instead if an interrupt has left a text that ``exec``
    or ``eval`` ran, as dataclasses do while a module is imported, although it was caught later.
    Running another text clears that.
    """
    exec("")


def interrupt() -> None:
    """Interrupt the main thread from any thread with a real signal, which also ends a blocking system call.

    Outside ``interruptible`` it acts like Ctrl-C.
    """
    is_expected = signal.getsignal(FROM_WITHIN) is _interrupted
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started"
    signal.pthread_kill(main, FROM_WITHIN if is_expected else signal.SIGINT)


def is_interrupted() -> bool:
    """Return whether a signal from outside has arrived and the interrupted work has not ended yet."""
    return _state.is_pending and _state.is_from_outside


def check_not_interrupted() -> None:
    """Raise KeyboardInterrupt in the main thread if a signal has arrived. For use after code that
    may swallow it, such as imports."""
    if is_interrupted():
        raise KeyboardInterrupt


def accept_interrupt() -> None:
    """Stop raising the interrupt again: its exception has been handled. Further signals from outside are ignored."""
    _state.is_pending = False
    if signal.getsignal(AGAIN) is _interrupted:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(AGAIN, _state.alarm_before)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the context is still open after these seconds, even in a blocking call.

    Outside ``interruptible``, and in other threads, there is no limit.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(FROM_WITHIN) is not _interrupted:
        yield
        return
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        interrupt()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # its interrupt arrives here at the latest
        if is_over.is_set():  # a library has swallowed it
            raise TimeoutError
    except (KeyboardInterrupt, Exception):
        if not is_over.is_set() or is_interrupted():
            raise
        accept_interrupt()
        raise TimeoutError from None


def ignore_until_exit() -> None:
    """Ignore the signals of FROM_OUTSIDE until this process has exited.

    Python's handlers are removed before the process is gone, so a late signal would change its exit
    code. It must start no process afterwards, which would inherit the setting.
    """
    for number in FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Record the signal and raise KeyboardInterrupt, unless one is pending. AGAIN repeats it until it is seen."""
    if number != AGAIN:
        if _state.is_from_outside and not _state.is_pending:
            return  # it has arrived
        _state.is_from_outside = _state.is_from_outside or number != FROM_WITHIN
        _state.is_pending = True
        _raise_again()
    if _state.is_pending and not _is_unwinding():
        raise KeyboardInterrupt


def _raise_again() -> None:
    """Start the timer of AGAIN, which other code may use until an interrupt arrives."""
    before = signal.signal(AGAIN, _interrupted)
    if before is not _interrupted:
        _state.alarm_before = before
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)


def _is_unwinding() -> bool:
    """Return whether the main thread handles a KeyboardInterrupt, as in ``finally`` and ``__exit__``."""
    error = sys.exc_info()[1]
    while error is not None and error is not _state.error_before:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def _report_unless_interrupt(unraisable: Any) -> None:
    """Report an exception that no caller can get, unless it is an interrupt, which is raised again."""
    if not (_state.is_pending and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        _state.report_before(unraisable)
