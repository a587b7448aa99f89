"""EngineProcess: a Worker in a process of its own, used like a local object.

The engine's thread runs Python, so other Python code of its process delays it: in Ray Data's
process the same work took 1.1 times as long (`jobs/results/pipeline.md`). In a child process it
shares the interpreter only with the Worker, and the parent needs neither torch nor its memory. Both
ends of the pipe between them stand here. Several requests are in flight at a time. If the child
ends, pending requests get an EngineError that says how it ended; if the parent ends, the child
finds the pipe closed and ends too.

    engine = EngineProcess(config, run, [], WorkerPlan(threads=2), on_log=print)
    engine.wait_until_ready()
    table = await engine.answer(requests)
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pyarrow as pa

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.crash_isolation import WorkerError, classify_error
from eagle_ray.config import JobConfig
from eagle_ray.core.child_process import describe_exit, start_child
from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.runs.job_errors import WorkerDefect
from eagle_ray.runs.process_identity import process_name
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")
WORKER = "eagle_ray.batch.worker.embedding_worker:make_worker"  # a module and a class, or what returns one's object
# With -m, the child's classes would be those of __main__, unknown to the parent.
ENGINE_PROGRAM = f"from {__name__} import run_child; run_child()"
# The number of the first request, which has the worker's arguments; the others have tables.
STARTUP_REQUEST = 0
STOP_ADMISSION = -1  # in place of a request's number: the worker begins no further row
COUNTERS_EVERY_S = 2.0  # seconds between the counters of an engine at work


class ProcessEnded(EngineError):
    """The engine's process ended without reporting why."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that an engine's process logs while it starts, with its logging level."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A reply of the engine's process, in addition to the table.

    Attributes:
        number: number of the request; None for a heartbeat, which only carries the counters.
        counters: counters of the engine at that moment; None if it is not ready, or dead.
        error: reason why there is no table.
        line: a line that the worker logged while it starts; the reply itself follows later.
    """

    number: int | None
    counters: EngineCounters | None = None
    error: Exception | None = None
    line: LogLine | None = None


def send(pipe: Connection, message: Any, table: pa.Table | None = None) -> None:
    """Send a message, and a table in Arrow's stream format. Raises EOFError if the other end is gone."""
    try:
        pipe.send((message, None if table is None else _as_bytes(table)))
    except OSError as error:
        raise EOFError from error


def receive(pipe: Connection) -> tuple[Any, pa.Table | None]:
    """Return the next message and its table. Raises EOFError once the other end is gone."""
    try:
        message, data = pipe.recv()
    except OSError as error:
        raise EOFError from error
    return message, None if data is None else pa.ipc.open_stream(data).read_all()


