"""Checks before a start: whether this job may write to its output, and which rows it would
generate. Nothing is written.

    check_start(plan).needs_rows       # True

**Changed inputs**: the rows of a changed file must make the requests that they made before, and
none may be gone. Without an id column, an id is made from the file's name and the row's number. So
tomorrow's prompts.jsonl, in another directory, has today's ids and would get today's output. An
answer from a file that is no longer in the input is kept if the input has its row under its id, for
example after a move. If that file is not in the input's index, its whole content must be there
under another name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from eagle_ray.batch.driver.completeness import Completeness, count_done
from eagle_ray.batch.driver.input_plan import (
    MAX_NAMES,
    InputPlan,
    row_settings_line,
    sample_ids,
)
from eagle_ray.batch.driver.job_manifest import (
    OTHER_OUTPUT,
    EarlierRun,
    check_run,
    finished_key,
    resumable,
)
from eagle_ray.batch.driver.job_plan import JobPlan
from eagle_ray.batch.driver.run_bounds import NO_BOUNDS, RunBounds
from eagle_ray.batch.driver.status import usage_of
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.methods.method import plain_decoding_note
from eagle_ray.publishing.publisher import check_place
from eagle_ray.requests.row_schema import schema_differences, unread_settings
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import check_claim, data_of, output_of
from eagle_ray.runs.output_index import OutputIndex, error_ids, own_files, rows_by_id
from eagle_ray.runs.part_files import (
    as_stored,
    check_part,
    part_files,
    read_part,
    schema_after,
    schema_of,
)
from eagle_ray.runs.recorded_inputs import Fingerprint, content_of
from eagle_ray.runs.row_index import INDEX_DIRECTORY, NO_DIGESTS, Digests, Table, digests, isin
from eagle_ray.runs.run import stale_files
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


def preview_output(plan: InputPlan, config: JobConfig) -> str:
    """Return a sentence on what a run would do with its output. Raises the run's errors, and OutputDamaged."""
    output = output_of(config)
    check_claim(config)
    checked_bounds(config)
    if config.output.if_exists == "overwrite":
        check_place(config.output.publish, None)
        return f"a run would replace the {len(own_files(data_of(output)))} files there"
    check_changes(plan, output)
    state, noted = resumable(output, config, plan.fingerprints, plan.changes.accepted)
    record = state.manifest or {}
    check_place(config.output.publish, record.get("run_id"))
    if state.manifest is None:
        return f"a run would start it as configuration {config_hash(config)}"
    index = OutputIndex.read(data_of(output), ignored=stale_files(state))
    run_id = state.manifest["run_id"]
    if plan.key != finished_key(output):
        check_sources(output, noted, plan, index.files, {})
        check_columns(output, plan, index.files)
    return f"a run would resume run {run_id}"


def checked_bounds(config: JobConfig) -> RunBounds:
    """Return the bounds of a run that starts now. Raises ConfigError if it could begin no row within them."""
    now = datetime.now(timezone.utc)
    bounds = RunBounds.of(config.execution, now)
    usage = None
    is_known = True
    if bounds.max_dollars is not None and config.output.if_exists != "overwrite":
        with suppress(OSError):  # an output that cannot be read is refused by its name later
            usage, is_known = usage_of(output_of(config))
    bounds.check_start(usage, now, is_known)
    return bounds


def check_changes(plan: InputPlan, output: StoragePath) -> None:
    """Raise OutputMismatch if input rows that the run has recorded have changed or are gone."""
    changed = plan.changes.changed
    gone = plan.changes.gone
    if number := sum(map(len, changed.values())) + sum(len(rows["id"]) for rows in gone.values()):
        names = [sample_ids(np.concatenate([*changed.values()]), plan)] if changed else []
        names += islice(_names_of_gone(gone, output), MAX_NAMES)
        raise OutputMismatch(
            f"input changed since {output} was made from it: {number} rows of "
            f"{', '.join(sorted({*changed, *gone}))} are other rows now: {', '.join(names)}. Put them back, and add "
            f"new rows at the file's end or in another file; {OTHER_OUTPUT}. Correct error rows in another file, with "
            "the same ids (-i FILE --retry-errors)."
        )
    for path in plan.changes.rewritten:
        log.info(
            "%s was rewritten since %s was made from it, and has the rows that it had: new ones are added, and "
            "answered ones keep their carried columns",
            path,
            output.display_path,
        )


def _names_of_gone(gone: Mapping[str, Table], output: StoragePath) -> Iterator[str]:
    """Yield the id of each missing row and its place; rows of unknown id come last.

    The index has digests of ids. The ids themselves are in the output, if the rows were answered.
    """
    wanted = np.sort(np.concatenate([rows["id"] for rows in gone.values()])) if gone else NO_DIGESTS
    ids = _answered_ids(output, wanted)
    without_id = []
    for path, rows in gone.items():
        for index in np.argsort(rows["row"], kind="stable"):
            place = f"row {rows['row'][index]} of {path}, which is gone"
            request_id = ids.get(rows["id"][index].item())
            if request_id is None:
                without_id.append(place)
            else:
                yield f"{request_id} ({place})"
    yield from without_id


def _answered_ids(output: StoragePath, wanted: Digests) -> dict[bytes, str]:
    """Return a few of these ids, by digest, that the output has rows of."""
    answered: dict[bytes, str] = {}
    with suppress(OutputDamaged, OSError):  # the places of the rows say enough
        for file in part_files(data_of(output)) if len(wanted) else ():
            ids = read_part(file, ["request_id"])["request_id"].to_pylist()
            known = digests(ids)
            answered |= {
                known[i].item(): ids[i] for i in np.flatnonzero(isin(known, wanted)).tolist()
            }
            if len(answered) >= MAX_NAMES:
                return answered
    return answered


