"""Child processes: start one with a pipe to it, let it end with its parent, and tell how it ended.

pipe, process = start_child("from here import run; run()", "a job", "argument")
pipe.send(...)
describe_exit(process.wait())        # "was ended by signal 9"
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

PARENT_DEATH_SIGNAL = 1  # option of Linux's prctl
# Python puts '' first for `-c`, and a user's copy.py or random.py may be in the working directory.
WITHOUT_WORKING_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path); "


def module_directories() -> list[str]:
    """Return this process's module path, as absolute directories that another process can use."""
    return [os.path.abspath(directory) for directory in sys.path]


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a Python process that runs the code. It needs child_environment's environment.

    It looks for modules where this process does, and not in the working directory unless this
    process does.
    """
    return [sys.executable, "-c", WITHOUT_WORKING_DIRECTORY + code, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment, with its module path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(module_directories())}


def start_child(
    command: str,
    name: str,
    argument: str,
    environment: Mapping[str, str] | None = None,
    is_apart: bool = False,
    files: Sequence[int] = (),
) -> tuple[Connection, subprocess.Popen]:
    """Start a Python process with this one's module path and output streams. Return the pipe to it and the process.

    Only the child holds the other end, so the pipe closes when either process ends.

    Args:
        command: Python code to run.
        name: name for ``ps``.
        environment: variables in addition to this process's own.
        is_apart: whether the child is protected from signals of this process's terminal.
        files: file descriptors that it inherits in addition to the pipe.
    """
    here, there = Pipe()
    with there, _sigint_blocked():
        process = subprocess.Popen(
            python_command(command, name, argument, str(there.fileno())),
            env=child_environment() | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno(), *files],
            start_new_session=is_apart,
        )
    return here, process


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes started here, from their first moment on: the parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit(code: int | None) -> str:
    """Return a text on how a process ended, such as "was ended by signal 9".

    Args:
        code: exit code in the form of Popen; None if unknown.
    """
    if code is None:
        return "ended"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def end_with_parent(parent: int, number: int) -> None:
    """Ask the system to send this process a signal when its parent ends, for whatever reason. On Linux only.

    Processes forked from this one are not included.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), number)
