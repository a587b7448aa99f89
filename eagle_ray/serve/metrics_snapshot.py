"""Snapshots of what replicas have done and are doing: they add up, and are shown in Prometheus' format.

Names are vLLM's, prefixed ``eagle_ray_``. tau is a ratio of them: 1 + accepted tokens / drafts.

    >>> print(prometheus_text(merge([Snapshot({"prompt_tokens_total": 3}), Snapshot({"prompt_tokens_total": 4})])))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

PREFIX = "eagle_ray_"
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
    """Samples by name and labels, such as ``request_success_total{finished_reason="stop"}``."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


def merge(parts: Iterable[Snapshot]) -> Snapshot:
    counters: Counter[str] = Counter()
    gauges: Counter[str] = Counter()
    for part in parts:
        counters.update(part.counters)
        gauges.update(part.gauges)
    return Snapshot(dict(counters), dict(gauges))


def prometheus_text(snapshot: Snapshot) -> str:
    """The exposition format, version 0.0.4, every digit of a counter: rates are read off the last ones.

    What was never counted is 0, but for what labels tell apart.
    """
    kinds = [(COUNTERS, "counter", "_total"), (GAUGES, "gauge", ""), (HISTOGRAMS, "histogram", "")]
    samples = snapshot.counters | snapshot.gauges
    lines: list[str] = []
    for names, kind, ending in kinds:
        for name, description in names.items():
            full = PREFIX + name + ending
            lines += [f"# HELP {full} {description}", f"# TYPE {full} {kind}"]
            lines += [f"{PREFIX}{key} {value}" for key, value in samples.items() if _family(key) == name + ending]
    return "\n".join(lines) + "\n"


def _family(sample: str) -> str:
    """The metric that a sample belongs to."""
    name = sample.partition("{")[0]
    for histogram in HISTOGRAMS:
        if name.startswith(histogram):
            return histogram
    return name
