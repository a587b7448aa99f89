"""Progress: sum the counters of all workers.

Each worker sends its totals to one small Ray actor every second at most, and every few seconds
while no row ends; the driver reads the sum. A lost report does no harm, since the next one has
newer totals. The actor also keeps each worker's log of crashes, for its next process.

    progress = start_progress(num_workers=2)
    ray.get(progress.snapshot.remote()).rows      # 40

JobMetrics are the counters of one worker's work that Ray's agent on its node exports to Prometheus.
A row that is made twice counts twice there; the summary counts the rows in files. tau is a ratio: 1
+ accepted tokens / decode steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from ray.util.metrics import Counter, Histogram
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle_ray.batch.worker.crash_isolation import CrashLog
from eagle_ray.core.counters import EngineCounters
from eagle_ray.requests.columns import CATEGORY
from eagle_ray.scaling.lengths import LengthCounts, bins_of

# The engine's counters that add up over workers: its steps and what they were spent on.
WORK_COUNTERS = (
    "num_steps",
    "num_plain_steps",
    "num_probes",
    "num_planner_failures",
    "num_verify_rows",
    "num_output_tokens",
    "num_prefill_tokens",
    "num_reused_tokens",
    "num_preemptions",
)
METRIC_PREFIX = "eagle_ray_"
METRIC_LABELS = ("run_name", "run_id", "worker")
ROWS = "rows"
ERROR_ROWS = "row_errors"
DRAFTS = "spec_decode_num_drafts"
LATENCY = "row_latency_seconds"
BUSY_STEPS = "busy_slot_steps"
OFFERED = "slot_steps"
ROW_BUCKETS_S = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000]

# Counters over the worker's output rows: the column each adds up. Those about drafts are named as
# vLLM names its own.
COLUMN_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "decode_steps": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}
# The engine's own counters, idle rows included.
ENGINE_COUNTERS = {f"engine_{name.removeprefix('num_')}": name for name in WORK_COUNTERS}

DESCRIPTIONS = {
    ROWS: "output rows made, error rows included",
    ERROR_ROWS: "error rows by error_code",
    "prompt_tokens": "prompt tokens of answered rows",
    "output_tokens": "output tokens of answered rows",
    "decode_steps": "target passes of answered rows after their prefill, drafted or not",
    DRAFTS: "those of the decode steps that verified a draft",
    "spec_decode_num_draft_tokens": "draft tokens verified for answered rows",
    "spec_decode_num_accepted_tokens": "draft tokens accepted by the target for answered rows",
    BUSY_STEPS: "slots that held a sequence, added up over the engine's steps",
    OFFERED: "slots that there were, added up over the engine's steps",
    "engine_steps": "decode steps of the engine, each over all its running sequences",
    "engine_plain_steps": "steps of the engine that drafted nothing",
    "engine_probes": "steps of the engine taken in order to learn what drafts are worth",
    "engine_planner_failures": "engines that draft nothing any more because their planner failed",
    "engine_verify_rows": "rows of the engine's decode passes, padding included",
    "engine_output_tokens": "tokens that the engine made, those of rows in flight included",
    "engine_prefill_tokens": "prompt tokens computed by the engine",
    "engine_reused_tokens": "prompt tokens found in other sequences' blocks",
    "engine_preemptions": "sequences put back for want of KV space",
}


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Totals of one worker.

    Attributes:
        slot_steps: slots that held a sequence, summed over steps; offered_steps counts all slots.
        engine_s: seconds inside the engine's steps.
        work: values of the engine's WORK_COUNTERS.
        planner_error: reason why the planner failed, if it has; the worker drafts nothing from then
            on.
        draft_warning: probable fault of the head, if its first drafts were hardly ever accepted.
        fallbacks: reasons why kernels, CUDA graphs or sums by symmetric memory do not run on the
            worker's CUDA device, by "kernels", "graphs" and "sums".
        lengths: output lengths of rows that are done and of rows in slots, by category.
    """

    worker_id: str
    slot_steps: int
    offered_steps: int
    engine_s: float = 0.0
    work: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    errors: int = 0
    output_tokens: int = 0
    steps: int = 0
    accepted: int = 0
    planner_error: str | None = None
    draft_warning: str | None = None
    fallbacks: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, LengthCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, worker_id: str, counters: EngineCounters) -> WorkerReport:
        """Return the report of a worker that has finished no row yet."""
        offered = counters.num_steps * counters.num_slots
        work = {name: getattr(counters, name) for name in WORK_COUNTERS}
        return cls(
            worker_id,
            counters.num_slot_steps,
            offered,
            counters.busy_s,
            work,
            planner_error=counters.planner_error,
            draft_warning=counters.draft_warning,
            fallbacks=counters.fallbacks,
            lengths=running_lengths(counters.running),
        )

    def with_counters(self, counters: EngineCounters) -> WorkerReport:
        """Return the report with newer counters of the engine; the counts of rows stay."""
        rows = {
            name: getattr(self, name)
            for name in ("rows", "errors", "output_tokens", "steps", "accepted")
        }
        running = WorkerReport.of(self.worker_id, counters)
        lengths = {name: LengthCounts(own.done, own.tokens) for name, own in self.lengths.items()}
        for name, counted in running.lengths.items():
            lengths[name] = lengths.get(name, LengthCounts()).plus(counted)
        return replace(running, lengths=lengths, **rows)

    def with_batch(self, answers: pa.Table, counters: EngineCounters) -> WorkerReport:
        """Return the report with one more batch of output rows."""
        before = self.with_counters(counters)
        lengths = dict(before.lengths)
        for name, counted in done_lengths(answers).items():
            lengths[name] = lengths.get(name, LengthCounts()).plus(counted)
        return replace(
            before,
            lengths=lengths,
            rows=self.rows + len(answers),
            errors=self.errors + pc.sum(pc.equal(answers["status"], "error"), min_count=0).as_py(),
            output_tokens=self.output_tokens + _sum(answers, "completion_tokens"),
            steps=self.steps + _sum(answers, "num_spec_steps"),
            accepted=self.accepted + _sum(answers, "num_accepted_draft_tokens"),
        )


