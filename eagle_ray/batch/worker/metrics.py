"""JobMetrics: counters of one worker's work, which Ray's agent on its node exports to Prometheus.

A row that is made twice counts twice; the summary counts the rows in files. tau is a ratio: 1 + accepted tokens /
decode steps.

    metrics = JobMetrics("weekend", run.run_id, worker.worker_id)
    metrics.count(WorkerReport.of(worker.worker_id, worker.counters()), answers)
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from ray.util.metrics import Counter, Gauge, Histogram

from eagle_ray.batch.worker.progress import WORK_COUNTERS, WorkerReport

PREFIX = "eagle_ray_"
LABELS = ("run_name", "run_id", "worker")
ROWS, ERRORS, DRAFTS, LATENCY = "rows", "row_errors", "spec_decode_num_drafts", "row_latency_seconds"
BUSY, OFFERED, METHOD = "busy_slot_steps", "slot_steps", "speculative_method"
BUCKETS_S = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000]

# Counters over the worker's output rows: the column each adds up. Those about drafts are named as vLLM names its own.
COLUMNS = {
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "decode_steps": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}
ENGINE = {
    f"engine_{name.removeprefix('num_')}": name for name in WORK_COUNTERS
}  # the engine's own counters, idle rows included

DESCRIPTIONS = {
    ROWS: "output rows made, error rows included",
    ERRORS: "error rows by error_code",
    "prompt_tokens": "prompt tokens of answered rows",
    "output_tokens": "output tokens of answered rows",
    "decode_steps": "target passes of answered rows after their prefill, drafted or not",
    DRAFTS: "those of the decode steps that verified a draft",
    "spec_decode_num_draft_tokens": "draft tokens verified for answered rows",
    "spec_decode_num_accepted_tokens": "draft tokens accepted by the target for answered rows",
    BUSY: "slots that held a sequence, added up over the engine's steps",
    OFFERED: "slots that there were, added up over the engine's steps",
    "engine_steps": "decode steps of the engine, each over all its running sequences",
    "engine_plain_steps": "steps of the engine that drafted nothing",
    "engine_probes": "steps of the engine taken in order to learn what drafts are worth",
    "engine_planner_failures": "engines that draft nothing any more because their planner failed",
    "engine_verify_rows": "rows of the engine's decode passes, padding included",
    "engine_prefill_tokens": "prompt tokens computed by the engine",
    "engine_reused_tokens": "prompt tokens found in other sequences' blocks",
    "engine_preemptions": "sequences put back for want of KV space",
}


class JobMetrics:
    """The counters of one worker. Labels: the run's name and id, and the worker as output rows name it."""

    def __init__(self, run_name: str, run_id: str, worker_id: str):
        tags = dict(zip(LABELS, (run_name, run_id, worker_id), strict=True))
        self._counters = {name: _counter(name, tags) for name in DESCRIPTIONS}
        self._latency = Histogram(PREFIX + LATENCY, "seconds from a row's arrival to its end", BUCKETS_S, LABELS)
        self._latency.set_default_tags(tags)
        self._engine: dict[str, int] = {}
        self._method = Gauge(
            PREFIX + METHOD, "1 for the method that speculative.method auto chose", (*LABELS, "method")
        )
        self._method.set_default_tags(tags)

    def count(self, report: WorkerReport, answers: pa.Table | None) -> None:
        """Add one batch. report: totals of the engine. answers: the batch's output rows; None for a worker that just
        started.
        """
        self._add(self._since_last(report))
        if report.method is not None:
            self._method.set(1, tags={"method": report.method})
        if answers is None:
            return
        self._add(_of_rows(answers))
        for error in pc.value_counts(answers["error_code"].drop_null()).to_pylist():
            self._counters[ERRORS].inc(error["counts"], tags={"code": error["values"]})
        for seconds in answers["e2e_s"].drop_null().to_pylist():
            self._latency.observe(seconds)

    def _since_last(self, report: WorkerReport) -> dict[str, int]:
        """Return the increase of the engine's counters since the last report."""
        now = {name: report.work[counter] for name, counter in ENGINE.items()}
        now |= {BUSY: report.slot_steps, OFFERED: report.offered_steps}
        before, self._engine = self._engine, now
        return {name: value - before.get(name, 0) for name, value in now.items()}

    def _add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if count:  # Ray refuses an increment of 0
                self._counters[name].inc(count)


def _of_rows(answers: pa.Table) -> dict[str, int]:
    counts = {name: _sum(answers, column) for name, column in COLUMNS.items()}
    return counts | {ROWS: len(answers), DRAFTS: counts["decode_steps"] - _sum(answers, "num_plain_steps")}


def _sum(answers: pa.Table, column: str) -> int:
    return pc.sum(answers[column], min_count=0).as_py()


def _counter(name: str, tags: Mapping[str, str]) -> Counter:
    labels = (*LABELS, "code") if name == ERRORS else LABELS
    return Counter(PREFIX + name, DESCRIPTIONS[name], labels).set_default_tags(dict(tags))
