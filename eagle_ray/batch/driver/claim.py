"""Claim: an output that this process holds for a plan, and which of the plan's rows are missing.

The rows that the input asks for are compared with those in the files, a range of ids at a time. An id has a row for
each sample of each turn; they are in one file once they are done. Memory holds one range, and a byte for each row of
the input, which is in a temporary file if there are many.

    with claim(plan) as claimed:
        claimed.missing()       # None once every row is there
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from eagle_ray.batch.driver.input_index import ExpectedRows
from eagle_ray.batch.driver.input_plan import InputPlan
from eagle_ray.batch.driver.job_manifest import EarlierRun, begin_run, check_run, finished_key
from eagle_ray.batch.driver.job_plan import JobPlan
from eagle_ray.batch.driver.signals import accept_interrupt, interrupt, is_interrupted
from eagle_ray.batch.driver.start_checks import check_changes, check_columns, check_sources
from eagle_ray.runs.layout import SUMMARY, check_claim, claim_output, data_of
from eagle_ray.runs.lease import Lease, free_lease, held, hold
from eagle_ray.runs.output_index import OutputIndex, error_ids, excess_in, rows_by_id
from eagle_ray.runs.part_files import check_part
from eagle_ray.runs.row_index import EMPTY, INDEX, Digests, index_of, num_ranges
from eagle_ray.runs.run import Run, stale_files
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import extended_retries

log = logging.getLogger("eagle_ray")
MAX_ROWS_IN_MEMORY = 1 << 24
MISSING_SHOWN = 4  # ids that are kept for a message


@dataclass(frozen=True, slots=True)
class CheckedStart:
    """A start that has passed every check, and has written nothing yet.

    Attributes:
        earlier: what the output holds.
        index: the ids in its files; None if the output was found complete for this input.
        missing: what the files hold if rows are to be generated; None if they are to be counted first.
        errors: ids of the error rows to drop, by file.
        needs_rows: whether rows are to be generated.
    """

    earlier: EarlierRun
    index: OutputIndex | None = None
    missing: Completeness | None = None
    errors: Mapping[StoragePath, Digests] = field(default_factory=dict)
    needs_rows: bool = False


def check_start(plan: JobPlan) -> CheckedStart:
    """Make every check of a start. It only reads, so a start that is refused changes nothing.

    Raises OutputMismatch if the output is another job's, OutputDamaged, InputChanged, and ConfigError if the models
    cannot work here.
    """
    output, input_plan = plan.output, plan.input
    check_claim(plan.config)
    check_changes(input_plan, output)
    earlier = check_run(plan.config, input_plan.fingerprints, input_plan.changes.accepted)
    input_plan.check_unchanged()
    is_resumed = earlier.state.manifest is not None and not plan.overwrites
    stale = stale_files(earlier.state) if is_resumed else []
    is_finished = plan.is_finished and finished_key(output) == input_plan.key
    if is_finished and not plan.retry_errors:
        return CheckedStart(earlier)

    index = OutputIndex.read(data_of(output), output / INDEX, ignored={*stale, *earlier.erased})
    errors = _error_rows(index, input_plan) if plan.retry_errors else {}
    if is_finished and not errors:
        return CheckedStart(earlier)
    if is_resumed and earlier.state.is_complete:
        for file in index.unknown:  # of which only the ids were read
            check_part(file)

    if is_resumed:
        check_sources(output, earlier.inputs, input_plan, index.files, errors)
    there = count_done(input_plan.rows, index)
    if not errors:
        log.info("%d rows asked for, %d already there", there.num_rows, there.num_done_rows)
    needs_rows = bool(errors) or there.num_done_rows < there.num_rows
    if needs_rows:
        plan.log_settings()
        if is_resumed:
            check_columns(output, input_plan, [file for file in index.files if _keeps_rows(file, errors)])
        plan.check_models()
    return CheckedStart(earlier, index, None if errors else there, errors, needs_rows)


def _error_rows(index: OutputIndex, plan: InputPlan) -> dict[StoragePath, Digests]:
    """Return the ids of the plan's error rows by file, each file read whole. Error rows of other inputs stay."""
    errors = {}
    for file in index.files:
        wrong = error_ids(file)
        if len(wrong := wrong[plan.rows.contains(wrong)]):
            check_part(file)
            errors[file] = wrong
    return errors


def _keeps_rows(file: StoragePath, errors: Mapping[StoragePath, Digests]) -> bool:
    return file not in errors or len(rows_by_id(file, 0)["id"]) > len(errors[file])


@dataclass(slots=True)
class Claim:
    """One attempt at the output of a plan, whose lease this process holds.

    Attributes:
        at_end: called once the attempt's outcome is recorded, with the lease.
        start: what was found when the attempt began.
    """

    plan: JobPlan
    run: Run
    at_end: ExitStack
    start: CheckedStart

    @property
    def is_finished(self) -> bool:
        """Return whether the output was found complete for this input."""
        return self.start.index is None

    def missing(self) -> Completeness | None:
        """Return what the files hold if rows are to be generated, else None."""
        if not self.start.needs_rows:
            return None
        if self.start.missing is not None:
            return self.start.missing
        there = self.count()
        log.info("%d rows asked for, %d already there", there.num_rows, there.num_done_rows)
        return None if there.num_rows == there.num_done_rows else there

    def count(self) -> Completeness:
        """Compare the files as they are now with the rows of the plan. An output that was deleted stays deleted."""
        self.run.check_current()
        index = OutputIndex.read(self.run.data, self.run.index)
        index.save(self.run.index, self.run.data)
        return count_done(self.plan.input.rows, index)


@contextmanager
def claim(plan: JobPlan) -> Iterator[Claim]:
    """Check the plan, hold the output's lease, begin an attempt, and record how it ends.

    Raises OutputLocked if another driver holds it, and as check_start does. Then nothing has changed.
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

    This is all that a start writes before its first row, in this order. ``_run.json`` decides: a start that is killed
    before it leaves the old run, with files that nothing names; one that is killed after it leaves the new attempt,
    and the next start does the rest again.
    """
    claim_output(plan.config)  # the first shard's
    fingerprints = plan.input.fingerprints
    run = begin_run(start.earlier, plan.config, fingerprints, lease.check)  # _run.json
    with run.recorded_outcome():
        run.remove_stale_files()
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
    """Hold the lease of an output directory, as ``hold`` does. Its loss interrupts the main thread."""
    return hold(output, interrupt, _accept_loss)


def free_output(output: StoragePath) -> Lease:
    """Return the lease of an output that no driver writes, as ``free_lease`` does. Raises OutputLocked."""
    return free_lease(output, interrupt)


def hold_free(lease: Lease) -> AbstractContextManager[Lease]:
    """Hold the lease that free_output has returned, as hold_output does."""
    return held(lease, _accept_loss)


def _accept_loss() -> None:
    if not is_interrupted():
        accept_interrupt()


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
