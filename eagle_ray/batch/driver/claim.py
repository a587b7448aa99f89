"""Claim: the output directory of a plan while this process holds its lease, and which rows are missing in it.

The output's lease is held while the context is open:

    with claim(plan) as claimed:
        claimed.missing()       # None once every row is there
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from eagle_ray.batch.driver.completeness import Completeness, count_done
from eagle_ray.batch.driver.job_manifest import begin_run
from eagle_ray.batch.driver.job_plan import JobPlan
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.batch.driver.start_checks import CheckedStart, check_start
from eagle_ray.runs.layout import STOPPED_FILE, SUMMARY, claim_output
from eagle_ray.runs.lease import Lease, free_lease, hold, hold_lease
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.retries import extended_retries

log = logging.getLogger("eagle_ray")


@dataclass(slots=True)
class Claim:
    """One attempt at the output of a plan, whose lease this process holds.

    Attributes:
        at_end: callbacks that run, still under the lease, once the attempt's outcome is recorded.
        start: result of the checks when the attempt began.
    """

    plan: JobPlan
    run: Run
    at_end: ExitStack
    start: CheckedStart

    @property
    def is_finished(self) -> bool:
        """Return whether the start found the output complete for this input, so that nothing is left to do."""
        return self.start.index is None

    def missing(self) -> Completeness | None:
        """Return the counts of complete rows if some rows are missing, else None."""
        if not self.start.needs_rows:
            return None
        if self.start.missing is not None:
            return self.start.missing
        there = self.count()
        log.info("%d rows asked for, %d already there", there.num_rows, there.num_done_rows)
        return None if there.num_rows == there.num_done_rows else there

    def count(self) -> Completeness:
        """Compare the rows in the output files, as they are now, with the rows that the input asks for.

        Raises an error if the output was deleted; it is not created again.
        """
        self.run.check_current()
        index = OutputIndex.read(self.run.data, self.run.index)
        index.save(self.run.index, self.run.data)
        return count_done(self.plan.input.rows, index)


@contextmanager
def claim(plan: JobPlan) -> Iterator[Claim]:
    """Check the plan, acquire the output's lease, begin an attempt, and record its outcome when the context ends.

    Raises OutputLocked if another driver holds the lease, and the errors of check_start. Nothing
    has changed then.
    """
    lease = free_output(plan.output)
    with plan.input.detect_changes():
        start = check_start(plan)
    with (
        hold_free(lease),
        ExitStack() as at_end,
        _begun(plan, start, lease) as run,
        extended_retries(),
        plan.input.detect_changes(),
    ):
        yield Claim(plan, run, at_end, start)


@contextmanager
def _begun(plan: JobPlan, start: CheckedStart, lease: Lease) -> Iterator[Run]:
    """Begin an attempt at a checked output, and record how it ends.

    This is all that a start writes before its first row, in this order. ``_run.json`` decides: a
    start that is killed before it leaves the old run, with files that nothing names; one that is
    killed after it leaves the new attempt, and the next start does the rest again.
    """
    inputs = plan.input
    claim_output(plan.config, inputs.revisions)  # the first shard's
    run = begin_run(
        start.earlier, plan.config, inputs.fingerprints, lease.check, inputs.revisions
    )  # _run.json
    with run.recorded_outcome():
        run.remove_stale_files()
        (run.output / STOPPED_FILE).remove()
        if start.needs_rows:
            (run.output / SUMMARY).remove()  # it no longer says what the files hold
        plan.input.index.save(run.index)
        if start.index is not None:
            start.index.save(run.index, run.data)
        for file, ids in start.errors.items():
            log.info("%d ids with errors will be tried again; taken out of %s", len(ids), file)
            run.remove_rows(file, ids, plan.config.output.compression)
        yield run


def hold_output(output: StoragePath) -> AbstractContextManager[Lease]:
    """Hold the lease of an output directory while the context is open. If it is lost, the main
    thread is interrupted."""
    return hold(output, interrupt, _accept_loss)


def free_output(output: StoragePath) -> Lease:
    """Return the lease of an output that no driver writes, not acquired yet. Raises OutputLocked."""
    return free_lease(output, interrupt)


def hold_free(lease: Lease) -> AbstractContextManager[Lease]:
    """Acquire and hold the lease that free_output has returned, with the effect of hold_output."""
    return hold_lease(lease, _accept_loss)


def _accept_loss() -> None:
    if not is_interrupted():
        accept_interrupt()
