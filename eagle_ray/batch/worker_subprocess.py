"""WorkerSubprocess: the other end of a WorkerProcess. It runs a Worker and answers requests until the channel closes.

A thread of its own reads the channel from the start. If the parent process is gone, this process ends at once, whether
it loads, steps or hangs, and its device memory is free again. It does not import Ray, and imports torch only once
errors can be reported.

    $ python -m eagle_ray.batch.worker_subprocess NAME FD
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

from eagle_ray.batch.error_classifier import WorkerError, classify_error
from eagle_ray.batch.ipc import Channel
from eagle_ray.batch.job_errors import WorkerDefect
from eagle_ray.batch.worker_process import START, Answer, LogLine
from eagle_ray.config import ConfigError
from eagle_ray.errors import EngineError

log = logging.getLogger("eagle_ray")


class ToChannel(logging.Handler):
    """Send what is logged to the process that asks, whose user waits for this one to start."""

    def __init__(self, say: Callable[[Answer], None]):
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(Answer(START, line=LogLine(record.levelno, record.getMessage())))


class WorkerSubprocess:
    """One worker in two threads: one reads requests, the main one loads the models and then answers in its loop."""

    def __init__(self, channel: Channel):
        self._channel, self._loop = channel, asyncio.new_event_loop()
        self._sending = threading.Lock()  # lines are logged by any thread

    def run(self, make_worker: Callable[..., Any]) -> NoReturn:
        arguments, _ = self._channel.receive()
        threading.Thread(target=self._listen, name="eagle-ray-listener", daemon=True).start()
        try:
            with self._log_in_channel():
                self._worker = make_worker(*arguments)
        except Exception as error:  # whatever it is, it is said in one line and not in a page of a traceback
            self._say(Answer(START, error=_told(error)))
            os._exit(1)
        self._say(Answer(START, self._worker.counters()))
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
            self._say(Answer(number, self._worker.counters()), answers)
        except EngineError as error:
            self._say(Answer(number, error=_told(error)))
        except Exception as error:  # a bug: it ends the job
            log.exception("a batch cannot be answered")
            self._say(Answer(number, error=WorkerDefect(f"a worker failed: {classify_error(error).line}")))

    @contextmanager
    def _log_in_channel(self) -> Iterator[None]:
        handler = ToChannel(self._say)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    def _say(self, answer: Answer, table: pa.Table | None = None) -> None:
        with suppress(EOFError), self._sending:  # the listener sees it too
            self._channel.send(answer, table)


def main(make_worker: Callable[..., Any]) -> NoReturn:
    """make_worker: called with a Worker's arguments, returns something with a Worker's verbs."""
    faulthandler.enable()  # as in Ray's own workers
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))  # the actor's log
    WorkerSubprocess(Channel.inherited(int(sys.argv[-1]))).run(make_worker)


def _worker(*arguments: Any) -> Any:
    from eagle_ray.batch.worker import Worker  # imports torch and transformers; errors are reported from here on

    return Worker(*arguments)


def _told(error: Exception) -> Exception:
    """As a process without torch can read it."""
    return ConfigError(str(error)) if isinstance(error, ConfigError) else WorkerError(classify_error(error))


if __name__ == "__main__":
    main(_worker)
