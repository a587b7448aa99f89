"""What earlier attempts at an output left: the index of their input, and for which input they were found complete.

The record of a finished run names its plan by its key and the files in data/ by their states. It holds only while both
are unchanged, and then a second start reads no row.

    previous_run(config).finished_key      # '5f0c2a91d3b7'
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from eagle_ray.batch.driver.input_index import PreviousRun
from eagle_ray.config import JobConfig
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import data_of, output_of
from eagle_ray.runs.recorded_inputs import read_inputs
from eagle_ray.runs.row_index import INDEX, read_index_file, write_facts
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

FILE = "finished.json"


def previous_run(config: JobConfig) -> PreviousRun:
    """Return what earlier attempts left; nothing but the index of the input if it will be overwritten."""
    output = output_of(config)
    if config.output.if_exists != "overwrite":
        with suppress(OSError, JobError):  # opening the run names what is wrong
            if manifest := Run.inspect(output).manifest:
                return PreviousRun(output / INDEX, read_inputs(output, manifest), finished_key(output))
    return PreviousRun(output / INDEX)


def finished_key(output: StoragePath) -> str | None:
    """Return the key of the plan whose rows the files hold, all of them and once, or None if that is not on record."""
    found = read_index_file(output / INDEX / FILE)
    if found is None or found.get("files") != files_key(output):
        return None
    return found.get("key")


def record_finished(output: StoragePath, key: str, counted: str) -> None:
    """Record that the files hold every row of the plan with this key.

    counted: the key of the files before they were counted, so that the record does not hold for a late file.
    """
    write_facts(output / INDEX / FILE, {"key": key, "files": counted})


def forget_finished(output: StoragePath) -> None:
    """Delete the record, so that the next start counts the rows."""
    (output / INDEX / FILE).remove()


def files_key(output: StoragePath) -> str:
    """Return a digest of the names and states of all files with rows of this run or shard."""
    content = hashlib.blake2b(digest_size=16)
    data = data_of(output)
    for file, state in data.list_states("**/*.parquet").items():
        content.update(f"{file.text.removeprefix(data.text)} {state}\n".encode())
    return content.hexdigest()
