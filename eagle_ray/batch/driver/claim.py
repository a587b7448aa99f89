"""Claim: an output that this process holds for a plan, and which of the plan's rows are missing.

The rows that the input asks for are compared with those in the files, a range of ids at a time. An id has a row for
each sample of each turn; they are in one file once they are done. Memory holds one range, and a byte for each row of
the input, which is in a temporary file if there are many.

    with claim(plan) as held:
        held.missing()       # None once every row is there
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from eagle_ray.batch.driver.input_index import ExpectedRows
from eagle_ray.batch.driver.job_manifest import check_changes, check_columns, check_sources, finished_key, open_run
from eagle_ray.batch.driver.job_plan import JobPlan
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.runs.layout import RUN, SUMMARY, claim_output
from eagle_ray.runs.lease import Lease, hold
from eagle_ray.runs.output_index import OutputIndex, error_ids, excess_in
from eagle_ray.runs.row_index import EMPTY, Digests, index_of, num_ranges
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import extended_retries

log = logging.getLogger("eagle_ray")
MAX_ROWS_IN_MEMORY = 1 << 24
MISSING_SHOWN = 4  # ids that are kept for a message


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
        there = self.count()
        log.info("%d rows asked for, %d already there", there.num_rows, there.num_done_rows)
        if there.num_rows == there.num_done_rows:
            return None
        self.plan.log_settings()
        check_columns(self.run, plan)
        self.plan.check_models()
        (self.run.output / SUMMARY).remove()  # it no longer says what the files hold
        return there

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
            claimed = Claim(plan, run, at_end)
            claimed.prepare()
            yield claimed


def hold_output(output: StoragePath) -> AbstractContextManager[Lease]:
    """Hold the lease of an output directory, as ``hold`` does. Its loss interrupts the main thread."""
    return hold(output, interrupt, lambda: None if is_interrupted() else accept_interrupt())


@dataclass(frozen=True, slots=True)
class Completeness:
    """What the files hold of the expected rows.

    Attributes:
        done: for each row of the input, in its order, whether its output rows are all in one file. Rows of other shards
            of the job count as done.
        num_rows: output rows that the input asks for.
        num_done_rows: those of them that are done.
        num_missing: ids that are not done.
        missing: a few of those.
        excess: the ids to remove from each file so that every id is in one file.
        num_others: ids in the files that are not expected, as after a run with another input.
    """

    done: np.ndarray
    num_rows: int
    num_done_rows: int
    num_missing: int
    missing: Digests
    excess: Mapping[StoragePath, Digests]
    num_others: int


def count_done(expected: ExpectedRows, output: OutputIndex) -> Completeness:
    """Return what the files hold, in one pass over both indexes."""
    done = _flags(expected.num_input_rows, fill=expected.shard is not None)
    num_rows = num_done_rows = num_missing = num_others = 0
    missing = EMPTY
    excess: dict[StoragePath, list[Digests]] = {}
    parts = num_ranges(expected.num_input_rows + output.num_entries)
    for expected_rows, stored_rows in zip(expected.by_range(parts), output.by_range(parts), strict=True):
        index = index_of(stored_rows["id"], expected_rows["id"])
        default = np.uint32(expected.default_rows)
        wanted = np.append(expected_rows["rows"], default)[index]  # -1, of no place, is the last
        is_complete = stored_rows["rows"] == wanted
        is_done = np.zeros(len(expected_rows["id"]), bool)
        is_done[index[is_complete & (index >= 0)]] = True
        done[expected_rows["place"]] = is_done
        num_others += len(np.unique(stored_rows["id"][index < 0]))
        num_rows += int(expected_rows["rows"].sum())
        num_done_rows += int(expected_rows["rows"][is_done].sum())
        left = expected_rows["id"][~is_done]
        num_missing += len(left)
        missing = np.concatenate([missing, left[: MISSING_SHOWN - len(missing)]])
        extra = excess_in(stored_rows, is_complete)
        for rank in np.unique(extra["file"]):
            excess.setdefault(output.files[rank], []).append(extra["id"][extra["file"] == rank])
    joined = {file: np.concatenate(ids) for file, ids in excess.items()}
    return Completeness(done, num_rows, num_done_rows, num_missing, missing, joined, num_others)


def _flags(number: int, fill: bool) -> np.ndarray:
    """Return this many flags, all set or all unset."""
    if number <= MAX_ROWS_IN_MEMORY:
        return np.full(number, fill)
    with tempfile.TemporaryFile(prefix="eagle-ray-") as file:
        flags = np.memmap(file, bool, "w+", shape=number)  # all unset
        if fill:
            flags[:] = True
        return flags
