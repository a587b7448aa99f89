"""SpareEngine: a process that the driver starts while Ray starts, and from which engines' processes are forked.

An engine's process imports torch and transformers, which takes seconds. The driver starts a spare
one before Ray. It checks the models there, so the driver itself imports neither library. Then the
process waits at a socket that only processes of this user on this machine reach, and forks a child
for each EngineProcess that connects: the first one of an actor, and those that replace a lost one.
The child takes over the actor's environment, directory, priorities and output streams, and serves
its pipe. Actors on other machines, and on machines with a GPU, start processes of their own.

    with SpareEngine() as spare:
        spare.start(config)
        ...                                  # start Ray
        spare.check_models()                 # raises ConfigError as hub.check_models does
        EngineProcess(config, run, carried, plan, on_log, fork_engine(spare.address))
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle_ray.batch.worker import engine_process
from eagle_ray.batch.worker.engine_process import (
    EngineChild,
    LogLine,
    log_to,
    set_up_child,
)
from eagle_ray.config import JobConfig
from eagle_ray.core.child_process import describe_exit, end_with_parent, start_child
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.runs.job_errors import ClusterError

log = logging.getLogger("eagle_ray")
SPARE_PROGRAM = f"from {__name__} import run_spare; run_spare()"
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of a socket's other end
MEMORY_SCORE = Path("/proc/self/oom_score_adj")
STANDARD_STREAMS = [1, 2]  # stdout and stderr
FORK_WITHIN_S = 60.0  # a spare process that imports what workers need takes seconds; one that was stopped never answers
EXIT_WITHIN_S = 5.0  # seconds from the end of a pipe to the end of its process
THREADS_VARIABLE = "OMP_NUM_THREADS"  # libraries read it when they are imported
# Ray sets this number for an actor that reserves no CPU, unless the user set another.
THREADS_OF_ACTORS = "1"


def has_torch() -> bool:
    """Return whether this process has already imported torch, so that checking models here costs no import."""
    return "torch" in sys.modules


class SpareEngine:
    """The driver's handle of the spare process.

    If torch is already imported here, no process is started, and the models are checked in this
    one.
    """

    def __init__(self) -> None:
        self._name = f"eagle-ray-{uuid.uuid4().hex}"
        self._config: JobConfig | None = None
        self._pipe: Connection | None = None
        self._process: subprocess.Popen | None = None
        self._is_checked = False

    def __enter__(self) -> SpareEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_checked(self) -> bool:
        """Return whether the models have passed their check."""
        return self._is_checked

    @property
    def pid(self) -> int:
        """Return the process id, or None before the process was started."""
        assert self._process is not None, "no process was started"
        return self._process.pid

    @property
    def address(self) -> str | None:
        """Return the address for fork_engine, or None if no process was started."""
        return None if self._process is None else self._name

    def start(self, config: JobConfig) -> None:
        """Start the process unless it is already running."""
        if self._config is not None:
            return
        self._config = config
        if not config.engine.is_own:
            return  # no engine of ours runs
        if has_torch() or not sys.platform.startswith("linux"):
            return
        threads = os.environ.get(THREADS_VARIABLE, THREADS_OF_ACTORS)
        self._pipe, self._process = start_child(
            SPARE_PROGRAM, config.name, self._name, {THREADS_VARIABLE: threads}, is_apart=True
        )
        with suppress(OSError):  # check_models reports that it has ended
            self._pipe.send(config)

    def check_models(self) -> None:
        """Wait for the check of the models. Raises as hub.check_models does, ClusterError if the process ended."""
        assert self._config is not None, "start comes first"
        if self._pipe is None:
            from eagle_ray.assembly.embedders import check_models_of

            check_models_of(self._config)
        elif (error := self._result(self._pipe)) is not None:
            raise error
        self._is_checked = True

    def close(self) -> None:
        """End the process at once. Engines forked from it run until their actors end them."""
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()

    def _result(self, pipe: Connection) -> Exception | None:
        try:
            while isinstance(message := pipe.recv(), LogLine):
                log.log(message.level, message.text)
            return message
        except (EOFError, OSError):
            assert self._process is not None
            how = describe_exit(self._process.wait())
            return ClusterError(
                f"the process that checks the models {how}. Run the same command again."
            )


@dataclass(frozen=True, slots=True)
class InheritedState:
    """Settings that a forked process takes over from its actor, besides its output streams.

    Attributes:
        memory_score: the process's oom_score_adj: a high score is killed first if memory is short;
            Ray gives its workers 1000.
        worker_class: class of the worker that it runs, as MODULE:CLASS.
    """

    environment: dict[str, str]
    directory: str
    niceness: int
    memory_score: str
    worker_class: str


class ForkedProcess:
    """A child of the spare process, with the methods of Popen that an EngineProcess needs.

    It is not this process's child, so its PID may be reused after its end. A file descriptor
    (pidfd) identifies it instead.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for its end and return the exit code, or None if the spare process has ended, too."""
        select.select([self._handle], [], [], EXIT_WITHIN_S)
        with suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                return os.waitstatus_to_exitcode(int(fields[-1]))
        return None


def fork_engine(address: str | None) -> tuple[Connection, ForkedProcess] | None:
    """Ask the spare process for a fork. Return the pipe to it and the process, or None if there is no spare process."""
    if address is None:
        return None
    with socket.socket(socket.AF_UNIX) as end, suppress(OSError, EOFError):
        end.connect("\0" + address)  # abstract: there is no file
        pid, user, _ = _other_end(end)
        if not pid or user != os.getuid():
            return None
        socket.send_fds(end, [b"\0"], STANDARD_STREAMS)
        pipe = Connection(os.dup(end.fileno()))
        score = MEMORY_SCORE.read_text()
        pipe.send(
            InheritedState(dict(os.environ), os.getcwd(), os.nice(0), score, engine_process.WORKER)
        )
        if not pipe.poll(FORK_WITHIN_S):
            return None
        return pipe, ForkedProcess(pipe.recv())
    return None


def _other_end(end: socket.socket) -> tuple[int, int, int]:
    return CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )


def run_spare() -> None:
    """Run the spare process. Its command line has the job's name, the socket's name and the driver's pipe."""
    driver = set_up_child()
    with socket.socket(fileno=os.dup(driver.fileno())) as end:
        # It reads nothing while it checks, or downloads a draft.
        end_with_parent(_other_end(end)[0], signal.SIGKILL)
    gc.disable()  # modules are made of objects that stay
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + sys.argv[-2])
        listener.listen()
        try:
            driver.send(_check(driver.recv(), driver))
        except (EOFError, OSError):  # the driver has ended
            return
        if not can_fork():
            return  # actors start processes of their own
        import eagle_ray.batch.worker.embedding_worker  # noqa: F401  # the rest of what a Worker imports

        gc.freeze()  # collections in children copy none of their pages
        gc.enable()
        ends: list[Any] = [driver, listener]
        while driver not in select.select(ends, [], [])[0]:
            with listener.accept()[0] as end:
                if _other_end(end)[1] == os.getuid() and _fork() == 0:
                    listener.close()
                    driver.close()
                    engine, worker_class = _take_over(end)
                    break
        else:
            return
    engine.run(worker_class)


