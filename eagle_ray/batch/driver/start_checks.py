"""Checks of a start against what its output holds: the input's rows, the files that they came from, their columns.

**Changed inputs**: a row of a changed file must be the one that it was, and none may be gone. Without an id column, an
id is made from the file's name and the row's number. So tomorrow's prompts.jsonl, in another directory, has today's ids
and would get today's output. An answer from a file that is no longer in the input stands if the input has its row under
the same id, as after a move. Of a file that is not in the input's index, the whole content must be there under another
name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from eagle_ray.batch.driver.input_plan import MAX_NAMES, InputPlan, sample_ids
from eagle_ray.batch.driver.job_manifest import REMEDY, finished_key, resumable
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.requests.row_schema import schema_differences, unread_settings
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import Fingerprint, check_not_sharded, content_of, data_of, output_of
from eagle_ray.runs.output_index import OutputIndex, own_files
from eagle_ray.runs.part_files import as_stored, part_files, read_part, schema_after, schema_of
from eagle_ray.runs.row_index import EMPTY, Digests, Table, digests, isin
from eagle_ray.runs.run import stale_files
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


def preview_output(plan: InputPlan, config: JobConfig) -> str:
    """Return what a run would do with its output, which stays as it is. Raises as the run would, and OutputDamaged."""
    output = output_of(config)
    if config.execution.shard is None:
        check_not_sharded(output)
    if config.output.if_exists == "overwrite":
        return f"a run would replace the {len(own_files(data_of(output)))} files there"
    check_changes(plan, output)
    state, noted = resumable(output, config, plan.fingerprints, plan.changes.accepted)
    if state.manifest is None:
        return f"a run would start it as configuration {config_hash(config)}"
    index = OutputIndex.read(data_of(output), ignored=stale_files(state))
    run_id = state.manifest["run_id"]
    if plan.key != finished_key(output):
        check_sources(output, noted, plan, index.files, {})
        check_columns(output, plan, index.files)
    return f"a run would resume run {run_id}"


def check_changes(plan: InputPlan, output: StoragePath) -> None:
    """Raise OutputMismatch if rows that the run has recorded of its input are other rows now, or are gone."""
    changed, gone = plan.changes.changed, plan.changes.gone
    if number := sum(map(len, changed.values())) + sum(len(rows["id"]) for rows in gone.values()):
        names = [sample_ids(np.concatenate([*changed.values()]), plan)] if changed else []
        names += islice(_names_of_gone(gone, output), MAX_NAMES)
        raise OutputMismatch(
            f"input changed since {output} was made from it: {number} rows of "
            f"{', '.join(sorted({*changed, *gone}))} are other rows now: {', '.join(names)}. Put them back, and add "
            f"new rows at the file's end or in another file; {REMEDY}. Correct error rows in another file, with the "
            "same ids (-i FILE --retry-errors)."
        )
    for path in plan.changes.rewritten:
        log.info(
            "%s was rewritten since %s was made from it, and has the rows that it had: new ones are added, and "
            "answered ones keep their carried columns",
            path,
            output.display_path,
        )


def _names_of_gone(gone: Mapping[str, Table], output: StoragePath) -> Iterator[str]:
    """Yield the id and the place of each row that is gone from its file, those with a known id first.

    The index has digests of ids. The ids themselves are in the output, if the rows were answered.
    """
    wanted = np.sort(np.concatenate([rows["id"] for rows in gone.values()])) if gone else EMPTY
    ids = _answered_ids(output, wanted)
    places = [
        (ids.get(each), path, row) for path, rows in gone.items() for each, row in zip(*_by_row(rows), strict=True)
    ]
    for request_id, path, row in sorted(places, key=lambda place: place[0] is None):
        place = f"row {row} of {path}, which is gone"
        yield place if request_id is None else f"{request_id!r} ({place})"


def _by_row(rows: Table) -> tuple[list[bytes], list[int]]:
    order = np.argsort(rows["row"], kind="stable")
    return rows["id"][order].tolist(), rows["row"][order].tolist()


def _answered_ids(output: StoragePath, wanted: Digests) -> dict[bytes, str]:
    """Return a few of these ids, by digest, that the output has rows of."""
    found: dict[bytes, str] = {}
    with suppress(OutputDamaged, OSError):  # the places of the rows say enough
        for file in part_files(data_of(output)) if len(wanted) else ():
            ids = read_part(file, ["request_id"])["request_id"].to_pylist()
            known = digests(ids)
            found |= {known[i].item(): ids[i] for i in np.flatnonzero(isin(known, wanted)).tolist()}
            if len(found) >= MAX_NAMES:
                return found
    return found


def check_sources(
    output: StoragePath,
    recorded: Mapping[str, Fingerprint],
    plan: InputPlan,
    files: Iterable[StoragePath],
    dropped: Mapping[StoragePath, Digests],
) -> None:
    """Raise OutputMismatch if an id that is asked for has rows from a file that is not in the input now.

    Ids and source files of the output's rows are read only if there may be such rows.

    Args:
        recorded: the input files that the rows were made from.
        files: the part files with the rows.
        dropped: ids, by part file, whose rows the start removes.
    """
    contents = {content_of(fingerprint) for fingerprint in plan.fingerprints.values()}
    suspects: dict[str, Digests | None] = {
        path: None  # any of its ids
        for path, was in recorded.items()
        if path not in plan.fingerprints and path not in plan.index.files and content_of(was) not in contents
    }
    suspects |= plan.changes.absent
    for file in files if suspects else ():
        table = read_part(file, ["request_id", "source_file"])
        for path in suspects.keys() & set(pc.unique(table["source_file"]).to_pylist()):
            request_ids = table.filter(pc.equal(table["source_file"], path))["request_id"].to_pylist()
            is_other = plan.rows.contains(ids := digests(request_ids))
            if (others := suspects[path]) is not None:
                is_other &= isin(ids, others)
            if file in dropped:
                is_other &= ~isin(ids, dropped[file])
            if is_other.any():
                raise OutputMismatch(
                    f"{output} has an answer to the id {request_ids[int(is_other.argmax())]!r} from {path}, which "
                    f"is not in this input: give its rows ids of their own (input.columns.id), {REMEDY}"
                )


def check_columns(output: StoragePath, plan: InputPlan, files: Sequence[StoragePath]) -> None:
    """Refuse an input whose columns differ from those in the files, because no reader could read both."""
    there = schema_of(files)
    if unread := plan.row_settings.intersection(unread_settings(there)):
        raise OutputMismatch(
            f"{output}: its rows were made by a version that did not read the input's {', '.join(sorted(unread))}. "
            f"{REMEDY[0].upper()}{REMEDY[1:]}."
        )
    following = as_stored(schema_after(there, plan.carried_fields))
    if there.names and (columns := schema_differences(there, following)):
        raise OutputMismatch(
            f"{output} has rows of other columns than this input carries: {', '.join(columns)}: {REMEDY}"
        )
