"""Fence off stale writers: writers of an earlier attempt that live for seconds after their driver was killed.

Every writer reads ``_run.json`` right before it publishes, so a stale writer can only do harm between that read and
the end of its one rename or PUT. That harm is limited:
- It overwrites nothing. A part file is created only if it does not exist, under a name with its attempt and task;
  ``_run.json``, rewritten part files, ``_SUCCESS``, ``_summary.json`` and ``_progress.json`` are replaced by
  compare-and-swap. So nothing of a newer attempt is lost.
- A late ``_SUCCESS`` may appear while the newer attempt works. That attempt removes it once such PUTs must be over, and
  writes its own after its count.
- A late file of the same run has ids that other files have too, with the same tokens, since sampling is keyed. The
  recount before ``_SUCCESS`` removes the duplicates. On S3 a PUT takes time, so the recount waits until the PUTs
  that were under way when this attempt began must be over. A local rename takes no time.
- A late file of a run that was overwritten would have another configuration's output. Attempt numbers keep counting,
  so its name is below this run's first attempt, and it is deleted before each count.
One case stays open: a writer that is frozen in that gap for longer than MAX_PUT_S and resumed after ``_SUCCESS`` may
add a file. The next start of the same command removes its duplicates; no row is lost or wrong.

    remove_stale_files(run)
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from itertools import pairwise

import pyarrow.compute as pc

from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.layout import RUN, SUCCESS
from eagle_ray.runs.manifest import RunHandle, manifest_of
from eagle_ray.runs.part_files import attempt_of, part_files, read_part
from eagle_ray.storage.path import StoragePath

log = logging.getLogger("eagle_ray")
MAX_PUT_S = 30.0  # one try of one PUT: fifteen megabytes at one a second, less where the line is slower


def remove_stale_files(run: RunHandle) -> None:
    """Delete the files that writers of an overwritten run published after it was deleted.

    Raises OutputDamaged if such a file has rows of this run: then ``_run.json`` lacks attempts, and proves nothing.
    """
    first = manifest_of(run.output)["attempts"][0]["attempt"]
    for file in part_files(run.data):
        attempt = attempt_of(file)
        if attempt is not None and attempt < first:
            if _has_rows_of(run, file):
                raise OutputDamaged(
                    f"{run.output / RUN} is damaged (it lacks attempt {attempt}, which made {file.name}): put it back "
                    "from a copy, or delete it and adopt the rows with eagle-ray repair"
                )
            log.warning("%s is a late file of a run that was overwritten: deleted", file)
            file.remove()


def _has_rows_of(run: RunHandle, file: StoragePath) -> bool:
    """Return whether a row names this run. A file that cannot be read has none that could be kept."""
    try:
        return run.run_id in pc.unique(read_part(file, ["run_id"])["run_id"]).to_pylist()
    except OutputDamaged:
        return False


def wait_for_stale_writers(run: RunHandle) -> None:
    """Wait until no PUT of a killed attempt can be under way, and delete stale files, so that the count is final."""
    attempts = manifest_of(run.output)["attempts"]
    fenced = [later["started_at"] for killed, later in pairwise(attempts) if "outcome" not in killed]
    if fenced and not run.output.is_local:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(fenced[-1])
        remaining_s = min(MAX_PUT_S, MAX_PUT_S - age.total_seconds())
        if remaining_s > 0:
            log.info("waiting %.0f s for writers of a killed attempt to end", remaining_s)
            time.sleep(remaining_s)
    if fenced:
        (run.output / SUCCESS).remove()
    remove_stale_files(run)
