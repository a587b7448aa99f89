"""Check that existing output rows belong to this input.

Without an id column, an id is made from the file's name and the row's number. So tomorrow's prompts.jsonl, in
another directory, has today's ids and would get today's output. An answer from a file that is no longer in the input
stands if the input has its row under the same id, as after a move. Of a file that the input's index does not know, the
whole content must be there under another name.

    check_sources(run, plan)
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.batch.driver.input_plan import InputPlan
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.manifest import REMEDY, RunHandle, manifest_of
from eagle_ray.runs.part_files import read_tables
from eagle_ray.runs.recorded_inputs import content_of, read_inputs
from eagle_ray.runs.row_index import digests, isin


def check_sources(run: RunHandle, plan: InputPlan) -> None:
    """Raise OutputMismatch if an id that is asked for has rows from a file that is not in the input now.

    Ids and source files of the output's rows are read only if there may be such rows.
    """
    recorded = read_inputs(run.output, manifest_of(run.output))
    contents = {content_of(fingerprint) for fingerprint in plan.fingerprints.values()}
    absent = [path for path in recorded if path not in plan.fingerprints]
    unknown = [path for path in absent if path not in plan.index.files and content_of(recorded[path]) not in contents]
    others = plan.changes.others
    for table in read_tables(run.data, ["request_id", "source_file"]) if unknown or len(others) else ():
        orphaned = table.filter(pc.is_in(table["source_file"], pa.array(absent, pa.string())))
        request_ids = orphaned["request_id"].to_pylist()
        ids = digests(request_ids)
        is_unknown = pc.is_in(orphaned["source_file"], pa.array(unknown, pa.string())).to_numpy()
        if (is_other := plan.rows.contains(ids) & (is_unknown | isin(ids, others))).any():
            first = int(is_other.argmax())
            raise OutputMismatch(
                f"{run.output} has an answer to the id {request_ids[first]!r} from {orphaned['source_file'][first]}, "
                f"which is not in this input: give its rows ids of their own (input.columns.id), {REMEDY}"
            )
