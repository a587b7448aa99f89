"""Compare two runs: identical outputs of the rows that both have, and the numbers of both by group.

compare(read_run, read_baseline, by="category").identical      # 48: a run with its plain baseline, equal inputs
side_by_side(read_a, read_b, by="category").identical          # 479: any two runs
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eagle_ray.report.outputs import Key, Output, outputs
from eagle_ray.report.speed_up import TOTAL, SpeedUp, speed_ups
from eagle_ray.report.summary import ReadColumns, RunStats, summarise, total


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a run with its baseline.

    Attributes:
        groups: counts of the run and of the baseline, by group.
        speed_ups: speed-up of the run over the baseline, by group and under TOTAL for all rows.
        identical: number of rows with equal output ids.
        differing: rows with different output ids.
    """

    groups: dict[str, tuple[RunStats, RunStats]]
    speed_ups: dict[str | None, SpeedUp]
    identical: int
    differing: list[Key]

    def as_json(self) -> dict[str, Any]:
        """Return both decode speeds in tokens per second and the speed-up with its interval, per group and in total."""
        whole = tuple(total({str(i): pair[side] for i, pair in enumerate(self.groups.values())}) for side in (0, 1))
        return {
            "identical": self.identical,
            "differing": [list(key) for key in self.differing],
            "total": _speeds(*whole) | self.speed_ups[TOTAL].as_json(),
            "groups": {name: _speeds(*pair) | self._speed_up(name) for name, pair in self.groups.items()},
        }

    def _speed_up(self, name: str) -> dict[str, Any]:
        return self.speed_ups.get(name, SpeedUp.of([])).as_json()


def compare(run: ReadColumns, baseline: ReadColumns, by: str) -> Comparison:
    """Compare a run with its baseline, grouped by the values of the column `by`.

    Rows that only one of them has count as differing. Raises ValueError if either stored no token ids.
    """
    ours, theirs = outputs(run), outputs(baseline)
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key, ()) != theirs.get(key, ()))
    counts, plain = summarise(run, by), summarise(baseline, by)
    groups = {name: (group, plain.get(name, RunStats())) for name, group in counts.items()}
    return Comparison(groups, speed_ups(run, baseline, by), len(ours) - len(differing), differing)


def _speeds(run: RunStats, baseline: RunStats) -> dict[str, Any]:
    return {
        "rows": run.rows,
        "output_tokens": run.output_tokens,
        "mean_acceptance_length": run.mean_acceptance_length,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "baseline_decode_tokens_per_s": baseline.decode_tokens_per_s,
    }


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Row with different outputs in two runs.

    Attributes:
        key: request_id and sample_index.
        position: index of the first token that differs; None if the row is an error row in one of the runs.
    """

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
    """Comparison of two runs.

    Attributes:
        rows: number of rows in the first run, in the second run, and in both.
        differences: shared rows with different outputs.
        by: column of the groups, or None.
        groups: counts of the first and of the second run, by group.
        speed_ups: speed-up of the second run over the first on shared rows, by group and under TOTAL for all rows.
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
        """Return every number of the table, and the counts and ratios of each run."""
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
    """Compare two runs. Raises ValueError if a run stored no token ids.

    by: a column of both runs that defines the groups, or None.
    """
    a, b = outputs(read_a), outputs(read_b)
    both = sorted(a.keys() & b.keys())
    differences = [OutputDifference.of(key, a[key], b[key]) for key in both if a[key] != b[key]]
    counts_a, counts_b = summarise(read_a, by), summarise(read_b, by)
    names = sorted(counts_a.keys() | counts_b.keys())
    groups = {name: (counts_a.get(name, RunStats()), counts_b.get(name, RunStats())) for name in names}
    return SideBySide((len(a), len(b), len(both)), differences, by, groups, speed_ups(read_b, read_a, by))


def _pair(a: RunStats, b: RunStats) -> dict[str, dict[str, Any]]:
    return {"a": a.as_json(), "b": b.as_json()}
