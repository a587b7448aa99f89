"""ExpectedRows: the ids that the input asks for, with the number of output rows and the input position of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from eagle_ray.batch.driver.input_index import InputIndex
from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.row_index import (
    NO_DIGESTS,
    Digests,
    Table,
    duplicates,
    join,
    num_ranges,
    ranges,
    sorted_by_id,
    take,
)

NO_EXPECTED: Table = {
    "id": NO_DIGESTS,
    "place": np.empty(0, np.int64),
    "rows": np.empty(0, np.uint32),
}


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows that the input asks for, read from the input's index a range of ids at a time.

    Attributes:
        index: index of the input.
        allowed: for each file number of the index, how many of the file's first rows are asked for.
        starts: for each file number, position of the file's first row in the whole input.
        default_rows: output rows of an id that only an earlier input had.
        shard: the shard whose ids are asked for; None for all ids.
    """

    index: InputIndex
    allowed: np.ndarray
    starts: np.ndarray
    default_rows: int
    shard: JobShard | None = None

    def __len__(self) -> int:
        """Return the number of ids. For a shard they are counted, which takes time."""
        if self.shard is None:
            return self.num_input_rows
        return sum(int(np.count_nonzero(self._is_expected(table))) for table in self.index.tables)

    @property
    def num_input_rows(self) -> int:
        """Return the number of rows of the whole input, other shards' rows included."""
        return int(self.allowed.sum())

    def of_shard(self, shard: JobShard) -> ExpectedRows:
        """Return the rows of one shard of the job."""
        return replace(self, shard=shard)

    def by_range(self, parts: int) -> Iterator[Table]:
        """Yield the rows of each range of ids, sorted by id, with the columns id, place (position
        in the whole input) and rows."""
        for tables in ranges(self.index.tables, parts):
            rows = join([self._placed(table) for table in tables], NO_EXPECTED)
            yield sorted_by_id(rows) if len(tables) > 1 else rows

    def contains(self, ids: Digests) -> np.ndarray:
        """Return for each id whether the input asks for it."""
        is_expected = np.zeros(len(ids), bool)
        if not len(ids):
            return is_expected
        for table in self.index.tables:
            # An id also has rows that are out of date, so it may have several.
            first = np.searchsorted(table["id"], ids, "left")
            end = np.searchsorted(table["id"], ids, "right")
            num_rows = int((end - first).max())
            for offset in range(num_rows):
                here = np.flatnonzero(first + offset < end)
                rows = take(table, first[here] + offset)
                is_expected[here] |= self._is_expected(rows)
        return is_expected

    def duplicates(self) -> Digests:
        """Return the ids that occur more than once, sorted."""
        parts = num_ranges(self.num_input_rows)
        return np.concatenate(
            [NO_DIGESTS, *(duplicates(rows["id"]) for rows in self.by_range(parts))]
        )

    def _placed(self, table: Table) -> Table:
        rows = take(table, self._is_expected(table))
        place = self.starts[rows["file"]] + rows["row"]
        return {"id": rows["id"], "place": place, "rows": rows["rows"]}

    def _is_expected(self, table: Table) -> np.ndarray:
        is_expected = table["row"] < self.allowed[table["file"]]
        return is_expected if self.shard is None else is_expected & self.shard.holds(table["id"])
