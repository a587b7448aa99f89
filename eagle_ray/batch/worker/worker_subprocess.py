"""WorkerSubprocess: the other end of a WorkerProcess. It runs a Worker and answers requests until the channel closes.

A thread of its own reads the channel from the start. If the parent process is gone, this process ends at once, whether
it loads, steps or hangs, and its device memory is free again. It does not import Ray, and imports torch only once
errors can be reported.

    $ python -m eagle_ray.batch.worker.worker_subprocess NAME FD
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import pyarrow as pa

from eagle_ray.batch.worker.engine_process import STARTUP_REQUEST, LogLine, WorkerReply
from eagle_ray.batch.worker.error_classifier import WorkerError, classify_error
from eagle_ray.batch.worker.ipc import Channel
from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.runs.job_errors import WorkerDefect

log = logging.getLogger("eagle_ray")


class ChannelLogHandler(logging.Handler):
    """Sends log records to the parent, whose user waits for this process to start."""

    def __init__(self, send: Callable[[WorkerReply], None]):
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(WorkerReply(STARTUP_REQUEST, line=LogLine(record.levelno, record.getMessage())))


class WorkerSubprocess:
    """One worker in two threads: one reads requests, the main one loads the models and then answers in its loop."""

    def __init__(self, channel: Channel):
        self._channel, self._loop = channel, asyncio.new_event_loop()
        self._send_lock = threading.Lock()  # lines are logged by any thread

    def run(self, make_worker: Callable[..., Any]) -> None:
        arguments, _ = self._channel.receive()
        threading.Thread(target=self._listen, name="eagle-ray-listener", daemon=True).start()
        try:
            with self._log_to_channel():
                self._worker = make_worker(*arguments)
        except Exception as error:  # whatever it is, it is said in one line and not in a page of a traceback
            self._send(WorkerReply(STARTUP_REQUEST, error=_portable_error(error)))
            os._exit(1)
        self._send(WorkerReply(STARTUP_REQUEST, self._worker.counters()))
        self._loop.run_forever()

    def _listen(self) -> NoReturn:
        try:
            while True:
                number, requests = self._channel.receive()
                asyncio.run_coroutine_threadsafe(self._answer(number, requests), self._loop)
        except EOFError:
            os._exit(0)
        except Exception:  # such as no memory for the table: nothing would ever be heard again
            log.exception("a batch was lost")
            os._exit(1)

    async def _answer(self, number: int, requests: pa.Table) -> None:
        try:
            answers = await self._worker.answer(requests)
            self._send(WorkerReply(number, self._worker.counters()), answers)
        except EngineError as error:
            self._send(WorkerReply(number, error=_portable_error(error)))
        except Exception as error:  # a bug: it ends the job
            log.exception("a batch cannot be answered")
            self._send(WorkerReply(number, error=WorkerDefect(f"a worker failed: {classify_error(error).line}")))

    @contextmanager
    def _log_to_channel(self) -> Iterator[None]:
        handler = ChannelLogHandler(self._send)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    def _send(self, reply: WorkerReply, table: pa.Table | None = None) -> None:
        with suppress(EOFError), self._send_lock:  # the listener sees it too
            self._channel.send(reply, table)


def main(make_worker: Callable[..., Any]) -> None:
    """Run a worker. make_worker: called with a Worker's arguments; returns an object with a Worker's methods."""
    faulthandler.enable()  # as in Ray's own workers
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))  # the actor's log
    WorkerSubprocess(Channel.inherited(int(sys.argv[-1]))).run(make_worker)


def _make_worker(*arguments: Any) -> Any:
    from eagle_ray.batch.worker.worker import Worker  # imports torch and transformers; errors are reported from here on

    return Worker(*arguments)


def _portable_error(error: Exception) -> Exception:
    """Return the error as a process without torch can unpickle it."""
    is_everywhere = isinstance(error, ConfigError) and not isinstance(error, UnfitDevice)
    return ConfigError(str(error)) if is_everywhere else WorkerError(classify_error(error))


if __name__ == "__main__":
    main(_make_worker)
