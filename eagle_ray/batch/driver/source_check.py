"""Check that existing output rows belong to this input.

Without an id column, an id is made from the file's name and the row's number. So tomorrow's prompts.jsonl, in
another directory, has today's ids and would get today's output. A file that was moved or renamed counts as one file,
also if it has grown since a move.
Ids and source files of the rows are read only if a file of the run is no longer in the input.

A changed file is accepted if no answered row of it changed (``check_changes``).

    check_sources(run, plan.files, plan.rows)
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.batch.driver.input_plan import Growth, InputPlan, sample_ids
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.layout import data_of
from eagle_ray.runs.manifest import REMEDY, RunHandle, manifest_of
from eagle_ray.runs.output_index import OutputIndex, error_ids, ids_in_file
from eagle_ray.runs.part_files import read_tables
from eagle_ray.runs.recorded_inputs import Fingerprint, may_be_same, read_inputs
from eagle_ray.runs.row_index import INDEX, Table, digests, isin, take
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
MAX_NAMES = 3


def check_changes(plan: InputPlan, output: StoragePath, retry_errors: bool) -> None:
    """Raise OutputMismatch if rows that were answered are other rows now; log those that changed or are gone.

    The caller holds the lock. retry_errors: error rows are dropped, so their requests may change.
    """
    changes = plan.changes
    for path in changes.grown:
        log.info("%s has grown since %s was made from it: its new rows are added", path, output.display_path)
    for path in changes.rewritten:
        log.warning(
            "%s was rewritten since %s was made from it: answered rows keep the carried columns that they have",
            path,
            output.display_path,
        )
    if not (len(changes.changed) or len(changes.vanished)):
        return
    files = ", ".join((*changes.rewritten, *changes.grown)) or "the input"
    index = OutputIndex.read(data_of(output), output / INDEX)
    answered = index.find(changes.changed)
    if retry_errors:
        answered = _without_errors(answered, index)
    if len(answered["id"]):
        names = sample_ids(answered["id"], plan, MAX_NAMES)
        raise OutputMismatch(
            f"input changed since {output} was made from it: {len(answered['id'])} rows of {files} that were answered "
            f"are other rows now: {names}. Give them ids of their own, put them back, {REMEDY}."
        )
    if len(changes.changed):
        log.warning("%d rows of %s changed before they were answered", len(changes.changed), files)
    if len(changes.vanished):
        gone = index.find(changes.vanished)
        names = f" ({', '.join(_names(gone, index))})" if len(gone["id"]) else ""
        log.warning("%d rows are gone from %s; answers%s stay in the output", len(changes.vanished), files, names)


def _without_errors(entries: Table, index: OutputIndex) -> Table:
    """Return the entries without those of error rows."""
    is_error = np.zeros(len(entries["id"]), bool)
    for rank in np.unique(entries["file"]):
        here = entries["file"] == rank
        is_error[here] = isin(entries["id"][here], error_ids(index.files[rank]))
    return take(entries, ~is_error)


def _names(entries: Table, index: OutputIndex) -> list[str]:
    """Return the ids of the first few entries as text, from their files."""
    names: list[str] = []
    for rank in np.unique(entries["file"][:MAX_NAMES]):
        names += ids_in_file(index.files[rank], entries["id"])
    return names[:MAX_NAMES] + (["..."] if len(entries["id"]) > MAX_NAMES else [])


def check_sources(run: RunHandle, files: Iterable[InputFile], asked: ExpectedRows) -> None:
    """Raise OutputMismatch if an id that is asked for has rows from a file that is not in the input now."""
    missing = _missing_files(run, list(files))
    for table in read_tables(run.data, ["request_id", "source_file"]) if missing else ():
        orphaned = table.filter(pc.is_in(table["source_file"], pa.array(missing)))
        request_ids = orphaned["request_id"].to_pylist()
        if (is_requested := asked.contains(digests(request_ids))).any():
            first = int(is_requested.argmax())
            raise OutputMismatch(
                f"{run.output} has an answer to the id {request_ids[first]!r} from {orphaned['source_file'][first]}, "
                f"which is not in this input: give its rows ids of their own (input.columns.id), {REMEDY}"
            )


def _missing_files(run: RunHandle, files: Sequence[InputFile]) -> list[str]:
    """Return the files of the run that are not among `files`, not even under another name, or moved and then grown."""
    recorded = read_inputs(run.output, manifest_of(run.output))
    by_size, by_name = defaultdict(list), defaultdict(list)  # each is compared with few: there may be many
    for file in files:
        by_size[recorded[file.path]["size"]].append(recorded[file.path])
        by_name[file.storage_path.name].append(file)
    paths = {file.path for file in files}
    has_grown = Growth(recorded)

    def is_here(path: str, was: Fingerprint) -> bool:
        if any(may_be_same(was, now) for now in by_size[was["size"]]):
            return True
        return any(has_grown(file, was) for file in by_name[path.rpartition("/")[2]])

    return [path for path, was in recorded.items() if path not in paths and not is_here(path, was)]
