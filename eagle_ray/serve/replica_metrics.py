"""ReplicaMetrics: what one replica has done, counted as its sequences end.

>>> meter.answered(sequence, arrived_at)
>>> meter.snapshot(engine.counters(), engine.occupancy(), in_flight=0).counters["generation_tokens_total"]
"""

from __future__ import annotations

from collections import Counter

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import Occupancy
from eagle_ray.engine.counters import EngineCounters
from eagle_ray.serve.metrics_snapshot import COUNTERS, Snapshot

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class ReplicaMetrics:
    """Of one replica. Used on its event loop alone."""

    def __init__(self):
        self._counts: Counter[str] = Counter()

    def answered(self, sequence: Sequence, arrived_at: float) -> None:
        """Count a finished sequence. arrived_at: when its request was admitted, by time.monotonic."""
        stats = sequence.stats
        self._add("prompt_tokens", len(sequence.prompt_ids))
        self._add("generation_tokens", len(sequence.output_ids))
        self._add("request_success", 1, f'finished_reason="{sequence.finish_reason}"')
        self._add("spec_decode_num_drafts", stats.num_steps - stats.num_plain_steps)
        self._add("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self._add("spec_decode_num_accepted_tokens", stats.num_accepted_draft_tokens)
        for place, count in enumerate(stats.accepted_by_depth):
            self._add("spec_decode_num_accepted_tokens_per_pos", count, f'position="{place}"')
        first, end = sequence.first_token_at, sequence.finished_at
        self._observe("time_to_first_token_seconds", first - arrived_at)
        self._observe("e2e_request_latency_seconds", end - arrived_at)
        if len(sequence.output_ids) > 1:
            self._observe("inter_token_latency_seconds", (end - first) / (len(sequence.output_ids) - 1))

    def aborted(self, number: int) -> None:
        self._add("request_aborted", number)

    def refused(self, code: str | None) -> None:
        self._add("http_errors", 1, f'code="{code}"')

    def snapshot(self, engine: EngineCounters, held: Occupancy, in_flight: int) -> Snapshot:
        """in_flight: sequences of requests that are not answered yet."""
        counters = dict(self._counts)
        for name in COUNTERS:
            if name.startswith("engine_"):
                counters[f"{name}_total"] = getattr(engine, f"num_{name.removeprefix('engine_')}")
        gauges = {
            "num_requests_running": held.num_running,
            "num_requests_waiting": max(0, in_flight - held.num_running),
            "num_slots": engine.num_slots,
            "num_kv_blocks_used": held.num_blocks_used,
            "num_kv_blocks": held.num_blocks,
            "replicas": 1,
        }
        return Snapshot(counters, gauges)

    def _add(self, name: str, number: float, labels: str = "") -> None:
        self._counts[f"{name}_total{{{labels}}}" if labels else f"{name}_total"] += number

    def _observe(self, name: str, seconds: float) -> None:
        for bound in (*BUCKETS_S, "+Inf"):
            self._counts[f'{name}_bucket{{le="{bound}"}}'] += bound == "+Inf" or seconds <= bound
        self._counts[f"{name}_sum"] += seconds
        self._counts[f"{name}_count"] += 1
