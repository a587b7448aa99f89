"""EngineClient: the protocol by which requests are answered, whichever engine does it.

    client = InProcessClient(bundle.engine, make_sequences, rows, limits)
    call = Call()
    rows = await client.answer(request, range(2), call)      # a row for each of the two samples

There are two kinds of errors. A RequestError concerns one request; others can be answered. Any
other error concerns the engine: EngineError if its process should be replaced, JobError if no
worker can go on.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow
from eagle_ray.runs.job_errors import JobError

log = logging.getLogger("eagle_ray")


class AdmissionStopped(Exception):
    """Raised when the run may send no further request."""


class Admitted(Protocol):
    """A sample or a turn that was given to an engine. admitted_at is the time when it got a slot, None before."""

    @property
    def admitted_at(self) -> float | None: ...


@dataclass(slots=True, eq=False)
class Call:
    """One row's samples and turns at an engine so far, and the tasks that wait for them.

    Attributes:
        is_skipped: whether the row was withdrawn because the run starts no further row.
    """

    parts: list[Admitted] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    is_skipped: bool = False

    @property
    def has_begun(self) -> bool:
        """Return whether any of the samples has got a slot."""
        return any(part.admitted_at is not None for part in self.parts)

    def cancel(self) -> None:
        """Abort the samples that are not done."""
        for task in self.tasks:
            task.cancel()

    async def run(self, parts: Iterable[Admitted], tasks: list[asyncio.Task[Any]]) -> list[Any]:
        """Run tasks and return their results. If one fails, the others are aborted.

        A conversation's task may first run after its row was withdrawn. Then nothing is started.
        """
        self.parts += parts
        self.tasks += tasks
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def check_not_skipped(self) -> None:
        """Raise CancelledError if the row was withdrawn."""
        if self.is_skipped:
            raise asyncio.CancelledError


class EngineClient(Protocol):
    """An engine as the worker of a job sees it."""

    async def answer(self, request: Request, samples: Iterable[int], call: Call) -> list[OutputRow]:
        """Return a row for each of these samples.

        Raises RequestError, an error of the engine, or AdmissionStopped if the run sends no further
        request.

        Args:
            request: a prompt, or the next turn of a conversation.
            call: record of the row's samples at the engine, by which they can be cancelled.
        """
        ...

    def counters(self) -> EngineCounters:
        """Return the engine's counters of steps, tokens and seconds so far."""
        ...

    def close(self) -> None:
        """End the engine. Requests in flight get EngineError."""
        ...


@contextmanager
def as_row_error(request: Request, is_private: bool) -> Iterator[None]:
    """Turn any error that one row's content causes into that row's RequestError.

    The only broad catch: tokenizers, templates and answers of endpoints are arbitrary text, and one
    row must never end the job.

    Args:
        is_private: whether the log must not quote the row.
    """
    try:
        yield
    except (RequestError, EngineError, JobError):
        raise
    except Exception as error:
        if is_private:  # the error's own words may quote the row
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("row %s: internal error: %s\n%s", request.id, type(error).__name__, frames)
        else:
            log.exception("row %s: internal error", request.id)
        raise RequestError(
            "internal_error", f"{type(error).__name__}: {error}; please report it"
        ) from error