def can_fork() -> bool:
    """Return whether a forked child of this process can run an engine.

    CUDA does not work in a child if its parent has looked for devices.
    """
    import torch

    return torch.cuda.device_count() == 0


def _fork() -> int:
    """Fork this process, which has no other threads, and return the child's pid, or 0 in the child.

    Children that have ended are kept until the next one starts, since their actors look at how they
    ended.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return os.fork()


def _check(config: JobConfig, driver: Connection) -> Exception | None:
    """Check the models and return the error as a process without torch can unpickle it. Lines go to the driver."""
    try:
        with log_to(driver.send):
            from eagle_ray.assembly.embedders import check_models_of

            check_models_of(config)
    except ConfigError as error:
        return ConfigError(str(error))  # some classes of it need torch
    except OSError as error:
        return error
    except Exception as error:
        log.exception("the models cannot be checked")
        return RuntimeError(f"{type(error).__name__}: {one_line(error)}")
    return None


def _take_over(end: socket.socket) -> tuple[EngineChild, str]:
    """Apply the actor's settings to this process, and return the engine to run. Exits if the actor is gone."""
    try:
        _, streams, _, _ = socket.recv_fds(end, 1, len(STANDARD_STREAMS))
        pipe = Connection(os.dup(end.fileno()))
        surroundings: InheritedState = pipe.recv()
        for stream, own in zip(streams, STANDARD_STREAMS, strict=True):
            os.dup2(stream, own)
            os.close(stream)
        os.environ.clear()
        os.environ.update(surroundings.environment)
        os.chdir(surroundings.directory)
        os.nice(max(0, surroundings.niceness - os.nice(0)))  # Ray's workers have 15
        if int(surroundings.memory_score) > int(MEMORY_SCORE.read_text()):  # less takes a privilege
            MEMORY_SCORE.write_text(surroundings.memory_score)
        pipe.send(os.getpid())
    except (EOFError, OSError):
        os._exit(1)
    return EngineChild(pipe), surroundings.worker_class