def _as_bytes(table: pa.Table) -> pa.Buffer:
    """Serialize the table's own rows; its pickle would contain all rows of the table that it is a slice of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


class EngineProcess:
    """The parent's end of the pipe. worker_id names the child process, which holds the device.

    Args:
        config, run, carried, plan: arguments of the Worker.
        on_log: called with each line that the child logs while it starts.
        child: pipe to a child that already runs, and its process; None starts a child.
    """

    def __init__(
        self,
        config: JobConfig,
        run: Run,
        carried: list[pa.Field],
        plan: WorkerPlan,
        on_log: Callable[[LogLine], None],
        child: tuple[Connection, Any] | None = None,
    ):
        self._on_log = on_log
        self._process: Any  # a Popen, or what has its pid, kill and wait
        self._pipe, self._process = child or start_child(ENGINE_PROGRAM, config.name, WORKER)
        self.worker_id = process_name(self._process.pid)
        self._counters: EngineCounters | None = None
        self._numbers = itertools.count(STARTUP_REQUEST)
        self._pending: dict[int, Future[pa.Table | None]] = {}
        self._error: EngineError | None = None
        self._lock = threading.Lock()  # held to note a request while the listener is sure to see it
        self._sender = ThreadPoolExecutor(1, "eagle-ray-sender")
        self._listener = threading.Thread(
            target=self._listen, name="eagle-ray-listener", daemon=True
        )
        _, self._ready = self._register_request()
        self._listener.start()
        self._send((config, run, carried, plan))

    def wait_until_ready(self) -> None:
        """Wait for the start. Raises ConfigError if a model is missing, ProcessEnded, or
        WorkerError for other failures.
        """
        self._ready.result()

    async def answer(self, requests: pa.Table) -> pa.Table:
        """Answer a table as Worker.answer does. Raises EngineError once the engine or its process is dead."""
        number, future = self._register_request()
        await asyncio.wrap_future(self._sender.submit(self._send, number, requests))
        return await asyncio.wrap_future(future)

    def stop_admission(self) -> None:
        """Start no further row. Pending requests are answered without the rows that were not started."""
        self._sender.submit(self._send, STOP_ADMISSION)

    def counters(self) -> EngineCounters:
        """Return the engine's counters from its latest reply or heartbeat, once it is ready."""
        assert self._counters is not None, "the worker is not ready"
        return self._counters

    def close(self) -> None:
        """End the process and wait for it. Requests in flight get EngineError."""
        self._process.kill()
        self._listener.join()
        self._sender.shutdown()
        self._pipe.close()

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
            send(self._pipe, message, table)

    def _listen(self) -> None:
        try:
            while True:
                self._handle_reply(*receive(self._pipe))
        except EOFError:
            error: EngineError = ProcessEnded(
                f"the engine's process {describe_exit(self._process.wait())}"
            )
        except Exception as fault:  # such as no memory for the table: no later reply can be read
            error = EngineError(f"an answer was lost: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
        with self._lock:
            self._error = error
        for future in self._pending.values():
            _resolve(future, None, error)

    def _handle_reply(self, reply: EngineReply, table: pa.Table | None) -> None:
        if reply.line is not None:
            self._on_log(reply.line)
            return
        self._counters = reply.counters or self._counters
        if reply.number is not None:
            _resolve(self._pending.pop(reply.number), table, reply.error)


def _resolve(
    future: Future[pa.Table | None], table: pa.Table | None, error: Exception | None
) -> None:
    if not future.set_running_or_notify_cancel():
        return  # no caller waits for it any more
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(table)


class EngineChild:
    """The child's end of the pipe: a thread reads requests, and the main thread loads the models and answers them.

    The reading thread runs from the start. If the parent is gone, it ends this process at once,
    even while it loads, steps or hangs, so that its device memory is free again. It does not import
    Ray, and imports torch only once errors can be reported.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._loop = asyncio.new_event_loop()
        self._send_lock = threading.Lock()  # lines are logged by any thread
        self._num_in_flight = 0  # requests

    def run(self, worker_class: str) -> None:
        """Run a worker class, named as MODULE:CLASS, and answer requests until the pipe closes."""
        log.addHandler(logging.StreamHandler(sys.stderr))  # the actor's log
        arguments, _ = receive(self._pipe)
        threading.Thread(target=self._listen, name="eagle-ray-listener", daemon=True).start()
        module, _, name = worker_class.partition(":")
        try:
            with log_to(self._send_line):  # the user waits for this process to start
                self._worker = getattr(import_module(module), name)(*arguments)
        except Exception as error:  # reported in one line instead of a traceback
            self._send(EngineReply(STARTUP_REQUEST, error=_portable_error(error)))
            os._exit(1)
        self._send(EngineReply(STARTUP_REQUEST, self._worker.counters()))
        self._loop.call_soon(self._beat)
        self._loop.run_forever()

    def _beat(self) -> None:
        """Send counters while rows are in flight, so that long rows show progress."""
        if self._num_in_flight:
            self._send(EngineReply(None, self._worker.counters()))
        self._loop.call_later(COUNTERS_EVERY_S, self._beat)

    def _listen(self) -> NoReturn:
        try:
            while True:
                number, requests = receive(self._pipe)
                if number == STOP_ADMISSION:
                    self._loop.call_soon_threadsafe(self._worker.stop_admission)
                    continue
                asyncio.run_coroutine_threadsafe(self._answer(number, requests), self._loop)
        except EOFError:
            os._exit(0)
        except Exception:  # such as no memory for the table: no later request can be read
            log.exception("a batch was lost")
            os._exit(1)

    async def _answer(self, number: int, requests: pa.Table) -> None:
        self._num_in_flight += 1
        try:
            answers = await self._worker.answer(requests)
            self._send(EngineReply(number, self._worker.counters()), answers)
        except EngineError as error:
            self._send(EngineReply(number, error=_portable_error(error)))
        except Exception as error:  # a bug: it ends the job
            log.exception("a batch cannot be answered")
            self._send(
                EngineReply(
                    number, error=WorkerDefect(f"a worker failed: {classify_error(error).line}")
                )
            )
        finally:
            self._num_in_flight -= 1

    def _send_line(self, line: LogLine) -> None:
        self._send(EngineReply(STARTUP_REQUEST, line=line))

    def _send(self, reply: EngineReply, table: pa.Table | None = None) -> None:
        with suppress(EOFError), self._send_lock:  # the listener sees it too
            send(self._pipe, reply, table)


def _portable_error(error: Exception) -> Exception:
    """Return the error as a process without torch can unpickle it."""
    is_everywhere = isinstance(error, ConfigError) and not isinstance(error, UnfitDevice)
    return ConfigError(str(error)) if is_everywhere else WorkerError(classify_error(error))


@contextmanager
def log_to(send_line: Callable[[LogLine], None]) -> Iterator[None]:
    """Forward log records of level INFO and above."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: send_line(LogLine(record.levelno, record.getMessage()))  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def set_up_child() -> Connection:
    """Set up a child process and return its end of the pipe, whose file descriptor is the last
    command line argument."""
    faulthandler.enable()  # as in Ray's own workers
    log.setLevel(logging.INFO)
    pipe = Connection(int(sys.argv[-1]))
    os.set_inheritable(pipe.fileno(), False)  # processes started here do not keep it open
    return pipe


def run_child() -> None:
    """Run a child process. Its command line has the job's name, the worker's class and the pipe's file descriptor."""
    EngineChild(set_up_child()).run(sys.argv[-2])
