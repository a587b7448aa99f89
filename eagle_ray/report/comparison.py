"""Comparison of a run with its baseline over equal inputs: both speeds, and the rows with identical tokens.

>>> compare(read_run, read_baseline, by="category").identical
48
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.report.outputs import Key, outputs
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
