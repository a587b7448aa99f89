"""ExpectedRows: the rows that the input asks for, by id. An id has a row for each sample of each turn.

They are in one file once they are done.

>>> expected = expected_rows_of(plan_input(config), config)     # doctest: +SKIP
>>> len(expected), expected.num_rows                            # doctest: +SKIP
(480, 1920)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_ray.batch.id_digests import Digests, digests, index_of, isin
from eagle_ray.batch.input.plan import InputPlan, ids_in, request_tables
from eagle_ray.batch.job_shard import JobShard
from eagle_ray.config import JobConfig


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The expected rows.

    Attributes:
        ids: sorted.
        rows: number of rows of each id.
        default_rows: number for ids that the input does not have, whose rows another input left.
    """

    ids: Digests
    rows: np.ndarray
    default_rows: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def samples_of(self, ids: Digests) -> np.ndarray:
        """Return how many rows each of these ids has."""
        return np.append(self.rows, np.int32(self.default_rows))[
            index_of(ids, self.ids)
        ]  # -1, of no place, is the last

    def without(self, done: Digests) -> ExpectedRows:
        """Return the rows without the ids in `done`, which is sorted."""
        left = ~isin(self.ids, done)
        return ExpectedRows(self.ids[left], self.rows[left], self.default_rows)

    def of_shard(self, shard: JobShard) -> ExpectedRows:
        """Return the rows of one shard of the job."""
        own = shard.holds(self.ids)
        return ExpectedRows(self.ids[own], self.rows[own], self.default_rows)


def expected_rows_of(plan: InputPlan, config: JobConfig) -> ExpectedRows:
    """Return the expected rows, of the job's shard if it has one.

    The input is read again only if rows may differ in their number.
    """
    expected = _of_all_shards(plan, config)
    return expected if plan.job_shard is None else expected.of_shard(plan.job_shard)


def _of_all_shards(plan: InputPlan, config: JobConfig) -> ExpectedRows:
    others = config.sampling.n
    if not plan.has_own_counts:
        return ExpectedRows(plan.ids, np.broadcast_to(np.int32(others), len(plan.ids)), others)
    rows = np.empty(len(plan.ids), np.int32)
    for table in request_tables(plan):
        own = [num_rows(row, config) for row in table.select(["n", "user_turns"]).to_pylist()]
        rows[index_of(digests(table["request_id"].to_pylist()), plan.ids)] = own
    return ExpectedRows(plan.ids, rows, others)


def num_samples(row: dict[str, Any], config: JobConfig) -> int:
    """Return how many samples a request row has, good or bad."""
    return row["n"] or config.sampling.n


def num_turns(row: dict[str, Any]) -> int:
    """Return how many turns each sample of a request row has: 1 unless it is a conversation."""
    return len(row["user_turns"] or [None])


def num_rows(row: dict[str, Any], config: JobConfig) -> int:
    """Return how many output rows a request row has, good or bad."""
    return num_samples(row, config) * num_turns(row)


def sample_ids(ids: Digests, plan: InputPlan, most: int = 3) -> str:
    """Return the first of these ids as text, for a message."""
    names = []
    for name, _ in ids_in(plan, ids):
        if len(names) == most:
            return ", ".join([*names, "..."])
        names.append(name)
    return ", ".join(names)
