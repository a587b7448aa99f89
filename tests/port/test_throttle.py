"""The throttle against endpoints with limits, in virtual time: how much of a limit is used, and how often it is hit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from eagle_ray.port.engine_client import AdmissionStopped
from eagle_ray.port.throttle import (
    AttemptOutcome,
    Demand,
    Permit,
    Stop,
    Throttle,
    ThrottleSettings,
)
from tests.support.virtual_time import run_in_virtual_time

LIMIT = 600  # requests a minute
MINUTES = 4


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Bucket:
    """A limit of LIMIT requests a minute, of which `burst` may come at once."""

    burst: float = 10.0
    level: float = 10.0
    at: float = 0.0
    num_good: int = 0
    num_limited: int = 0

    def take(self) -> bool:
        self.level = min(self.burst, self.level + (now() - self.at) * LIMIT / 60)
        self.at = now()
        is_good = self.level >= 1
        self.level -= is_good
        self.num_good += is_good
        self.num_limited += not is_good
        return is_good

    @property
    def refill_s(self) -> float:
        return (1 - self.level) * 60 / LIMIT

    @property
    def reset_s(self) -> float:
        return (self.burst - self.level) * 60 / LIMIT


Answer = Callable[[Bucket], AttemptOutcome]


def plain(bucket: Bucket) -> AttemptOutcome:
    return (
        AttemptOutcome(tokens=100)
        if bucket.take()
        else AttemptOutcome(is_limited=True, is_good=False)
    )


def with_seconds(bucket: Bucket) -> AttemptOutcome:
    if bucket.take():
        return AttemptOutcome(tokens=100)
    return AttemptOutcome(is_limited=True, is_good=False, retry_after_s=max(1.0, bucket.refill_s))


def with_headers(bucket: Bucket) -> AttemptOutcome:
    is_good = bucket.take()
    return AttemptOutcome(
        tokens=100,
        is_limited=not is_good,
        is_good=is_good,
        remaining=float(int(bucket.level)),
        reset_s=bucket.reset_s,
    )


async def drive(
    settings: ThrottleSettings, answer: Answer, bucket: Bucket, workers: int = 60
) -> Throttle:
    """Ask for MINUTES with more workers than the limit needs; each answer takes a second."""
    throttle = Throttle(settings, clock=now)

    async def worker() -> None:
        while now() < MINUTES * 60:
            permit = await throttle.acquire(Demand(100))
            await asyncio.sleep(1.0)
            await throttle.release(permit, answer(bucket))

    tasks = [asyncio.ensure_future(worker()) for _ in range(workers)]
    await asyncio.sleep(MINUTES * 60)
    for task in tasks:
        task.cancel()
    return throttle


@pytest.mark.parametrize(
    ("settings", "answer", "bucket"),
    [
        (ThrottleSettings(requests_per_minute=LIMIT), plain, Bucket()),
        (ThrottleSettings(requests_per_minute=LIMIT), with_seconds, Bucket(60.0, 60.0)),
        (ThrottleSettings(), with_headers, Bucket(60.0, 60.0)),
        (ThrottleSettings(), with_seconds, Bucket(60.0, 60.0)),
        (ThrottleSettings(), plain, Bucket(60.0, 60.0)),
    ],
    ids=["configured", "configured, burst", "headers", "retry-after", "bare"],
)
def test_a_limit_is_used_and_hardly_ever_hit(
    settings: ThrottleSettings, answer: Answer, bucket: Bucket
) -> None:
    run_in_virtual_time(drive(settings, answer, bucket))
    used = bucket.num_good / (LIMIT * MINUTES)
    limited = bucket.num_limited / (bucket.num_good + bucket.num_limited)
    assert used >= 0.95 and limited <= 0.02, (used, limited)


def test_a_burst_cuts_the_requests_in_flight_once() -> None:
    async def work() -> tuple[float, float]:
        throttle = Throttle(ThrottleSettings(concurrency=8), clock=now)
        permits = [await throttle.acquire(Demand()) for _ in range(8)]
        for permit in permits:
            await throttle.release(
                permit, AttemptOutcome(is_limited=True, is_good=False, retry_after_s=7.0)
            )
        began = now()
        await throttle.acquire(Demand())
        return throttle.limit, now() - began

    limit, waited = run_in_virtual_time(work())
    assert limit == 6.0 and waited == pytest.approx(7.0)


def test_more_requests_are_in_flight_while_tokens_come_faster() -> None:
    async def work(best: int) -> float:
        throttle = Throttle(ThrottleSettings(), clock=now)

        async def worker() -> None:
            while now() < 300:
                permit = await throttle.acquire(Demand())
                await asyncio.sleep(max(1.0, throttle.num_in_flight / best))
                await throttle.release(permit, AttemptOutcome(tokens=100))

        await asyncio.gather(*(worker() for _ in range(80)))
        return throttle.limit

    assert 30 <= run_in_virtual_time(work(best=32)) <= 64


def test_nothing_is_sent_beyond_the_limit_of_dollars() -> None:
    async def work() -> tuple[int, float, Stop | None]:
        throttle = Throttle(ThrottleSettings(max_dollars=1.0, spent=0.5), clock=now)
        num_sent = 0

        async def worker() -> None:
            nonlocal num_sent
            while True:
                permit = await throttle.acquire(Demand(dollars=0.1))
                num_sent += 1
                await asyncio.sleep(1)
                await throttle.release(permit, AttemptOutcome(dollars=0.04))

        results = await asyncio.gather(*(worker() for _ in range(4)), return_exceptions=True)
        assert all(isinstance(result, AdmissionStopped) for result in results)
        return num_sent, throttle.spent, throttle.stopped

    num_sent, spent, stopped = run_in_virtual_time(work())
    assert num_sent == 12 and spent == pytest.approx(0.98)
    assert stopped is not None and stopped.kind == "max_dollars"


def test_tokens_a_minute_are_paced_by_what_answers_had() -> None:
    async def work() -> float:
        throttle = Throttle(ThrottleSettings(tokens_per_minute=6000), clock=now)
        for _ in range(100):
            permit = await throttle.acquire(Demand(tokens=1000))  # of which 100 are made
            await throttle.release(permit, AttemptOutcome(tokens=100))
        return now()

    assert run_in_virtual_time(work()) == pytest.approx(100 * 100 / 6000 * 60 / 0.98, rel=0.02)


def test_a_lease_of_a_worker_that_is_gone_is_taken_back() -> None:
    async def work() -> Permit:
        throttle = Throttle(ThrottleSettings(concurrency=1, timeout_s=10), clock=now)
        await throttle.acquire(Demand())  # never released
        return await throttle.acquire(Demand())

    assert run_in_virtual_time(work()).number == 2
