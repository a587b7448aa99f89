"""Check that existing output rows belong to this input.

Without an id column, an id is made from the file's name and the row's number. So tomorrow's prompts.jsonl, in
another directory, has today's ids and would get today's output. A file that was moved or renamed counts as one file.
Ids and source files of the rows are read only if a file of the run is no longer in the input.

    >>> check_sources(run, plan.files, expected.ids)
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.fingerprints import may_be_same
from eagle_ray.batch.id_digests import Digests, digests, isin
from eagle_ray.batch.input.files import InputFile
from eagle_ray.batch.job_errors import OutputMismatch
from eagle_ray.batch.output.manifest import REMEDY, RunHandle, read_manifest
from eagle_ray.batch.output.part_files import read_tables


def check_sources(run: RunHandle, files: Iterable[InputFile], ids: Digests) -> None:
    """Raise OutputMismatch if one of these sorted ids has rows from a file that is not in the input now."""
    missing = _missing_files(run, {file.path for file in files})
    for table in read_tables(run.data, ["request_id", "source_file"]) if missing else ():
        orphaned = table.filter(pc.is_in(table["source_file"], pa.array(missing)))
        request_ids = orphaned["request_id"].to_pylist()
        if (is_requested := isin(digests(request_ids), ids)).any():
            first = int(is_requested.argmax())
            raise OutputMismatch(
                f"{run.output} has an answer to the id {request_ids[first]!r} from {orphaned['source_file'][first]}, "
                f"which is not in this input: give its rows ids of their own (input.columns.id), {REMEDY}"
            )


def _missing_files(run: RunHandle, paths: set[str]) -> list[str]:
    """Return the files of the run that are not among `paths`, not even under another name."""
    recorded = read_manifest(run.output)["inputs"]
    absent = recorded.keys() - paths
    return [path for path in absent if not any(may_be_same(recorded[path], recorded[other]) for other in paths)]
