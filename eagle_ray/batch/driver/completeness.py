"""Compare the rows that the input asks for with the rows in the files, a range of ids at a time.

An id has a row for each sample of each turn. They are in one file once they are done. Memory holds one range, and a
byte for each row of the input, which is in a temporary file if there are many.

    found = count_done(plan.rows, OutputIndex.read(run.data, run.output / INDEX))
    found.num_rows - found.num_done_rows                                               # 96
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from eagle_ray.batch.driver.input_index import InputIndex
from eagle_ray.runs.layout import JobShard
from eagle_ray.runs.output_index import OutputIndex, excess_in
from eagle_ray.runs.row_index import EMPTY, Digests, Table, duplicates, index_of, num_ranges, ranges, take
from eagle_ray.storage.path import StoragePath

MAX_ROWS_IN_MEMORY = 1 << 24
MISSING_SHOWN = 4  # ids that are kept for a message


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows that the input asks for, read from its index a range of ids at a time.

    Attributes:
        index: the input's.
        allowed: by number of a file in the index: how many of its first rows are asked for.
        starts: by number of a file: the place of its first row in the whole input.
        default_rows: output rows of ids that the input does not have, whose rows another input left.
        shard: only its ids are asked for; None for all ids.
    """

    index: InputIndex
    allowed: np.ndarray
    starts: np.ndarray
    default_rows: int
    shard: JobShard | None = None

    def __len__(self) -> int:
        """Return the number of ids. It takes time to count those of a shard."""
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
        found = np.zeros(len(ids), bool)
        for table in self.index.tables if len(ids) else ():
            first, behind = (np.searchsorted(table["id"], ids, side) for side in ("left", "right"))
            for offset in range(int((behind - first).max())):  # an id also has rows that are out of date
                here = np.flatnonzero(first + offset < behind)
                found[here] |= self._is_asked(take(table, first[here] + offset))
        return found

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


def _joined(tables: list[Table]) -> Table:
    empty = {"id": EMPTY, "place": np.empty(0, np.int64), "rows": np.empty(0, np.uint32)}
    whole = {name: np.concatenate([empty[name], *(table[name] for table in tables)]) for name in empty}
    return take(whole, np.argsort(whole["id"], kind="stable")) if len(tables) > 1 else whole


@dataclass(frozen=True, slots=True)
class Completeness:
    """What the files hold of the expected rows.

    Attributes:
        done: for each row of the input, in its order, whether its output rows are all in one file. Rows of other shards
            of the job count as done.
        num_rows: output rows that the input asks for.
        num_done_rows: those of them that are done.
        num_missing: ids that are not done.
        missing: a few of those.
        excess: the ids to remove from each file so that every id is in one file.
        num_others: ids in the files that are not expected, as after a run with another input.
    """

    done: np.ndarray
    num_rows: int
    num_done_rows: int
    num_missing: int
    missing: Digests
    excess: Mapping[StoragePath, Digests]
    num_others: int


def count_done(expected: ExpectedRows, output: OutputIndex) -> Completeness:
    """Return what the files hold, in one pass over both indexes."""
    done = _flags(expected.num_places, fill=expected.shard is not None)
    num_rows = num_done_rows = num_missing = num_others = 0
    missing = EMPTY
    excess: dict[StoragePath, list[Digests]] = {}
    parts = num_ranges(expected.num_places + output.num_entries)
    for asked, found in zip(expected.by_range(parts), output.by_range(parts), strict=True):
        places = index_of(found["id"], asked["id"])
        wanted = np.append(asked["rows"], np.uint32(expected.default_rows))[places]  # -1, of no place, is the last
        is_complete = found["rows"] == wanted
        is_done = np.zeros(len(asked["id"]), bool)
        is_done[places[is_complete & (places >= 0)]] = True
        done[asked["place"]] = is_done
        num_others += len(np.unique(found["id"][places < 0]))
        num_rows += int(asked["rows"].sum())
        num_done_rows += int(asked["rows"][is_done].sum())
        left = asked["id"][~is_done]
        num_missing += len(left)
        missing = np.concatenate([missing, left[: MISSING_SHOWN - len(missing)]])
        extra = excess_in(found, is_complete)
        for rank in np.unique(extra["file"]):
            excess.setdefault(output.files[rank], []).append(extra["id"][extra["file"] == rank])
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
