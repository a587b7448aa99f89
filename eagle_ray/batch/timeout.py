"""Timeout: a sequence's answer, or an error once it has held a slot for too long.

The clock is the engine's and starts when the sequence is admitted: waiting in the queue costs a row nothing. A
cancelled sequence gives its slot back at the engine's next step, and its neighbours do not notice.

    >>> await answered(engine.generate(sequence), sequence, timeout_s=60.0)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from eagle_ray.core.sequence import Sequence
from eagle_ray.errors import RequestError


async def with_timeout(answer: Coroutine[Any, Any, Sequence], sequence: Sequence, timeout_s: float | None) -> Sequence:
    """What `answer` returns for the sequence. Raises RequestError("timeout") timeout_s seconds after its admission."""
    if timeout_s is None:
        return await answer
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            if (left := _seconds_left(sequence, timeout_s)) <= 0:
                raise _timeout(sequence, timeout_s)
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        task.cancel()


def _seconds_left(sequence: Sequence, timeout_s: float) -> float:
    """At least so long the sequence may still go on: all of it before it is admitted."""
    return timeout_s if sequence.admitted_at is None else sequence.admitted_at + timeout_s - time.monotonic()


def _timeout(sequence: Sequence, timeout_s: float) -> RequestError:
    return RequestError(
        "timeout",
        f"not done {timeout_s:g} s after it got a slot, {len(sequence.output_ids)} of {sequence.max_tokens} tokens "
        "made: raise execution.row_timeout_s or lower max_tokens",
    )
