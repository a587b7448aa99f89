"""Completeness: which of the rows that the input asks for are in the files of the output.

The rows are compared a range of ids at a time. An id has one row per sample and turn, all in one
file once they are done. Memory holds one range, and one byte per input row; for large inputs these
bytes are in a temporary file.

    count_done(plan.rows, OutputIndex.read(run.data)).num_missing      # 0
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eagle_ray.batch.driver.expected_rows import ExpectedRows
from eagle_ray.runs.output_index import OutputIndex, excess_in
from eagle_ray.runs.row_index import NO_DIGESTS, Digests, index_of, num_ranges
from eagle_ray.storage.path import StoragePath

MAX_ROWS_IN_MEMORY = 1 << 24
MISSING_SHOWN = 4  # ids that are kept for a message


@dataclass(frozen=True, slots=True)
class Completeness:
    """Result of comparing the rows that the input asks for with those in the output files.

    Attributes:
        done: for each row of the input, in its order, whether its output rows are all in one file.
            Rows of other shards of the job count as done.
        num_rows: output rows that the input asks for.
        num_done_rows: number of these rows that are done.
        num_missing: ids that are not done.
        missing: a few of the ids that are not done.
        excess: ids to remove from each file so that every id is in one file only.
        num_others: ids in the files that the input does not ask for, for example after a run with
            another input.
    """

    done: np.ndarray
    num_rows: int
    num_done_rows: int
    num_missing: int
    missing: Digests
    excess: Mapping[StoragePath, Digests]
    num_others: int


def count_done(expected: ExpectedRows, output: OutputIndex) -> Completeness:
    """Return which of the expected rows the files hold, by one pass over both indexes."""
    done = _flags(expected.num_input_rows, fill=expected.shard is not None)
    num_rows = 0
    num_done_rows = 0
    num_missing = 0
    num_others = 0
    missing = NO_DIGESTS
    excess: dict[StoragePath, list[Digests]] = {}

    parts = num_ranges(expected.num_input_rows + output.num_entries)
    both = zip(expected.by_range(parts), output.by_range(parts), strict=True)
    for expected_rows, stored_rows in both:
        expected_ids = expected_rows["id"]
        expected_counts = expected_rows["rows"]
        stored_ids = stored_rows["id"]

        # An id is complete in a file that has as many rows of it as were asked for. Ids that are
        # not of the input have the index -1, which is the appended default.
        index = index_of(stored_ids, expected_ids)
        default = np.uint32(expected.default_rows)
        wanted = np.append(expected_counts, default)[index]
        is_complete = stored_rows["rows"] == wanted
        is_of_input = index >= 0
        is_done = np.zeros(len(expected_ids), bool)
        is_done[index[is_complete & is_of_input]] = True
        done[expected_rows["place"]] = is_done

        num_rows += int(expected_counts.sum())
        num_done_rows += int(expected_counts[is_done].sum())
        other_ids = np.unique(stored_ids[~is_of_input])
        num_others += len(other_ids)

        missing_ids = expected_ids[~is_done]
        num_missing += len(missing_ids)
        num_shown = MISSING_SHOWN - len(missing)
        missing = np.concatenate([missing, missing_ids[:num_shown]])

        extra = excess_in(stored_rows, is_complete)
        for rank in np.unique(extra["file"]):
            ids = extra["id"][extra["file"] == rank]
            excess.setdefault(output.files[rank], []).append(ids)

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
