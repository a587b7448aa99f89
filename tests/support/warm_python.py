"""Children of tests that are forked from a process which has imported torch, transformers and the engine.

A fresh interpreter needs eight seconds of CPU for these imports. A test that kills a child or reads
its exit code needs a process, not a fresh interpreter. With the fixture warm_python, `subprocess`
forks what it would start as `python -c CODE` or `python -m MODULE` from one process, which each
pytest process starts when it first needs it::

    pytestmark = pytest.mark.usefixtures("warm_python")

The child has the arguments, environment, directory, streams, files and signals that Popen would
have given it, and this process is its parent. What differs: modules are imported already, so code
that reads a variable while it is imported (OMP_NUM_THREADS, TRITON_INTERPRET) has read the
parent's, and children of the child are fresh again. On Linux only; elsewhere children are fresh.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import inspect
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from types import ModuleType
from typing import Any

import pytest

from tests.support.brief_costs import measure_briefly

SET_CHILD_SUBREAPER = 36  # of Linux's prctl
FIRST_HIGH_FILE = 500  # numbers from here on are used by no test's files
MAX_FILES = 64
LENGTH = struct.Struct("I")  # bytes of a message
COMMAND = f"from {__name__} import serve; serve()()"
PRELOADED = (
    "eagle_ray.batch.worker.worker",
    "eagle_ray.cli.main",
    "eagle_ray.batch.driver.job_run",
)


@dataclass(frozen=True)
class ChildRequest:
    """What a forked child takes over from the process that asks for it.

    Attributes:
        arguments: after the interpreter: "-c", CODE, ... or "-m", MODULE, ...
        files: the numbers of its open files; the first three are its streams.
        blocked: signals that are blocked in it.
        is_session: it leads a session of its own.
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]
    blocked: set[int]
    is_session: bool


FreshPopen = subprocess.Popen


class WarmPopen(FreshPopen):
    """Popen that forks Python programs from the warm process, and starts everything else as Popen does."""

    def _execute_child(self, *arguments: Any) -> None:
        asked = _EXECUTE.bind(self, *arguments).arguments
        command = asked["args"]
        if not _is_warm(command, asked):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        sources = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        kept = sorted(asked["pass_fds"])
        environment = asked["env"]
        request = ChildRequest(
            arguments=[os.fspath(argument) for argument in command[1:]],
            environment=dict(os.environ if environment is None else environment),
            directory=os.fspath(asked["cwd"] or os.getcwd()),
            files=[0, 1, 2, *kept],
            blocked=set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            is_session=asked["start_new_session"],
        )
        self.pid = _warm_process().fork(request, [*sources, *kept])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]


_EXECUTE = inspect.signature(FreshPopen._execute_child)  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _is_warm(command: Any, asked: dict[str, Any]) -> bool:
    is_python = (
        isinstance(command, list) and command[:1] == [sys.executable] and command[1] in ("-c", "-m")
    )
    is_plain = (
        not asked["shell"] and asked["preexec_fn"] is None and asked.get("process_group", -1) == -1
    )
    return is_python and is_plain and sys.platform == "linux"


class WarmProcess:
    """This process's end of the socket to the warm process."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        with there:
            command = [sys.executable, "-c", COMMAND, str(there.fileno())]
            self._process = FreshPopen(command, pass_fds=[there.fileno()])
        atexit.register(self.close)

    def fork(self, request: ChildRequest, sources: list[int]) -> int:
        """Return the id of a new child, a child of this process. sources: open files here, one for each of its own."""
        data = pickle.dumps(request)
        adopt_orphans(True)
        try:
            socket.send_fds(self._socket, [LENGTH.pack(len(data))], sources)
            self._socket.sendall(data)
            return int(LENGTH.unpack(self._socket.recv(LENGTH.size, socket.MSG_WAITALL))[0])
        finally:
            adopt_orphans(False)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def adopt_orphans(is_on: bool) -> None:
    """Make this process the parent of descendants whose parent ends, or stop that."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


@cache
def _warm_process() -> WarmProcess:
    return WarmProcess()


def serve() -> Callable[[], object]:
    """Import what children need, then fork one for each request. Returns in the child only: the program to run."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C is for pytest, which ends this process
    with socket.socket(
        fileno=fcntl.fcntl(int(sys.argv[-1]), fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH_FILE)
    ) as driver:
        os.close(int(sys.argv[-1]))
        for module in PRELOADED:
            __import__(module)
        measure_briefly()
        gc.collect()
        gc.freeze()  # collections in children copy none of their pages
        while (received := socket.recv_fds(driver, LENGTH.size, MAX_FILES))[0]:
            header, files, _, _ = received
            request: ChildRequest = pickle.loads(
                driver.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL)
            )
            if _fork_for(driver):
                _take_over(request, files)
                break
            for file in files:
                os.close(file)
        else:
            os._exit(0)
    return _program(request.arguments)


def _fork_for(driver: socket.socket) -> bool:
    """Fork a child whose parent is the process at the other end, and return whether this is the child.

    The child's own parent ends at once, and the process at the other end adopts what its
    descendants leave behind.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    driver.sendall(LENGTH.pack(os.getpid()))
    return True


def _take_over(request: ChildRequest, files: list[int]) -> None:
    """Make this forked child what the request asks for."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH_FILE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, request.files, strict=True):
        os.dup2(file, number)
        os.close(file)
    if request.is_session:
        os.setsid()
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    is_unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = TextIOWrapper(BufferedReader(FileIO(0, closefd=False)))
    sys.stdout = TextIOWrapper(
        BufferedWriter(FileIO(1, "w", closefd=False)), write_through=is_unbuffered
    )
    errors = BufferedWriter(FileIO(2, "w", closefd=False))
    sys.stderr = TextIOWrapper(errors, errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _program(arguments: list[str]) -> Callable[[], object]:
    """Return what `python` with these arguments runs, with sys.argv, sys.path and __main__ as it has them."""
    kind, what, *rest = arguments
    first = "" if kind == "-c" else os.getcwd()
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *added, *(path for path in sys.path[1:] if path not in added)]
    sys.argv[:] = [kind, *rest]
    if kind == "-m":
        return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = ModuleType("__main__")
    return lambda: exec(compile(what, "<string>", "exec"), vars(main))


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork Python programs that this test starts from a process which has imported torch and the engine."""
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