def check_sources(
    output: StoragePath,
    recorded: Mapping[str, Fingerprint],
    plan: InputPlan,
    files: Iterable[StoragePath],
    dropped: Mapping[StoragePath, Digests],
) -> None:
    """Raise OutputMismatch if the output has rows for an id of this input that came from a file outside this input.

    Ids and source files of the output's rows are read only if there may be such rows.

    Args:
        recorded: input files that the rows were made from.
        files: part files with the rows.
        dropped: ids, by part file, whose rows the start removes.
    """
    contents = {content_of(fingerprint) for fingerprint in plan.fingerprints.values()}
    suspects: dict[str, Digests | None] = {
        path: None  # any of its ids
        for path, was in recorded.items()
        if path not in plan.fingerprints
        and path not in plan.index.files
        and content_of(was) not in contents
    }
    suspects |= plan.changes.absent
    for file in files if suspects else ():
        table = read_part(file, ["request_id", "source_file"])
        for path in suspects.keys() & set(pc.unique(table["source_file"]).to_pylist()):
            request_ids = table.filter(pc.equal(table["source_file"], path))[
                "request_id"
            ].to_pylist()
            is_other = plan.rows.contains(ids := digests(request_ids))
            if (others := suspects[path]) is not None:
                is_other &= isin(ids, others)
            if file in dropped:
                is_other &= ~isin(ids, dropped[file])
            if is_other.any():
                raise OutputMismatch(
                    f"{output} has an answer to the id {request_ids[int(is_other.argmax())]!r} from {path}, which "
                    f"is not in this input: give its rows ids of their own (input.columns.id), {OTHER_OUTPUT}"
                )


def check_columns(output: StoragePath, plan: InputPlan, files: Sequence[StoragePath]) -> None:
    """Raise OutputMismatch if this input would give rows with other columns than the files have: no
    reader could read both."""
    there = schema_of(files)
    if unread := plan.row_settings.intersection(unread_settings(there)):
        raise OutputMismatch(
            f"{output}: its rows were made by a version that did not read the input's {', '.join(sorted(unread))}. "
            f"{OTHER_OUTPUT[0].upper()}{OTHER_OUTPUT[1:]}."
        )
    following = as_stored(schema_after(there, plan.carried_fields))
    if there.names and (columns := schema_differences(there, following)):
        raise OutputMismatch(
            f"{output} has rows of other columns than this input carries: {', '.join(columns)}: {OTHER_OUTPUT}"
        )


@dataclass(frozen=True, slots=True)
class CheckedStart:
    """A start that has passed every check and has written nothing yet.

    Attributes:
        earlier: the run in the output directory.
        index: index of the ids in its files; None if the output was found complete for this input.
        missing: counts of complete and missing rows; None if rows are still to be counted.
        errors: ids of the error rows to drop, by file.
        needs_rows: whether rows are to be generated.
        bounds: deadline and budget.
    """

    earlier: EarlierRun
    index: OutputIndex | None = None
    missing: Completeness | None = None
    errors: Mapping[StoragePath, Digests] = field(default_factory=dict)
    needs_rows: bool = False
    bounds: RunBounds = NO_BOUNDS


def check_start(plan: JobPlan) -> CheckedStart:
    """Make every check of a start. It only reads, so a start that is refused changes nothing.

    Raises OutputMismatch if the output is another job's, OutputDamaged, InputChanged, and
    ConfigError if the models cannot work here.
    """
    output = plan.output
    input_plan = plan.input
    check_claim(plan.config)
    check_changes(input_plan, output)
    earlier = check_run(plan.config, input_plan.fingerprints, input_plan.changes.accepted)
    input_plan.check_unchanged()
    is_resumed = earlier.state.manifest is not None and not plan.overwrites
    stale = stale_files(earlier.state) if is_resumed else []
    is_finished = plan.is_finished and finished_key(output) == input_plan.key
    if is_finished and not plan.retry_errors:
        return CheckedStart(earlier)

    index = OutputIndex.read(
        data_of(output), output / INDEX_DIRECTORY, ignored={*stale, *earlier.erased}
    )
    errors = _error_rows(index, input_plan) if plan.retry_errors else {}
    if is_finished and not errors:
        return CheckedStart(earlier)
    if is_resumed and earlier.state.is_complete:
        for file in index.unknown:  # only their ids were read
            check_part(file)

    if is_resumed:
        check_sources(output, earlier.inputs, input_plan, index.files, errors)
    there = count_done(input_plan.rows, index)
    if not errors:
        log.info("%d rows asked for, %d already there", there.num_rows, there.num_done_rows)
    needs_rows = bool(errors) or there.num_done_rows < there.num_rows
    bounds = NO_BOUNDS
    if needs_rows:
        bounds = checked_bounds(plan.config)
        run_id = earlier.state.record["run_id"] if is_resumed else None
        check_place(plan.config.output.publish, run_id)
        _log_settings(plan)
        if is_resumed:
            remaining = [file for file in index.files if _keeps_rows(file, errors)]
            check_columns(output, input_plan, remaining)
        plan.check_models()
    return CheckedStart(earlier, index, None if errors else there, errors, needs_rows, bounds)


def _log_settings(plan: JobPlan) -> None:
    """Log settings that may surprise a user, once, before rows are generated."""
    line = row_settings_line(plan.input)
    if line is not None:
        log.info("%s", line)
    config = plan.config
    if not config.engine.is_own:
        return
    note = plain_decoding_note(config.speculative.merged_methods, config.model.drafts)
    if note is not None:
        log.info("%s: %s", config.model.target, note)


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
