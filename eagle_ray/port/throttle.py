"""Throttle: limit the requests in flight at an endpoint, and the rate at which they are sent.

One throttle serves all workers of a job, because an endpoint counts requests by API key. It obeys
configured limits, Retry-After and `x-ratelimit-*`, and finds the other limits by itself:

- Requests in flight: a burst of answers that say "limited" cuts their number once; each 25 answers
without
  one add one. Without any, the number grows for as long as that makes tokens come faster.
- Pace: after a first burst, requests follow each other as fast as they were answered before it, and
that pace
  grows by one hundredth every few seconds.

    throttle = Throttle(ThrottleSettings(concurrency=8, requests_per_minute=600))
    permit = await throttle.acquire(Demand(tokens=300))
    ...                                                # send the request, and read its answer
    await throttle.release(permit, AttemptOutcome(tokens=280, dollars=0.0002))

If the job stops, the throttle stops: then `acquire` raises AdmissionStopped, and rows in flight are
finished.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from eagle_ray.port.engine_client import AdmissionStopped

START = 8  # requests in flight at first, if their number is not configured
MAX_IN_FLIGHT = 512
CUT = 0.75  # by a burst of limited answers
ANSWERS_PER_STEP = 25  # that add one request in flight
CLIMB = 1.25  # growth of the number in flight in a step without limits
GAIN = 1.02  # growth of tokens per second that such a step must bring
WINDOW_ANSWERS = 20  # answers of a window in which tokens a second are measured, at least
WINDOW_S = 3.0  # seconds of such a window, at least
PATIENCE = 10  # windows without a gain, after which a larger number is tried again
PACE_SHARE = 0.98  # of a configured limit that is used: clocks and bursts differ
# Seconds after a limited answer that names no time: the first pause, and the bound of its doubling.
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MEASURE_S = 60.0  # seconds before a burst over which the pace is measured
PACE_STEP_S = 15.0
PACE_GROWTH = 1.01
REPEATED_S = 5.0  # seconds between two bursts of which the second is not the pace's
PERMIT_S = 60.0  # seconds beyond a request's timeout after which its permit is taken back


@dataclass(frozen=True, slots=True)
class ThrottleSettings:
    """The configured limits of a throttle.

    Attributes:
        concurrency: maximum requests in flight; None to adapt it.
        timeout_s: maximum seconds of a request.
        max_dollars: budget for all requests; None for no limit.
        spent: dollars that earlier attempts have spent.
    """

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    timeout_s: float = 600.0
    max_dollars: float | None = None
    spent: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Expected consumption of a request: tokens of prompt and output, and maximum dollars."""

    tokens: float = 0.0
    dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class Permit:
    """The permission to send one request.

    Attributes:
        burst: number of the current burst; limited answers to requests of an earlier burst reduce
            nothing.
        waited_s: seconds of delay by a pause or the pace, without the wait for another request to
            end.
    """

    number: int
    burst: int
    waited_s: float
    demand: Demand
    expires_at: float


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How a request ended.

    Attributes:
        tokens: tokens of prompt and output; None if unknown.
        dollars: cost, or the maximum possible cost.
        is_limited: whether the response said that a limit is reached.
        is_good: whether it was answered.
        retry_after_s: seconds that the endpoint asks to wait.
        remaining, reset_s: number of requests that may follow, from the response's headers, and the
            seconds until more may.
    """

    tokens: float | None = None
    dollars: float = 0.0
    is_limited: bool = False
    is_good: bool = True
    retry_after_s: float | None = None
    remaining: float | None = None
    reset_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Why no further request is sent: a kind of STOPS, and the endpoint's message."""

    kind: str
    words: str


class ThrottleClient(Protocol):
    """Protocol of a throttle in this process or in another."""

    async def acquire(self, demand: Demand) -> Permit:
        """Wait until a request may be sent. Raises AdmissionStopped."""
        ...

    async def release(self, permit: Permit, outcome: AttemptOutcome) -> None:
        """Report how a request ended."""
        ...

    async def stop(self, stop: Stop) -> None:
        """Allow no further request."""
        ...


@dataclass(slots=True)
class RateWindow:
    """Tokens received since a moment, while the number of requests in flight was at its limit."""

    since: float
    tokens: float = 0.0
    answers: int = 0


@dataclass(slots=True)
class Pacer:
    """Spaces requests, or their tokens, to a maximum rate.

    Attributes:
        per_s: maximum number per second; None for no limit.
        free_at: time at which the next may be sent.
    """

    per_s: float | None
    free_at: float = 0.0

    def wait_s(self, now: float) -> float:
        return 0.0 if self.per_s is None else max(0.0, self.free_at - now)

    def take(self, amount: float, now: float) -> None:
        if self.per_s is not None:
            self.free_at = max(now, self.free_at) + amount / self.per_s

    def give_back(self, amount: float) -> None:
        if self.per_s is not None:
            self.free_at -= amount / self.per_s


