"""Two runs side by side: the rows that both have, whether their outputs are the same, and both runs' numbers by group.

Reads the columns of both.

    >>> side_by_side(read_a, read_b, by="category").identical
    479
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eagle_ray.report.outputs import Key, Output, outputs
from eagle_ray.report.speed_up import TOTAL, SpeedUp, speed_ups
from eagle_ray.report.summary import ReadColumns, RunStats, summarise, total


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Where one row's two outputs part. position: the first token that differs, from 0; None beside an error row."""

    key: Key
    position: int | None

    @classmethod
    def of(cls, key: Key, a: Output, b: Output) -> OutputDifference:
        if a is None or b is None:
            return cls(key, None)
        return cls(key, next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y))

    def as_json(self) -> dict[str, Any]:
        return {"request_id": self.key[0], "sample_index": self.key[1], "position": self.position}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two runs over shared rows.

    Attributes:
        rows: of the first run, of the second and of both.
        groups: the first run's counts and the second's, by group.
        speed_ups: of the second run over the first on the rows that both have, by group and under TOTAL for all.
    """

    rows: tuple[int, int, int]
    differences: list[OutputDifference]
    by: str | None
    groups: dict[str, tuple[RunStats, RunStats]]
    speed_ups: dict[str | None, SpeedUp]

    @property
    def identical(self) -> int:
        return self.rows[2] - len(self.differences)

    def as_json(self) -> dict[str, Any]:
        """Every number of the table, with each run's counts and ratios."""
        whole = [total({name: pair[side] for name, pair in self.groups.items()}) for side in (0, 1)]
        named = self.groups if self.by else {}
        return {
            "rows": dict(zip(("a", "b", "both"), self.rows, strict=True)),
            "identical": self.identical,
            "differing": [difference.as_json() for difference in self.differences],
            "by": self.by,
            "total": _pair(*whole) | self.speed_ups[TOTAL].as_json(),
            "groups": {name: _pair(*pair) | self._speed_up(name) for name, pair in named.items()},
        }

    def _speed_up(self, name: str) -> dict[str, Any]:
        return self.speed_ups.get(name, SpeedUp.of([])).as_json()


def side_by_side(read_a: ReadColumns, read_b: ReadColumns, by: str | None) -> SideBySide:
    """by: a column that both runs carry, or None. Raises ValueError where a run stored no token ids."""
    a, b = outputs(read_a), outputs(read_b)
    both = sorted(a.keys() & b.keys())
    differences = [OutputDifference.of(key, a[key], b[key]) for key in both if a[key] != b[key]]
    counts_a, counts_b = summarise(read_a, by), summarise(read_b, by)
    names = sorted(counts_a.keys() | counts_b.keys())
    groups = {name: (counts_a.get(name, RunStats()), counts_b.get(name, RunStats())) for name in names}
    return SideBySide((len(a), len(b), len(both)), differences, by, groups, speed_ups(read_b, read_a, by))


def _pair(a: RunStats, b: RunStats) -> dict[str, dict[str, Any]]:
    return {"a": a.as_json(), "b": b.as_json()}
