"""Check that existing output rows belong to this input.

A row of a changed file must be the one that it was, and none may be gone.

Without an id column, an id is made from the file's name and the row's number. So tomorrow's prompts.jsonl, in
another directory, has today's ids and would get today's output. An answer from a file that is no longer in the input
stands if the input has its row under the same id, as after a move. Of a file that is not in the input's index, the
whole content must be there under another name.

    check_changes(plan, output)
    check_sources(run, plan)
"""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from eagle_ray.batch.driver.input_plan import MAX_NAMES, InputPlan, sample_ids
from eagle_ray.batch.driver.job_manifest import REMEDY
from eagle_ray.requests.row_schema import schema_differences, unread_settings
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.part_files import as_stored, next_schema, read_tables, stored_schema
from eagle_ray.runs.recorded_inputs import content_of, read_inputs
from eagle_ray.runs.row_index import Digests, digests, isin
from eagle_ray.runs.run import Run, manifest_of
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")


def check_changes(plan: InputPlan, output: StoragePath) -> None:
    """Raise OutputMismatch if rows that the run has recorded of its input are other rows now, or are gone."""
    changed, gone = plan.changes.changed, plan.changes.gone
    if number := sum(map(len, [*changed.values(), *gone.values()])):
        names = [sample_ids(np.concatenate([*changed.values()]), plan)] if changed else []
        rows = (f"row {row} of {path}, which is gone" for path, found in gone.items() for row in np.sort(found))
        names += islice(rows, MAX_NAMES)
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


def check_sources(run: Run, plan: InputPlan) -> None:
    """Raise OutputMismatch if an id that is asked for has rows from a file that is not in the input now.

    Ids and source files of the output's rows are read only if there may be such rows.
    """
    recorded = read_inputs(run.output, manifest_of(run.output))
    contents = {content_of(fingerprint) for fingerprint in plan.fingerprints.values()}
    suspects: dict[str, Digests | None] = {
        path: None  # any of its ids
        for path, was in recorded.items()
        if path not in plan.fingerprints and path not in plan.index.files and content_of(was) not in contents
    }
    suspects |= plan.changes.absent
    for table in read_tables(run.data, ["request_id", "source_file"]) if suspects else ():
        for path in suspects.keys() & set(pc.unique(table["source_file"]).to_pylist()):
            request_ids = table.filter(pc.equal(table["source_file"], path))["request_id"].to_pylist()
            is_other = plan.rows.contains(ids := digests(request_ids))
            if (others := suspects[path]) is not None:
                is_other &= isin(ids, others)
            if is_other.any():
                raise OutputMismatch(
                    f"{run.output} has an answer to the id {request_ids[int(is_other.argmax())]!r} from {path}, which "
                    f"is not in this input: give its rows ids of their own (input.columns.id), {REMEDY}"
                )


def check_columns(run: Run, plan: InputPlan) -> None:
    """Refuse an input whose columns differ from those in the files, because no reader could read both."""
    there = stored_schema(run.data)
    if unread := plan.row_settings.intersection(unread_settings(there)):
        raise OutputMismatch(
            f"{run.output}: its rows were made by a version that did not read the input's {', '.join(sorted(unread))}. "
            "Choose another output.path, or --overwrite."
        )
    if there.names and (columns := schema_differences(there, as_stored(next_schema(run.data, plan.carried_fields)))):
        raise OutputMismatch(
            f"{run.output} has rows of other columns than this input carries: {', '.join(columns)}: {REMEDY}"
        )
