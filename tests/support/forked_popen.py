"""Children of a test's own program that are forked from it, instead of importing torch again.

A program that warm_python forks has imported torch and the engine, but what it starts would be a
fresh interpreter. With ``subprocess.Popen = ForkedPopen`` in it, its children are copies of it that
run the code of ``-c``.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

SET_NAME = 15  # of Linux's prctl
FreshPopen = subprocess.Popen
_EXECUTE = inspect.signature(FreshPopen._execute_child)  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkedPopen(FreshPopen):
    """Popen that forks ``[python, "-c", CODE, NAME, ...]``, as start_child calls it, and starts all else as Popen does.

    NAME becomes the process's name.
    """

    def _execute_child(self, *arguments: Any) -> None:
        asked = _EXECUTE.bind(self, *arguments).arguments
        command = asked["args"]
        if not isinstance(command, list) or command[:2] != [sys.executable, "-c"]:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if not self.pid:
            if asked["start_new_session"]:
                os.setsid()
            _run(command[2:], asked["p2cread"], set(asked["pass_fds"]), asked["env"])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]


def set_process_name(name: str) -> None:
    """Set the name by which psutil knows this process; the first 15 characters count."""
    ctypes.CDLL(None).prctl(SET_NAME, name.encode())


def _run(arguments: list[str], stdin: int, kept: set[int], environment: dict[str, str]) -> None:
    """Run the code in this child with nothing open but its streams and what is kept. Does not return."""
    code, name, *_ = arguments
    try:
        os.dup2(stdin, 0)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with suppress(OSError):  # one was the directory's own
                    os.close(number)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_process_name(name)
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