@dataclass(slots=True)
class Throttle:
    """A throttle of this process. `clock` gives its times, and it waits by `sleep`."""

    settings: ThrottleSettings
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    stopped: Stop | None = None
    num_limited: int = 0
    num_sent: int = 0
    spent: float = 0.0
    limit: float = 0.0
    _permits: dict[int, Permit] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _burst: int = 0
    _paused_until: float = 0.0
    _pause_s: float = PAUSE_S
    _burst_at: float = 0.0
    _good_at: deque[float] = field(default_factory=deque)
    _num_priced: int = 0
    _allowed: float | None = None
    _allowed_until: float = 0.0
    _requests: Pacer = field(default_factory=lambda: Pacer(None))
    _tokens: Pacer = field(default_factory=lambda: Pacer(None))
    _is_pace_measured: bool = False
    _pace_changed_at: float = 0.0
    _window: RateWindow = field(default_factory=lambda: RateWindow(0.0))
    _best_rate: float = 0.0
    _best_limit: float = 0.0
    _windows_without_gain: int = 0
    _started_at: float = 0.0

    def __post_init__(self) -> None:
        settings = self.settings
        self.spent = settings.spent
        self.limit = float(settings.concurrency or START)
        self._best_limit = self.limit
        self._requests = Pacer(_per_second(settings.requests_per_minute))
        self._tokens = Pacer(_per_second(settings.tokens_per_minute))
        self._started_at = self.clock()
        self._window = RateWindow(self._started_at)

    @property
    def num_in_flight(self) -> int:
        """Return how many requests are in flight."""
        return len(self._permits)

    async def acquire(self, demand: Demand) -> Permit:
        """Wait until a request may be sent, in the order of the calls. Raises AdmissionStopped."""
        waited_s = 0.0
        async with self._turn:
            while (wait := self._wait_s(demand)) > 0:
                began = self.clock()
                is_full = self.num_in_flight >= int(self.limit)
                await self._wait(wait)
                waited_s += 0.0 if is_full else self.clock() - began
            if self.stopped is not None:
                raise AdmissionStopped
            return self._grant(demand, waited_s)

    async def release(self, permit: Permit, outcome: AttemptOutcome) -> None:
        """Report how a request ended."""
        now = self.clock()
        self._permits.pop(permit.number, None)
        self.spent += outcome.dollars
        if outcome.dollars:
            self._num_priced += 1
        if outcome.tokens is not None:
            self._tokens.give_back(permit.demand.tokens - outcome.tokens)
        if outcome.remaining is not None and outcome.reset_s is not None:
            # The endpoint may not have counted what is in flight.
            self._allowed = outcome.remaining - self.num_in_flight
            self._allowed_until = now + min(outcome.reset_s, MAX_PAUSE_S)
        if outcome.is_limited:
            self._observe_limited(permit, outcome, now)
        elif outcome.is_good:
            self._observe_good(outcome, now)
        self._changed.set()

    async def stop(self, stop: Stop) -> None:
        """Allow no further request. The first reason is kept."""
        self.stopped = self.stopped or stop
        self._changed.set()

    def _grant(self, demand: Demand, waited_s: float) -> Permit:
        now = self.clock()
        self._requests.take(1, now)
        self._tokens.take(demand.tokens, now)
        if self._allowed is not None:
            self._allowed -= 1
        self.num_sent += 1
        expires_at = now + self.settings.timeout_s + PERMIT_S
        permit = Permit(self.num_sent, self._burst, waited_s, demand, expires_at)
        self._permits[permit.number] = permit
        return permit

    def _wait_s(self, demand: Demand) -> float:
        """Return the seconds after which to look again; 0 if the request may be sent, or never."""
        if self.stopped is not None:
            return 0.0
        now = self.clock()
        if self.num_in_flight >= int(self.limit):
            self._drop_expired(now)
            if self.num_in_flight >= int(self.limit):
                return MAX_PAUSE_S  # or until a request ends
        if not self._may_pay(demand):
            if self.num_in_flight:
                return MAX_PAUSE_S
            words = f"{self.spent:.4f} dollars are spent, and a request may cost {self._expected(demand):.4f}"
            self.stopped = Stop("max_dollars", words)
            return 0.0
        waits = [self._paused_until - now, self._requests.wait_s(now), self._tokens.wait_s(now)]
        if self._allowed is not None and self._allowed < 1:
            if now < self._allowed_until:
                waits.append(self._allowed_until - now)
            elif not self.num_in_flight:
                self._allowed = None
            else:
                self._allowed = 1.0
        return max(0.0, *waits)

    def _may_pay(self, demand: Demand) -> bool:
        """Return whether what is spent, what is in flight and this request stay below the limit of dollars."""
        if self.settings.max_dollars is None:
            return True
        expected = self._expected(demand)
        return self.spent + (self.num_in_flight + 1) * expected <= self.settings.max_dollars

    def _expected(self, demand: Demand) -> float:
        """Return the dollars that a request costs by those before it: at most what it may, and that at first."""
        if not self._num_priced:
            return demand.dollars
        return min(self.spent_here / self._num_priced, demand.dollars)

    @property
    def spent_here(self) -> float:
        """Return the dollars of this throttle's own requests."""
        return self.spent - self.settings.spent

    async def _wait(self, seconds: float) -> None:
        """Wait these seconds, or until something ends or changes."""
        self._changed.clear()
        timer = asyncio.ensure_future(self.sleep(seconds))
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([timer, change], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            change.cancel()

    def _drop_expired(self, now: float) -> None:
        """Take back permits of workers that are gone."""
        for number, permit in list(self._permits.items()):
            if permit.expires_at < now:
                del self._permits[number]

    def _observe_limited(self, permit: Permit, outcome: AttemptOutcome, now: float) -> None:
        self.num_limited += 1
        pause = outcome.retry_after_s
        if permit.burst == self._burst:
            self._burst += 1
            # Once a pace is measured, requests in flight are too many only if it does not end the bursts.
            if not self._is_pace_measured or now - self._burst_at < REPEATED_S:
                self.limit = max(1.0, min(self.limit, self.num_in_flight + 1.0) * CUT)
            self._burst_at = now
            self._measure_pace(now)
            if pause is None:
                pause = self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if pause is not None:
            self._paused_until = max(self._paused_until, now + pause)

    def _measure_pace(self, now: float) -> None:
        """Let requests follow each other as fast as they were answered before this burst."""
        if self.settings.requests_per_minute is not None:
            return
        self._drop_old(now)
        seconds = min(MEASURE_S, now - self._started_at)
        if len(self._good_at) < WINDOW_ANSWERS or seconds <= 0:
            return
        self._requests.per_s = len(self._good_at) / seconds
        self._pace_changed_at = now
        self._is_pace_measured = True

    def _observe_good(self, outcome: AttemptOutcome, now: float) -> None:
        self._pause_s = PAUSE_S
        self._good_at.append(now)
        self._drop_old(now)
        if self._is_pace_measured and now - self._pace_changed_at > PACE_STEP_S:
            assert self._requests.per_s is not None, "it was measured"
            self._requests.per_s *= PACE_GROWTH
            self._pace_changed_at = now
        if self.settings.concurrency is not None:
            self.limit = min(self.limit + 1 / ANSWERS_PER_STEP, float(self.settings.concurrency))
        elif self._burst:
            self.limit = min(self.limit + 1 / ANSWERS_PER_STEP, float(MAX_IN_FLIGHT))
        else:
            self._climb(outcome, now)

    def _drop_old(self, now: float) -> None:
        while self._good_at and self._good_at[0] < now - MEASURE_S:
            self._good_at.popleft()

    def _climb(self, outcome: AttemptOutcome, now: float) -> None:
        """Allow more requests in flight for as long as that makes tokens come faster."""
        window = self._window
        window.tokens += outcome.tokens or 0.0
        window.answers += 1
        enough = max(WINDOW_ANSWERS, 2 * int(self.limit))
        if window.answers < enough or now - window.since < WINDOW_S:
            return
        rate = window.tokens / (now - window.since)
        is_full = self.num_in_flight + 1 >= int(self.limit)
        gains = rate > GAIN * self._best_rate
        self._windows_without_gain = 0 if gains else self._windows_without_gain + 1
        if gains:
            self._best_limit = self.limit
        else:  # more requests than the best number bring nothing: back to it
            self.limit = self._best_limit
        if is_full and (gains or self._windows_without_gain >= PATIENCE):
            self.limit = min(float(MAX_IN_FLIGHT), max(self.limit + 1, self.limit * CLIMB))
            self._windows_without_gain = 0
        self._best_rate = max(rate, self._best_rate) if gains else self._best_rate
        self._window = RateWindow(now)


def _per_second(per_minute: float | None) -> float | None:
    return None if per_minute is None else PACE_SHARE * per_minute / 60