def running_lengths(running: list[tuple[str, int]]) -> dict[str, LengthCounts]:
    """Return the lengths so far of sequences in slots, by category."""
    tokens: dict[str, list[int]] = {}
    for category, number in running:
        tokens.setdefault(category, []).append(number)
    return {name: LengthCounts(running=bins_of(numbers)) for name, numbers in tokens.items()}


def done_lengths(answers: pa.Table) -> dict[str, LengthCounts]:
    """Return the lengths of output rows, by category."""
    categories: list[object] = [None] * len(answers)
    if CATEGORY in answers.column_names:
        categories = answers[CATEGORY].to_pylist()
    tokens: dict[str, list[int]] = {}
    numbers = answers["completion_tokens"].to_pylist()
    for category, number in zip(categories, numbers, strict=True):
        tokens.setdefault(str(category), []).append(number or 0)
    lengths = {}
    for name, of_class in tokens.items():
        lengths[name] = LengthCounts()
        lengths[name].add_done(of_class)
    return lengths


@dataclass(slots=True)
class Progress:
    """Each worker's latest report, and their sums.

    Attributes:
        starts: workers that began to load, crashed ones included.
        consecutive_starts: starts since a row was last answered without an error.
        ready_at: time when the first worker became ready, on the monotonic clock of the driver's
            node.
        notes: lines to show to the user.
        start_lines: log lines of starting workers with their level, each distinct line once.
        fatal: error that keeps every worker from starting.
        rows_in_files: rows of the files that write tasks reported.
    """

    starts: int = 0
    consecutive_starts: int = 0
    ready_at: float | None = None
    workers: dict[str, WorkerReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    start_lines: list[tuple[int, str]] = field(default_factory=list)
    fatal: Exception | None = None
    rows_in_files: int = 0

    def add(self, report: WorkerReport) -> None:
        if self.ready_at is None:
            self.ready_at = time.monotonic()
        before = self.workers.get(report.worker_id, report)
        if report.rows - report.errors > before.rows - before.errors:
            self.consecutive_starts = 0
        self.workers[report.worker_id] = report

    @property
    def starting(self) -> str | None:
        """Return the last line that a starting worker logged, or None once a worker is ready."""
        if self.workers or not self.start_lines:
            return None
        return self.start_lines[-1][1].partition(":")[0]

    def add_start(self) -> None:
        self.starts += 1
        self.consecutive_starts += 1

    @property
    def rows(self) -> int:
        """Return the number of rows done. Write tasks may report a file before its rows are reported by workers."""
        return max(self._sum("rows"), self.rows_in_files)

    @property
    def errors(self) -> int:
        return self._sum("errors")

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens in rows that are done."""
        return self._sum("output_tokens")

    @property
    def made_tokens(self) -> int:
        """Return the number of tokens that engines generated, including unfinished and lost rows."""
        return max(self.output_tokens, self.work["num_output_tokens"])

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self._sum("accepted") / self._sum("steps") if self._sum("steps") else None

    @property
    def busy_slots(self) -> float | None:
        """Return the mean share of slots that held a sequence, over all steps of all workers; None
        before the first step."""
        offered = self._sum("offered_steps")
        return self._sum("slot_steps") / offered if offered else None

    @property
    def lengths(self) -> dict[str, LengthCounts]:
        """Return the output lengths of all workers, by category."""
        total: dict[str, LengthCounts] = {}
        for report in self.workers.values():
            for name, counted in report.lengths.items():
                total[name] = total.get(name, LengthCounts()).plus(counted)
        return total

    @property
    def num_slots(self) -> float:
        """Return the slots of a worker; 1 before the first step."""
        steps = self.work["num_steps"]
        return self._sum("offered_steps") / steps if steps else 1.0

    @property
    def slot_steps(self) -> tuple[int, int]:
        """Return the slots that held a sequence, and all slots, each summed over the steps of all workers."""
        return self._sum("slot_steps"), self._sum("offered_steps")

    @property
    def row_s(self) -> float:
        """Return the mean seconds that a finished row occupied an engine's slots; 0 before the first."""
        steps = self.work["num_steps"]
        rows = self.rows
        if not steps or not rows:
            return 0.0
        step_s = sum(report.engine_s for report in self.workers.values()) / steps
        return step_s * self._sum("slot_steps") / rows

    @property
    def engine_s(self) -> float:
        """Return the mean seconds per worker inside engine steps."""
        seconds = sum(report.engine_s for report in self.workers.values())
        return seconds / len(self.workers) if self.workers else 0.0

    @property
    def work(self) -> dict[str, int]:
        """Return WORK summed over all workers."""
        return {
            name: sum(report.work.get(name, 0) for report in self.workers.values())
            for name in WORK_COUNTERS
        }

    @property
    def planner_errors(self) -> dict[str, str]:
        """Return why planners failed, by worker."""
        return {
            name: report.planner_error
            for name, report in self.workers.items()
            if report.planner_error
        }

    @property
    def draft_warnings(self) -> dict[str, str]:
        """Return warnings about the head, by worker."""
        return {
            name: report.draft_warning
            for name, report in self.workers.items()
            if report.draft_warning
        }

    @property
    def fallbacks(self) -> dict[str, dict[str, str]]:
        """Return why kernels or CUDA graphs do not run on CUDA devices, by worker."""
        return {name: report.fallbacks for name, report in self.workers.items() if report.fallbacks}

    def _sum(self, name: str) -> int:
        return sum(getattr(report, name) for report in self.workers.values())


class ProgressActor:
    """Collects the workers' reports and keeps their crash logs: one actor per job.

    If this actor is killed, the reports arrive again; crash logs are lost.

    Args:
        num_workers: workers started at first.
    """

    def __init__(self, num_workers: int) -> None:
        self._progress = Progress()
        self._num_workers = num_workers
        self._crash_logs: dict[str, CrashLog] = {}
        self._failed: set[str] = set()
        self._files: dict[str, int] = {}
        self._is_admitting = True

    def start(self, actor_id: str) -> CrashLog:
        """Record that an actor starts an engine. Return the crash log that the actor saved last."""
        self._progress.add_start()
        return self._crash_logs.get(actor_id, CrashLog())

    def save(self, actor_id: str, log: CrashLog) -> None:
        """Store an actor's crash log for its next process."""
        self._crash_logs[actor_id] = log

    def fail(self, actor_id: str, error: Exception, is_local: bool) -> bool:
        """Record that an actor cannot start. Return whether that ends the job, which it does not
        while other actors may work.

        Args:
            is_local: whether the error may concern only that actor.
        """
        self._failed.add(actor_id)
        others_may_start = is_local and len(self._failed) < self._num_workers
        if self._progress.workers or others_may_start:
            self._note(f"{error}; the others go on")
            return False
        self._progress.fatal = error
        return True

    def report(self, report: WorkerReport) -> None:
        self._progress.add(report)

    def add_file(self, name: str, num_rows: int) -> None:
        """Record a part file that was published. A repeated task publishes none, but reports its file again."""
        if name not in self._files:
            self._files[name] = num_rows
            self._progress.rows_in_files += num_rows

    def files(self) -> dict[str, int]:
        """Return the rows of each file that was reported."""
        return self._files

    def stop_admission(self) -> None:
        """Tell workers to start no further row."""
        self._is_admitting = False

    def is_admitting(self) -> bool:
        """Return whether workers may start rows."""
        return self._is_admitting

    def report_exit(self, worker_id: str, reason: str) -> None:
        self._note(f"worker {worker_id} ends: {reason}")

    def log(self, level: int, text: str) -> None:
        """Keep a log line of a starting worker."""
        if (level, text) not in self._progress.start_lines:
            self._progress.start_lines.append((level, text))

    def snapshot(self) -> Progress:
        return self._progress

    def _note(self, line: str) -> None:
        if self._progress.notes[-1:] != [line]:
            self._progress.notes.append(line)


def start_progress(num_workers: int) -> ActorHandle:
    """Start the actor on the driver's own node: if that node dies, so does the job."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ProgressActor)
    options = actor.options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
    )
    return cast(ActorHandle, options.remote(num_workers))


def _sum(answers: pa.Table, column: str) -> int:
    return pc.sum(answers[column], min_count=0).as_py()


class JobMetrics:
    """Prometheus counters of one worker. Labels: the run's name and id, and the worker's name in output rows."""

    def __init__(self, run_name: str, run_id: str, worker_id: str):
        tags = dict(zip(METRIC_LABELS, (run_name, run_id, worker_id), strict=True))
        self._counters = {name: _counter(name, tags) for name in DESCRIPTIONS}
        self._latency = Histogram(
            METRIC_PREFIX + LATENCY,
            "seconds from a row's arrival to its end",
            ROW_BUCKETS_S,
            METRIC_LABELS,
        )
        self._latency.set_default_tags(tags)
        self._engine: dict[str, int] = {}

    def count(self, report: WorkerReport, answers: pa.Table | None) -> None:
        """Add one batch to the counters.

        Args:
            report: totals of the engine.
            answers: output rows of the batch; None for a worker that just started.
        """
        self._add(self._since_last(report))
        if answers is None:
            return
        self._add(_of_rows(answers))
        for error in pc.value_counts(answers["error_code"].drop_null()).to_pylist():
            self._counters[ERROR_ROWS].inc(error["counts"], tags={"code": error["values"]})
        for seconds in answers["e2e_s"].drop_null().to_pylist():
            self._latency.observe(seconds)

    def _since_last(self, report: WorkerReport) -> dict[str, int]:
        """Return the increase of the engine's counters since the last report."""
        now = {name: report.work[counter] for name, counter in ENGINE_COUNTERS.items()}
        now |= {BUSY_STEPS: report.slot_steps, OFFERED: report.offered_steps}
        before = self._engine
        self._engine = now
        return {name: value - before.get(name, 0) for name, value in now.items()}

    def _add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if count:  # Ray refuses an increment of 0
                self._counters[name].inc(count)


def _of_rows(answers: pa.Table) -> dict[str, int]:
    counts = {name: _sum(answers, column) for name, column in COLUMN_COUNTERS.items()}
    return counts | {
        ROWS: len(answers),
        DRAFTS: counts["decode_steps"] - _sum(answers, "num_plain_steps"),
    }


def _counter(name: str, tags: Mapping[str, str]) -> Counter:
    labels = (*METRIC_LABELS, "code") if name == ERROR_ROWS else METRIC_LABELS
    return Counter(METRIC_PREFIX + name, DESCRIPTIONS[name], labels).set_default_tags(dict(tags))
