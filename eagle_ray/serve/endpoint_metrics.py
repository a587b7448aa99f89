"""Metrics of the endpoint: counted per replica, merged, and rendered in Prometheus' format.

Names are vLLM's with the prefix ``eagle_ray_``. The mean acceptance length tau follows from two of
them: 1 + accepted tokens / drafts.

    replica    ReplicaMetrics counts finished sequences and makes a Snapshot
    one actor  MetricsAggregator keeps the last Snapshot of every replica, so any replica can answer for all
    HTTP       prometheus_text(merged_snapshot(snapshots))

Counters never decrease, because the counters of replicas that have ended are kept. If the
aggregator is restarted, the first replica that reports sends it the last known totals.

    >>> merged_snapshot([Snapshot({"prompt_tokens_total": 3}), Snapshot({"prompt_tokens_total": 4})]).counters
    {'prompt_tokens_total': 7}
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import Occupancy
from eagle_ray.requests.sequence_answers import stats_of

ENDPOINT_PREFIX = "eagle_ray_"
GAUGES = {
    "num_requests_running": "sequences that hold a slot",
    "num_requests_waiting": "sequences that wait for a slot",
    "num_slots": "sequences that can be decoded together",
    "num_kv_blocks_used": "blocks of the KV cache that sequences hold",
    "num_kv_blocks": "blocks of the KV cache",
    "replicas": "replicas that answer",
}
COUNTERS = {
    "prompt_tokens": "prompt tokens of answered sequences",
    "generation_tokens": "output tokens of answered sequences",
    "request_success": "answered sequences by the reason of their end",
    "request_aborted": "sequences whose client left, or whose request failed",
    "http_errors": "refused requests by code",
    "spec_decode_num_drafts": "decode steps of answered sequences that verified a draft",
    "spec_decode_num_draft_tokens": "draft tokens verified for answered sequences",
    "spec_decode_num_accepted_tokens": "draft tokens accepted by the target for answered sequences",
    "spec_decode_num_accepted_tokens_per_pos": "of these, by their place in the draft",
    "engine_steps": "decode steps of the engine",
    "engine_plain_steps": "steps of the engine that drafted nothing",
    "engine_planner_failures": "engines that draft nothing any more because their planner failed",
    "engine_verify_rows": "rows of the engine's decode passes, padding included",
    "engine_prefill_tokens": "prompt tokens computed by the engine",
    "engine_reused_tokens": "prompt tokens found in other sequences' blocks",
    "engine_preemptions": "sequences put back for want of KV space",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "from a sequence's arrival to its first token",
    "e2e_request_latency_seconds": "from a sequence's arrival to its end",
    "inter_token_latency_seconds": "mean time between two tokens of a sequence",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of all metrics at one time, by name and labels.

    A key is a sample in Prometheus' notation, such as
    ``request_success_total{finished_reason="stop"}``.
    """

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


def merged_snapshot(parts: Iterable[Snapshot]) -> Snapshot:
    """Return the sum of each counter and gauge over several snapshots."""
    counters: defaultdict[str, float] = defaultdict(int)
    gauges: defaultdict[str, float] = defaultdict(int)
    for part in parts:
        for name, value in part.counters.items():
            counters[name] += value
        for name, value in part.gauges.items():
            gauges[name] += value
    return Snapshot(dict(counters), dict(gauges))


def prometheus_text(snapshot: Snapshot) -> str:
    """Return the metrics in Prometheus' exposition format 0.0.4.

    Counters have all their digits, since rates depend on the last ones. A metric without samples is
    0, unless its samples are told apart by labels.
    """
    kinds = [(COUNTERS, "counter", "_total"), (GAUGES, "gauge", ""), (HISTOGRAMS, "histogram", "")]
    samples = snapshot.counters | snapshot.gauges
    lines: list[str] = []
    for names, kind, ending in kinds:
        for name, description in names.items():
            full = ENDPOINT_PREFIX + name + ending
            lines += [f"# HELP {full} {description}", f"# TYPE {full} {kind}"]
            lines += [
                f"{ENDPOINT_PREFIX}{key} {value}"
                for key, value in samples.items()
                if _family(key) == name + ending
            ]
    return "\n".join(lines) + "\n"


def _family(sample: str) -> str:
    """Return the name of the metric that a sample belongs to."""
    name = sample.partition("{")[0]
    for histogram in HISTOGRAMS:
        if name.startswith(histogram):
            return histogram
    return name


MIN_SCRAPE_INTERVAL_S = 0.2


class SharedScrape:
    """Renders the metrics by one scrape at a time. Requests that arrive during a scrape share the next one.

    Any client may request the metrics, so their cost must not grow with the number of requests. No
    request gets a text that was made before it arrived.

    Args:
        scrape: coroutine function that returns the snapshot of all replicas.
    """

    def __init__(self, scrape: Callable[[], Awaitable[Snapshot]]):
        self._scrape = scrape
        self._running: asyncio.Future[str] | None = None
        self._next: asyncio.Future[str] | None = None  # has not begun
        self._began_at = 0.0

    async def text(self) -> str:
        """Return the metrics in Prometheus' format. Raises what the scrape raises."""
        if self._next is None or self._next.done():
            self._next = asyncio.ensure_future(self._text_after(self._running))
        return await asyncio.shield(self._next)

    async def _text_after(self, running: asyncio.Future[str] | None) -> str:
        if running is not None and not running.done():
            await asyncio.wait([running])
        await asyncio.sleep(self._began_at + MIN_SCRAPE_INTERVAL_S - time.monotonic())
        self._running = self._next
        self._next = None
        self._began_at = time.monotonic()
        return prometheus_text(await self._scrape())


