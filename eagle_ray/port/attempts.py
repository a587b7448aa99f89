"""Attempts at a request: each with a permit of the throttle, and again for as long as a failure may pass.

    failures = Failures({LIMITED: 20, FAILED: 3, UNREACHABLE: UNLIMITED})
    answer = await ask_until_answered(throttle, demand, send, wait_for_next)

A request that is tried again first gives its permit back, and so holds none while it waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from eagle_ray.port.endpoint_answers import Failed
from eagle_ray.port.throttle import Demand, Permit, ThrottleClient

Answer = TypeVar("Answer")
UNLIMITED = math.inf  # attempts of a kind of failure that says nothing of the request


@dataclass(slots=True)
class Failures:
    """The failed attempts at one request.

    Attributes:
        budgets: attempts that each kind of failure may take; other kinds end the request.
        num_by_kind: failures so far.
    """

    budgets: Mapping[str, float]
    num_by_kind: Counter[str] = field(default_factory=Counter)

    def is_last(self, failed: Failed) -> bool:
        """Count a failure, and return whether the request is not tried again."""
        self.num_by_kind[failed.kind] += 1
        return self.num_by_kind[failed.kind] >= self.budgets.get(failed.kind, 1)


async def ask_until_answered(
    throttle: ThrottleClient,
    demand: Demand,
    send: Callable[[Permit], Awaitable[Answer | Failed]],
    wait_for_next: Callable[[Failed], Awaitable[None]],
) -> Answer:
    """Return the answer of the first attempt that has one. Raises AdmissionStopped, and as wait_for_next does.

    Args:
        send: makes one attempt, releases its permit and returns the answer or the failure.
        wait_for_next: waits until a failed request may be tried again, or raises its last error.
    """
    while True:
        permit = await throttle.acquire(demand)
        result = await send(permit)
        if not isinstance(result, Failed):
            return result
        await wait_for_next(result)
