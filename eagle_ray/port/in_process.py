"""InProcessClient: an engine of this process with the interface of EngineClient.

A row that occupies a slot longer than its timeout becomes an error; the clock starts when the
engine admits the sequence, so time in the queue does not count.

    client = InProcessClient(bundle.engine, make_sequences, rows, timeout_s=60.0)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.engine.engine import Engine
from eagle_ray.port.engine_client import Call, as_row_error
from eagle_ray.requests.output_rows import OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow

MakeSequences = Callable[[Request, Iterable[int]], list[Sequence]]


class InProcessClient:
    """A client of an engine that runs in a thread of this process.

    Attributes:
        engine: the engine's thread. Its step loop has the engine itself.
    """

    def __init__(
        self,
        engine: Engine,
        make_sequences: MakeSequences,
        rows: OutputRows,
        timeout_s: float | None = None,
    ):
        """Start the engine's thread.

        Args:
            make_sequences: returns the sequences of samples of a request. Raises RequestError.
            rows: makes rows of finished sequences.
            timeout_s: seconds that a sequence may hold a slot; None for no limit.
        """
        self.engine = AsyncEngine(engine)
        self._make_sequences = make_sequences
        self._rows = rows
        self._timeout_s = timeout_s
        self._is_private = not rows.config.output.store_prompt

    async def answer(self, request: Request, samples: Iterable[int], call: Call) -> list[OutputRow]:
        """Return a row for each of these samples, as EngineClient.answer does."""
        with as_row_error(request, self._is_private):
            sequences = self._make_sequences(request, samples)
        call.check_not_skipped()
        tasks = [
            asyncio.ensure_future(generate_within(self.engine, sequence, self._timeout_s))
            for sequence in sequences
        ]
        await call.run(sequences, tasks)
        with as_row_error(request, self._is_private):
            return self._rows.of(request, sequences)

    def counters(self) -> EngineCounters:
        """Return the engine's counters of steps, tokens and seconds so far."""
        return self.engine.counters()

    def close(self) -> None:
        """End the engine's thread."""
        self.engine.close()


async def generate_within(
    engine: AsyncEngine, sequence: Sequence, timeout_s: float | None
) -> Sequence:
    """Run a sequence and return it finished. Raises RequestError("timeout") timeout_s seconds after its admission."""
    if timeout_s is None:
        return await engine.generate(sequence)
    task = asyncio.ensure_future(engine.generate(sequence))
    try:
        while not task.done():
            if (left := _seconds_left(sequence, timeout_s)) <= 0:
                raise _timeout(sequence, timeout_s)
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        task.cancel()


def _seconds_left(sequence: Sequence, timeout_s: float) -> float:
    """Return a lower bound of the remaining time: all of it before the admission."""
    return (
        timeout_s
        if sequence.admitted_at is None
        else sequence.admitted_at + timeout_s - time.monotonic()
    )


def _timeout(sequence: Sequence, timeout_s: float) -> RequestError:
    limit = f"not done {timeout_s:g} s after it got a slot"
    if sequence.pooling is not None:
        remedy = ": raise execution.row_timeout_s or give a shorter text"
    elif sequence.generates:
        made = f"{len(sequence.output_ids)} of {sequence.max_tokens} tokens made"
        remedy = f", {made}: raise execution.row_timeout_s or lower max_tokens"
    elif sequence.scoring is not None and sequence.scoring.continuations:
        remedy = ": raise execution.row_timeout_s or give fewer continuations or a shorter prompt"
    else:
        remedy = ": raise execution.row_timeout_s or give a shorter prompt"
    return RequestError("timeout", limit + remedy)
