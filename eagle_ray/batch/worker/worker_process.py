"""WorkerProcess: a Worker in a child process, used like a local object.

The engine's thread runs Python, so other Python code of its process delays it: in Ray Data's process the same work took
1.1 times as long (`jobs/results/pipeline.md`). In the child process it shares the interpreter only with the Worker
(``worker_subprocess``), and the parent needs neither torch nor its memory. They talk through a ``Channel``, several
requests at a time. If the child ends, pending requests get an EngineError that says how it ended; if the parent ends,
the child finds the channel closed and ends too.

    worker = WorkerProcess(config, run, passthrough=[], threads=2)
    worker.wait_until_ready()
    table = await worker.answer(requests)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa

from eagle_ray.batch.worker.ipc import Channel
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.engine.counters import EngineCounters
from eagle_ray.runs.lease import process_name
from eagle_ray.runs.manifest import RunHandle

log = logging.getLogger("eagle_ray")
MODULE = "eagle_ray.batch.worker.worker_subprocess"
CLOSE_WITHIN_S = 60.0  # a step of the engine may have to end
STARTUP_REQUEST = 0  # the number of the first question, which is for the worker itself; the others are tables


class ProcessEnded(EngineError):
    """The worker's process ended without reporting why."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a worker's process logs while it starts, with its logging level."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A reply of the worker process, in addition to the table.

    Attributes:
        counters: the engine's at that moment; None if it is not ready, or dead.
        error: why there is no table.
        line: logged while the worker starts; the reply itself follows later.
    """

    number: int
    counters: EngineCounters | None = None
    error: Exception | None = None
    line: LogLine | None = None


def log_locally(line: LogLine) -> None:
    """Log a line of the worker's process in this one."""
    log.log(line.level, line.text)


class WorkerProcess:
    """Args are the Worker's, and on_log, which is called with each line that the process logs while it starts.

    worker_id names the worker's own process, which holds the device.
    """

    def __init__(
        self,
        config: JobConfig,
        run: RunHandle,
        passthrough: list[pa.Field],
        threads: int,
        on_log: Callable[[LogLine], None] = log_locally,
    ):
        self._on_log = on_log
        self._channel, child_end = Channel.pair()
        self._process = _start(config.name, child_end)
        self.worker_id = process_name(self._process.pid)
        self._counters: EngineCounters | None = None
        self._numbers = itertools.count(STARTUP_REQUEST)
        self._pending: dict[int, Future[pa.Table | None]] = {}
        self._error: EngineError | None = None
        self._lock = threading.Lock()  # held to note a question while the listener is sure to see it
        self._sender = ThreadPoolExecutor(1, "eagle-ray-sender")
        self._listener = threading.Thread(target=self._listen, name="eagle-ray-listener", daemon=True)
        _, self._ready = self._register_request()
        self._listener.start()
        self._send((config, run, passthrough, threads))

    def wait_until_ready(self) -> None:
        """Wait for the start. Raises ConfigError if a model is missing, ProcessEnded, or WorkerError for other
        failures.
        """
        self._ready.result()

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Answer a table as Worker.answer does. Raises EngineError once the engine or its process is dead."""
        number, future = self._register_request()
        await asyncio.wrap_future(self._sender.submit(self._send, number, requests))
        return await asyncio.wrap_future(future)

    def counters(self) -> EngineCounters:
        """Return the engine's counters as of the latest reply, once it is ready."""
        assert self._counters is not None, "the worker is not ready"
        return self._counters

    def close(self) -> None:
        """End the process and wait for it, CLOSE_WITHIN_S at most; what is in flight gets EngineError."""
        self._channel.end()
        try:
            self._process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._sender.shutdown()
        self._channel.close()

    def _register_request(self) -> tuple[int, Future[pa.Table | None]]:
        with self._lock:
            if self._error is not None:
                raise self._error
            number = next(self._numbers)
            future: Future[pa.Table | None] = Future()
            self._pending[number] = future
            return number, future

    def _send(self, message: object, table: pa.Table | None = None) -> None:
        with suppress(EOFError):  # the listener knows more
            self._channel.send(message, table)

    def _listen(self) -> None:
        try:
            while True:
                self._handle_reply(*self._channel.receive())
        except EOFError:
            error: EngineError = ProcessEnded(f"the engine's process {_describe_exit(self._process.wait())}")
        except Exception as fault:  # such as no memory for the table: nothing would ever be heard again
            error = EngineError(f"an answer was lost: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
        with self._lock:
            self._error = error
        for future in self._pending.values():
            _resolve(future, None, error)

    def _handle_reply(self, reply: WorkerReply, table: pa.Table | None) -> None:
        if reply.line is not None:
            self._on_log(reply.line)
            return
        self._counters = reply.counters or self._counters
        _resolve(self._pending.pop(reply.number), table, reply.error)


def _start(name: str, channel: Channel) -> subprocess.Popen:
    """Start a Python process with this one's module path and output streams.

    name: shown by ``ps``. The child is the only other holder of its channel end, so a process's end closes the
    channel.
    """
    with _sigint_blocked():
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, name, str(channel.fileno)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            pass_fds=[channel.fileno],
        )
    channel.close()
    return process


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes started here, from their first moment on: the parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _resolve(future: Future[pa.Table | None], table: pa.Table | None, error: Exception | None) -> None:
    if not future.set_running_or_notify_cancel():
        return  # no caller waits for it any more
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(table)


def _describe_exit(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