STALE_S = 10.0  # a replica that has said nothing for so long does not answer: what it holds does not count
RETIRED_S = 600.0  # and will not come back: its counters are kept among all others' that have ended
RETIRED = ""


class MetricsAggregator:
    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Snapshot]] = {}

    async def put(
        self, replica: str, snapshot: Snapshot, known: dict[str, Snapshot]
    ) -> dict[str, Snapshot]:
        """Store a replica's snapshot, and return the snapshots of all replicas.

        Args:
            replica: name of the replica.
            snapshot: its metrics.
            known: what the replica received from its last call.
        """
        now = time.monotonic()
        if not self._last:
            self._last = {name: (now, part) for name, part in known.items()}

        # Counters never fall, though snapshots may arrive out of order.
        counters = dict(self._last[replica][1].counters) if replica in self._last else {}
        for name, value in snapshot.counters.items():
            counters[name] = max(counters.get(name, 0), value)
        self._last[replica] = (now, Snapshot(counters, snapshot.gauges))
        self._retire(now)

        # A replica that is silent has counters, and no gauges.
        snapshots = {}
        for name, (seen_at, part) in self._last.items():
            is_stale = now - seen_at >= STALE_S
            snapshots[name] = Snapshot(part.counters, {}) if is_stale else part
        return snapshots

    def _retire(self, now: float) -> None:
        ended = [
            name
            for name, (seen_at, _) in self._last.items()
            if name != RETIRED and now - seen_at > RETIRED_S
        ]
        for name in ended:
            _, retired = self._last.get(RETIRED, (now, Snapshot()))
            parts = [Snapshot(retired.counters), Snapshot(self._last.pop(name)[1].counters)]
            self._last[RETIRED] = now, merged_snapshot(parts)


REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class ReplicaMetrics:
    """Counters of one replica. Use it on one event loop."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(int)

    def answered(self, sequence: Sequence, arrived_at: float) -> None:
        """Count a finished sequence.

        Args:
            sequence: finished sequence.
            arrived_at: time.monotonic() at which the request was admitted, in seconds.
        """
        stats = stats_of(sequence)
        self._add("prompt_tokens", len(sequence.prompt_ids))
        self._add("generation_tokens", len(sequence.output_ids))
        self._add("request_success", 1, f'finished_reason="{sequence.finish_reason}"')
        self._add("spec_decode_num_drafts", stats.num_steps - stats.num_plain_steps)
        self._add("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self._add("spec_decode_num_accepted_tokens", stats.num_accepted_draft_tokens)
        for place, count in enumerate(stats.accepted_by_depth):
            self._add("spec_decode_num_accepted_tokens_per_pos", count, f'position="{place}"')
        first, end = sequence.first_token_at, sequence.finished_at
        assert first is not None and end is not None, "a finished sequence has both"
        self._observe("time_to_first_token_seconds", first - arrived_at)
        self._observe("e2e_request_latency_seconds", end - arrived_at)
        num_later = len(sequence.output_ids) - 1
        if num_later > 0:
            self._observe("inter_token_latency_seconds", (end - first) / num_later)

    def aborted(self, number: int) -> None:
        self._add("request_aborted", number)

    def refused(self, code: str | None) -> None:
        self._add("http_errors", 1, f'code="{code}"')

    def snapshot(self, engine: EngineCounters, occupancy: Occupancy, in_flight: int) -> Snapshot:
        """Return the values of all counters and gauges.

        Args:
            engine: counters of the engine.
            occupancy: slots and KV blocks in use.
            in_flight: number of sequences of requests that are not answered yet.
        """
        counters = dict(self._counts)
        for name in COUNTERS:
            if name.startswith("engine_"):
                counters[f"{name}_total"] = getattr(engine, f"num_{name.removeprefix('engine_')}")
        gauges: dict[str, float] = {
            "num_requests_running": occupancy.num_running,
            "num_requests_waiting": max(0, in_flight - occupancy.num_running),
            "num_slots": engine.num_slots,
            "num_kv_blocks_used": occupancy.num_blocks_used,
            "num_kv_blocks": occupancy.num_blocks,
            "replicas": 1,
        }
        return Snapshot(counters, gauges)

    def _add(self, name: str, number: float, labels: str = "") -> None:
        self._counts[f"{name}_total{{{labels}}}" if labels else f"{name}_total"] += number

    def _observe(self, name: str, seconds: float) -> None:
        for bound in REQUEST_BUCKETS_S:
            self._counts[f'{name}_bucket{{le="{bound}"}}'] += seconds <= bound
        self._counts[f'{name}_bucket{{le="+Inf"}}'] += 1
        self._counts[f"{name}_sum"] += seconds
        self._counts[f"{name}_count"] += 1
