"""Progress: what the workers have done so far, added up.

Workers send a Report per batch to one small Ray actor; whoever wants to know asks it for the sum. Does not know files
or how progress is shown.

    >>> progress = start_progress()
    >>> ray.get(progress.snapshot.remote()).rows
    40
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle

# Of an engine's counters, those that add up over workers: its steps and what they were spent on.
WORK = (
    "num_steps",
    "num_plain_steps",
    "num_probes",
    "num_verify_rows",
    "num_prefill_tokens",
    "num_reused_tokens",
    "num_preemptions",
)


class Counters(Protocol):
    """What is read of an engine's counters, with WORK; the driver and the progress actor do without its torch."""

    num_slots: int
    num_steps: int
    num_slot_steps: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker did with one batch.

    slot_steps of offered_steps: the engine's slots that were busy, so far. work: WORK of the engine, so far.
    """

    worker_id: str
    slot_steps: int
    offered_steps: int
    work: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    errors: int = 0
    output_tokens: int = 0
    steps: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, worker_id: str, counters: Counters, answers: pa.Table | None) -> Report:
        """answers: the batch's output rows; None from a worker that has just become ready."""
        work = {name: getattr(counters, name) for name in WORK}
        engine = (worker_id, counters.num_slot_steps, counters.num_steps * counters.num_slots, work)
        if answers is None:
            return cls(*engine)
        return cls(
            *engine,
            rows=len(answers),
            errors=pc.sum(pc.equal(answers["status"], "error"), min_count=0).as_py(),
            output_tokens=pc.sum(answers["completion_tokens"], min_count=0).as_py(),
            steps=pc.sum(answers["num_spec_steps"], min_count=0).as_py(),
            accepted=pc.sum(answers["num_accepted_draft_tokens"], min_count=0).as_py(),
        )


@dataclass(slots=True)
class Progress:
    """The sum of all reports, and each worker's latest.

    starts: workers that began to load, those that died since included. notes: lines that workers want the user to read.
    fatal: why a worker cannot start, and so none can.
    """

    rows: int = 0
    errors: int = 0
    output_tokens: int = 0
    steps: int = 0
    accepted: int = 0
    starts: int = 0
    workers: dict[str, Report] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fatal: Exception | None = None

    def add(self, report: Report) -> None:
        for name in ("rows", "errors", "output_tokens", "steps", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.workers[report.worker_id] = report

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def busy_slots(self) -> float | None:
        """The share of slots that held a sequence, over all steps of all workers."""
        offered = sum(report.offered_steps for report in self.workers.values())
        return sum(report.slot_steps for report in self.workers.values()) / offered if offered else None

    @property
    def work(self) -> dict[str, int]:
        """WORK, added up over all workers."""
        return {name: sum(report.work.get(name, 0) for report in self.workers.values()) for name in WORK}


class ProgressActor:
    """Where reports are added up: one per job, in a process of its own."""

    def __init__(self) -> None:
        self._progress = Progress()

    def start(self) -> None:
        self._progress.starts += 1

    def report(self, report: Report) -> None:
        self._progress.add(report)

    def note(self, line: str) -> None:
        self._progress.notes.append(line)

    def fail(self, error: Exception) -> None:
        self._progress.fatal = error

    def snapshot(self) -> Progress:
        return self._progress


def start_progress() -> ActorHandle:
    return ray.remote(num_cpus=0)(ProgressActor).remote()
