"""Claim: an output that this process holds for a plan, and which of the plan's rows are missing.

with claim(plan) as held:
    held.missing()       # None once every row is there
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from eagle_ray.batch.driver.completeness import Completeness, count_done
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.job_plan import JobPlan
from eagle_ray.batch.driver.previous_run import finished_key
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.batch.driver.source_check import check_changes, check_columns, check_sources
from eagle_ray.runs.layout import RUN, SUMMARY, claim_output
from eagle_ray.runs.lease import Lease, hold
from eagle_ray.runs.output_index import OutputIndex, error_ids
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import extended_retries

log = logging.getLogger("eagle_ray")


@dataclass(slots=True)
class Claim:
    """One attempt at the output of a plan, whose lease this process holds.

    Attributes:
        at_end: called once the attempt's outcome is recorded, with the lease.
        is_finished: whether the output was found complete for this input, and has not changed since.
    """

    plan: JobPlan
    run: Run
    at_end: ExitStack
    is_finished: bool = False

    def prepare(self) -> None:
        """Remove what this attempt does not keep."""
        self.run.remove_stale_files()
        self.plan.input.index.save(self.run.index)
        if self.plan.retry_errors:
            self._drop_error_rows()
        self.is_finished = finished_key(self.run.output) == self.plan.input.key

    def missing(self) -> Completeness | None:
        """Return what the files hold if rows are to be generated, else None. Raises if they cannot be."""
        if self.is_finished:
            return None
        plan = self.plan.input
        check_sources(self.run, plan)
        found = self.count()
        log.info("%d rows asked for, %d already there", found.num_rows, found.num_done_rows)
        if found.num_rows == found.num_done_rows:
            return None
        self.plan.log_settings()
        check_columns(self.run, plan)
        self.plan.check_models()
        (self.run.output / SUMMARY).remove()  # it no longer says what the files hold
        return found

    def count(self) -> Completeness:
        """Compare the files as they are now with the rows of the plan. An output that was deleted stays deleted."""
        self.run.check_current()
        return count_done(self.plan.input.rows, OutputIndex.read(self.run.data, self.run.index))

    def _drop_error_rows(self) -> None:
        """Rewrite each file without its error rows of the plan. Error rows of other inputs stay."""
        for file in self.run.files:
            wrong = error_ids(file)
            if len(wrong := wrong[self.plan.input.rows.contains(wrong)]):
                log.info("%d ids with errors will be tried again; taken out of %s", len(wrong), file)
                self.run.remove_rows(file, wrong, self.plan.config.output.compression)


@contextmanager
def claim(plan: JobPlan) -> Iterator[Claim]:
    """Hold the output of the plan, begin an attempt, and record how it ends.

    Raises OutputLocked if another driver holds it, OutputMismatch if it is another job's, InputChanged if the input
    changed since it was read.
    """
    config, output = plan.config, plan.output
    if plan.overwrites or plan.retry_errors or (len(plan.input.rows) and not (output / RUN).exists()):
        plan.check_models()  # before anything is deleted, and before a mistyped name is on record
    claim_output(config)
    with hold_output(output) as lease, ExitStack() as at_end:
        check_changes(plan.input, output)
        run = open_run(config, plan.input.fingerprints, plan.input.changes.accepted, lease.check)
        with run.recorded_outcome(), extended_retries(), plan.input.detect_changes():
            plan.input.check_unchanged()
            held = Claim(plan, run, at_end)
            held.prepare()
            yield held


def hold_output(output: StoragePath) -> AbstractContextManager[Lease]:
    """Hold the lease of an output directory, as ``hold`` does. Its loss interrupts the main thread."""
    return hold(output, interrupt, lambda: None if is_interrupted() else accept_interrupt())
