"""ExpectedRows: the rows that the input asks for, by id. An id has a row for each sample of each turn.

They are in one file once they are done. They are read from the input's index, a range of ids at a time.

    expected = plan_input(config).rows
    len(expected)                           # 480
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.row_index import EMPTY, Digests, Table, duplicates, num_ranges, ranges, take


class IndexedRows(Protocol):
    """Tables of rows, each sorted by id, with columns id, request, file, row and rows."""

    @property
    def tables(self) -> list[Table]: ...


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The expected rows.

    Attributes:
        index: the input's.
        allowed: by number of a file in the index: how many of its first rows are asked for.
        starts: by number of a file: the place of its first row in the whole input.
        default_rows: output rows of ids that the input does not have, whose rows another input left.
        shard: of whose ids the rows are; None for those of all.
    """

    index: IndexedRows
    allowed: np.ndarray
    starts: np.ndarray
    default_rows: int
    shard: JobShard | None = None

    def __len__(self) -> int:
        """Return the number of ids. Those of a shard are counted."""
        if self.shard is None:
            return self.num_places
        return sum(int(np.count_nonzero(self._is_asked(table))) for table in self.index.tables)

    @property
    def num_places(self) -> int:
        """Return the number of rows of the whole input, those of other shards included."""
        return int(self.allowed.sum())

    def of_shard(self, shard: JobShard) -> ExpectedRows:
        """Return the rows of one shard of the job."""
        return replace(self, shard=shard)

    def by_range(self, parts: int) -> Iterator[Table]:
        """Yield the rows of each range of ids: columns id, place (in the whole input) and rows, sorted by id."""
        for tables in ranges(self.index.tables, parts):
            yield _joined([self._placed(table) for table in tables])

    def contains(self, ids: Digests) -> np.ndarray:
        """Return for each id whether the input asks for it."""
        return self._rows(ids) > 0

    def duplicates(self) -> Digests:
        """Return the ids that occur more than once, sorted."""
        parts = num_ranges(self.num_places)
        return np.concatenate([EMPTY, *(duplicates(rows["id"]) for rows in self.by_range(parts))])

    def _placed(self, table: Table) -> Table:
        kept = take(table, self._is_asked(table))
        place = self.starts[kept["file"]] + kept["row"]
        return {"id": kept["id"], "place": place, "rows": kept["rows"]}

    def _is_asked(self, table: Table) -> np.ndarray:
        is_asked = table["row"] < self.allowed[table["file"]]
        return is_asked if self.shard is None else is_asked & self.shard.holds(table["id"])

    def _rows(self, ids: Digests) -> np.ndarray:
        """Return the number of rows of each id, 0 if the input does not ask for it."""
        counts = np.zeros(len(ids), np.int64)
        for table in self.index.tables if len(ids) else ():
            first, behind = (np.searchsorted(table["id"], ids, side) for side in ("left", "right"))
            for offset in range(int((behind - first).max())):  # an id also has rows that are out of date
                here = np.flatnonzero(first + offset < behind)
                found = take(table, first[here] + offset)
                is_asked = self._is_asked(found)
                counts[here[is_asked]] = found["rows"][is_asked]
        return counts


def _joined(tables: list[Table]) -> Table:
    empty = {"id": EMPTY, "place": np.empty(0, np.int64), "rows": np.empty(0, np.uint32)}
    whole = {name: np.concatenate([empty[name], *(table[name] for table in tables)]) for name in empty}
    return take(whole, np.argsort(whole["id"], kind="stable")) if len(tables) > 1 else whole
