"""HttpClient: answer rows through an HTTP endpoint of OpenAI's protocol, with the interface of an engine.

Each sample is a separate request, with retries as in `port/attempts.py`. Answers that the run has
paid for are read from `spend`, and not requested again after a restart.

    client = HttpClient(config, target, throttle, rows, spend)
    rows = await client.answer(request, range(2), Call())
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

import httpx2

from eagle_ray.config import JobConfig
from eagle_ray.core.counters import EngineCounters
from eagle_ray.port.attempts import UNLIMITED, Failures, ask_until_answered
from eagle_ray.port.dialects import is_scored_by_prompt
from eagle_ray.port.endpoint_answers import (
    ENDPOINT_FAILED,
    FAILED,
    GONE,
    INVALID,
    INVALID_FORM,
    LIMITED,
    STOPS,
    Answered,
    Failed,
    dollars_of,
    limit_headers,
    retry_after,
)
from eagle_ray.port.engine_client import AdmissionStopped, Call, as_row_error
from eagle_ray.port.http_request import HttpRequest, sample_request
from eagle_ray.port.http_rows import HttpRows, determinism_of
from eagle_ray.port.http_target import Target
from eagle_ray.port.spend import ANSWERED, Attempt, SpendLog, StoredAnswers
from eagle_ray.port.throttle import (
    AttemptOutcome,
    Demand,
    Permit,
    Stop,
    ThrottleClient,
)
from eagle_ray.requests.answers import TokenUsage
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow

BYTES_PER_TOKEN = (
    3.0  # of a prompt whose tokens are not counted yet: rather too many tokens than too few
)
BACKOFF_S, MAX_BACKOFF_S = 0.5, 20.0  # after a failed attempt; doubles, and half of it is random
SCORED_AT_ONCE = 64  # requests of one scored row that wait for the throttle or are in flight
UNREACHABLE = "unreachable"  # kind of an attempt that got no connection


@dataclass(slots=True, eq=False)
class HttpSample:
    """One sample at the endpoint.

    Attributes:
        admitted_at: time of its first request, in monotonic seconds; None before.
        attempts: number of requests that were sent.
        throttled_s: seconds for which limits delayed it.
    """

    began_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    attempts: int = 0
    throttled_s: float = 0.0


class HttpClient:
    """A client of one endpoint, or of several servers with the same model."""

    def __init__(
        self,
        config: JobConfig,
        target: Target,
        throttle: ThrottleClient,
        rows: HttpRows,
        spend: SpendLog,
        check_server: Callable[[], None] | None = None,
    ):
        """Make a client, which opens connections as it needs them.

        Args:
            check_server: raises EngineError if the endpoint is a child of this process that has ended.
        """
        self._config = config
        self._engine = config.engine
        self._target = target
        self._throttle = throttle
        self._rows = rows
        self._spend = spend
        self._paid = StoredAnswers(spend.run)
        self._check_server = check_server
        self._is_private = not config.output.store_prompt
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            headers=target.key.headers, limits=limits, timeout=self._engine.timeout_s
        )
        self._in_flight = dict.fromkeys(target.urls, 0)
        self._unreachable_since: dict[str, float] = {}
        self._counters = EngineCounters(num_slots=1)
        self._num_paid = 0
        self._dollars_paid = 0.0

    async def answer(self, request: Request, samples: Iterable[int], call: Call) -> list[OutputRow]:
        """Return a row for each of these samples, as EngineClient.answer does.

        Raises AdmissionStopped if the job sends no further request, once requests in flight have
        ended.
        """
        request.check()
        call.check_not_skipped()
        tasks = [asyncio.ensure_future(self._row(request, index, call)) for index in samples]
        call.tasks += tasks
        results = await asyncio.gather(*tasks, return_exceptions=True)
        _raise_first(results)
        return [result for result in results if isinstance(result, dict)]

    def counters(self) -> EngineCounters:
        """Return the requests and tokens that the endpoint has answered for this worker."""
        return self._counters

    def close(self) -> None:
        """Flush the spend log. Connections end with the process."""
        self._spend.close()

    async def _row(self, request: Request, index: int, call: Call) -> OutputRow:
        with as_row_error(request, self._is_private):
            sampling = request.sampling_params(self._config)
            is_scored = is_scored_by_prompt(sampling, self._target.dialect)
        if is_scored:
            return await self._scored_row(request, call)
        return await self._sample(request, index, call)

    async def _sample(self, request: Request, index: int, call: Call) -> OutputRow:
        sample = HttpSample()
        call.parts.append(sample)
        with as_row_error(request, self._is_private):
            sent = sample_request(request, self._config, self._target.dialect, index)
        try:
            columns = await self._columns(sent, sample)
        except Failed as failed:
            facts = failed.columns | self._facts(sample, failed.columns)
            return self._rows.of_failure(request, index, failed, facts)
        with as_row_error(request, self._is_private):
            return self._rows.of(request, index, _with_times(columns))

    async def _scored_row(self, request: Request, call: Call) -> OutputRow:
        """Return the row of a request that generates nothing. Raises AdmissionStopped as _ask does."""
        from eagle_ray.port.scored_row import ScoredPart, ScoredRow, tokenizer_of  # transformers

        tokenizer = tokenizer_of(self._config, self._target)
        with as_row_error(request, self._is_private):
            row = ScoredRow.of(request, self._config, self._target, tokenizer)
        failures: list[OutputRow] = []
        waiting = iter(row.parts)

        async def ask(part: ScoredPart) -> None:
            sample = HttpSample()
            call.parts.append(sample)
            try:
                row.record(part, await self._columns(row.request_of(part), sample))
            except Failed as failed:
                facts = failed.columns | self._facts(sample, failed.columns)
                failures.append(self._rows.of_failure(request, 0, failed, facts))

        async def ask_in_turn() -> None:
            for part in waiting:
                if failures:
                    return
                await ask(part)

        results = await asyncio.gather(
            *(ask_in_turn() for _ in range(SCORED_AT_ONCE)), return_exceptions=True
        )
        _raise_first(results)
        if failures:
            return failures[0]
        with as_row_error(request, self._is_private):
            columns = self._facts(HttpSample(), {}) | row.columns()
            return self._rows.of_scores(request, _with_times(columns))

    async def _columns(self, sent: HttpRequest, sample: HttpSample) -> dict[str, Any]:
        """Return the output columns of an answer, from the spend log if it is paid for already. Raises as _ask does."""
        columns = self._paid.columns(sent.key)
        return await self._ask(sent, sample) if columns is None else columns

    async def _ask(self, sent: HttpRequest, sample: HttpSample) -> dict[str, Any]:
        """Send a request, again if it fails and may, and return the output columns of its answer.

        Raises Failed if the last attempt fails, and AdmissionStopped if the job sends no further request.

        Args:
            sample: counts of attempts and waits, which are updated.
        """
        attempts = self._engine.attempts
        failures = Failures(
            {
                LIMITED: attempts.limited,
                FAILED: attempts.failed,
                INVALID: attempts.invalid,
                UNREACHABLE: UNLIMITED,
            }
        )

        async def send(permit: Permit) -> dict[str, Any] | Failed:
            sample.throttled_s += permit.waited_s
            sample.admitted_at = sample.admitted_at or time.monotonic()
            # A request that was sent is paid for, whatever becomes of the row: its answer is written down.
            return await asyncio.shield(asyncio.ensure_future(self._attempt(sent, sample, permit)))

        return await ask_until_answered(
            self._throttle, self._demand(sent), send, partial(self._wait_for_next, failures)
        )

    async def _attempt(
        self, sent: HttpRequest, sample: HttpSample, permit: Permit
    ) -> dict[str, Any] | Failed:
        """Send one request, log what it cost, and release its permit. Return the answer's columns, or the failure."""
        outcome = AttemptOutcome(is_good=False)
        try:
            answered, outcome = await self._send(sent, sample, permit)
            columns = answered.columns | self._facts(sample, answered.columns)
            self._write(sent, ANSWERED, answered.usage, outcome.dollars, columns)
            self._num_paid += 1
            self._dollars_paid += outcome.dollars
            return columns
        except Failed as failed:
            outcome = self._outcome_of(failed, permit)
            if failed.may_be_paid:
                self._write(sent, failed.kind, None, 0.0, None, outcome.dollars)
            elif failed.kind != UNREACHABLE:
                self._write(sent, failed.kind, failed.usage, outcome.dollars, None)
            if failed.kind in STOPS:
                await self._throttle.stop(Stop(failed.kind, str(failed)))
            return failed
        finally:
            await self._throttle.release(permit, outcome)

    async def _send(
        self, sent: HttpRequest, sample: HttpSample, permit: Permit
    ) -> tuple[Answered, AttemptOutcome]:
        url = self._free_url()
        headers = {"content-type": "application/json"}
        self._in_flight[url] += 1
        began = time.monotonic()
        try:
            response = await asyncio.wait_for(
                self._http.post(sent.url(url), content=sent.content, headers=headers),
                self._engine.timeout_s,
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise self._unreachable(url, error) from None
        except (httpx2.HTTPError, asyncio.TimeoutError) as error:
            sample.attempts += 1
            words = self._target.key.hidden_in(f"{type(error).__name__}: {error}")
            raise Failed(FAILED, words.rstrip(": "), may_be_paid=True) from None
        finally:
            self._in_flight[url] -= 1
        sample.attempts += 1
        self._unreachable_since.clear()
        now = time.time()
        try:
            answered = sent.read(response.status_code, response.content, response.headers, now)
        except Failed as failed:
            raise self._hidden(failed, response.headers, now) from None
        self._count(answered, time.monotonic() - began)
        limits = limit_headers(response.headers, now)
        remaining, reset_s = limits if limits is not None else (None, None)
        outcome = AttemptOutcome(
            tokens=None
            if answered.usage is None
            else answered.usage.prompt + answered.usage.output,
            dollars=self._dollars(answered.usage, permit),
            remaining=remaining,
            reset_s=reset_s,
        )
        return answered, outcome

    async def _wait_for_next(self, failures: Failures, failed: Failed) -> None:
        """Wait until a failed request may be tried again. Raises the failure with which the row ends if it may not."""
        if self._check_server is not None and failed.kind in (UNREACHABLE, FAILED):
            self._check_server()
        if failed.kind in STOPS:
            raise AdmissionStopped
        is_last = failures.is_last(failed)
        number = failures.num_by_kind[failed.kind]
        if failed.kind not in failures.budgets:
            raise failed
        if failed.kind == UNREACHABLE:
            await asyncio.sleep(_backoff_s(min(number, 5)))
            return
        if is_last:
            kind = INVALID_FORM if failed.kind == INVALID else ENDPOINT_FAILED
            words = f"{number} attempts: {failed}" if number > 1 else str(failed)
            raise Failed(kind, words, None, failed.usage, failed.columns)
        if failed.kind == FAILED:
            await asyncio.sleep(max(_backoff_s(number), failed.retry_after_s or 0.0))

    def _unreachable(self, url: str, error: Exception) -> Failed:
        """Return the failure of a request without a connection: GONE if no URL has had one for gone_after_s."""
        now = time.monotonic()
        since = self._unreachable_since.setdefault(url, now)
        words = self._target.key.hidden_in(f"{url}: {type(error).__name__}: {error}")
        are_all = len(self._unreachable_since) == len(self._target.urls)
        if are_all and now - since >= self._engine.gone_after_s:
            return Failed(GONE, f"no connection for {now - since:.0f} s: {words}")
        return Failed(UNREACHABLE, words)

    def _free_url(self) -> str:
        """Return the URL with the fewest requests in flight, of those that could be reached."""
        urls = list(self._target.urls)
        reachable = [url for url in urls if url not in self._unreachable_since]
        return min(reachable or urls, key=lambda url: self._in_flight[url])

    def _hidden(self, failed: Failed, headers: httpx2.Headers, now: float) -> Failed:
        """Return the failure without the API key in its text, and with the seconds that a 429 says to wait."""
        wait = failed.retry_after_s
        if failed.kind == LIMITED and wait is None:
            wait = retry_after(headers, now)
        words = self._target.key.hidden_in(str(failed))
        return Failed(failed.kind, words, wait, failed.usage, failed.columns)

    def _demand(self, sent: HttpRequest) -> Demand:
        """Estimate the tokens of a request for the throttle: the prompt by its bytes, and its max_tokens of output."""
        prompt = len(sent.content) / BYTES_PER_TOKEN
        output = sent.body.get("max_tokens") or sent.body.get("max_completion_tokens") or 0
        price = self._target.price
        dollars = 0.0
        if price is not None:
            dollars = (prompt * price.input + output * price.output) / 1e6
        return Demand(prompt + output, dollars)

    def _dollars(self, usage: TokenUsage | None, permit: Permit) -> float:
        """Return the price of an attempt; without a usage, the most that it can be."""
        price = self._target.price
        if price is None:
            return 0.0
        return permit.demand.dollars if usage is None else dollars_of(usage, price)

    def _expected_dollars(self, permit: Permit) -> float:
        """Return what a request costs by those before it: at most what it may, and that at first."""
        if not self._num_paid:
            return permit.demand.dollars
        return min(self._dollars_paid / self._num_paid, permit.demand.dollars)

    def _outcome_of(self, failed: Failed, permit: Permit) -> AttemptOutcome:
        usage = failed.usage
        dollars = 0.0
        if failed.may_be_paid:
            dollars = self._expected_dollars(permit)
        elif usage is not None:
            dollars = self._dollars(usage, permit)
        return AttemptOutcome(
            tokens=None if usage is None else usage.prompt + usage.output,
            dollars=dollars,
            is_limited=failed.kind == LIMITED,
            is_good=False,
            retry_after_s=failed.retry_after_s,
        )

    def _write(
        self,
        sent: HttpRequest,
        kind: str,
        usage: TokenUsage | None,
        dollars: float,
        columns: dict[str, Any] | None,
        perhaps_dollars: float = 0.0,
    ) -> None:
        price = None if self._target.price is None else dollars
        attempt = Attempt(sent.key, sent.row_id, kind, usage, price, columns, perhaps_dollars)
        self._spend.append(attempt)

    def _count(self, answered: Answered, seconds: float) -> None:
        counters = self._counters
        counters.busy_s += seconds
        if answered.usage is not None:
            counters.num_output_tokens += answered.usage.output
            counters.num_prefill_tokens += answered.usage.prompt - answered.usage.cached
            counters.num_reused_tokens += answered.usage.cached

    def _facts(self, sample: HttpSample, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the output columns about a sample that the worker itself knows, such as attempts and times."""
        now = time.monotonic()
        admitted = sample.admitted_at or now
        finished = time.time()
        prompt = columns.get("prompt_tokens")
        output = columns.get("completion_tokens")
        cost = None
        if self._target.price is not None and prompt is not None and output is not None:
            cached = columns.get("cached_prompt_tokens") or 0
            cost = dollars_of(TokenUsage(prompt, output, cached), self._target.price)
        return {
            "engine": self._engine.kind,
            "engine_version": self._target.version,
            "determinism": determinism_of(self._target.dialect, columns),
            "http_attempts": sample.attempts,
            "throttled_s": sample.throttled_s,
            "cost_dollars": cost,
            "queue_s": admitted - sample.began_at,
            "e2e_s": now - sample.began_at,
            "started_at": finished - (now - admitted),
            "finished_at": finished,
        }


def _raise_first(results: Iterable[Any]) -> None:
    """Raise the first of what gather returned that is an error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _with_times(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with times as the output has them. The spend log has them as Unix times."""
    times = {
        name: datetime.fromtimestamp(columns[name], timezone.utc)
        for name in ("started_at", "finished_at")
    }
    return columns | times


def _backoff_s(number: int) -> float:
    seconds = min(BACKOFF_S * 2 ** (number - 1), MAX_BACKOFF_S)
    return seconds * random.uniform(0.5, 1.0)
