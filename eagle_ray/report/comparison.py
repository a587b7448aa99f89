"""Compare two runs: identical outputs of the rows that both have, the numbers of both by group, and the speed-up.

    side_by_side(read_a, read_b, by="category").identical          # 479
    speed_ups(read_run, read_baseline, by="category")["code"]
    # SpeedUp(ratio=1.46, interval=(1.31, 1.62), num_pairs=8)

A speed-up is the ratio of decode speeds on shared rows. Rows are paired by key, so a prompt that is
slow in both runs does not widen its 95 % interval. The interval covers the variance between rows.
It does not cover other load on the machine during one of the runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eagle_ray.report.intervals import t_quantile
from eagle_ray.report.summary import ReadColumns, RunStats, as_text, sum_groups, summarise

Key = tuple[str, int]  # id_of_turn, sample_index
Output = list[int] | None  # token ids; None for an error row
OUTPUT_COLUMNS = ["request_id", "turn_index", "sample_index", "status", "output_token_ids"]

# 92 % of 300 simulated intervals contained the true ratio with 8 pairs, 82 % with 4 pairs.
MIN_PAIRS = 8
MAX_BLOCKS = 200  # more pairs are first summed in blocks, which bounds time and memory
COMPARISON_RESAMPLES = 4000
SPEED_COLUMNS = [
    "request_id",
    "turn_index",
    "sample_index",
    "status",
    "completion_tokens",
    "decode_s",
]
TOTAL = None  # the group of all pairs
Pair = tuple[float, float, float, float]
"""Tokens and seconds of the side that is compared, then tokens and seconds of the other side."""


def outputs(read: ReadColumns) -> dict[Key, Output]:
    """Return the output token ids of each row by its key. Raises ValueError if the run stored no token ids."""
    by_key: dict[Key, Output] = {}
    for table in read(OUTPUT_COLUMNS):
        for row in table.to_pylist():
            token_ids = row["output_token_ids"]
            if row["status"] == "ok" and token_ids is None:
                raise ValueError(
                    "no token ids were stored (output.store_token_ids), so outputs cannot be compared"
                )
            id = id_of_turn(row["request_id"], row["turn_index"])
            by_key[id, row["sample_index"]] = token_ids
    return by_key


def id_of_turn(request_id: str, turn_index: int | None) -> str:
    """Return the id of a row's request, with the turn appended for later turns of a conversation."""
    return f"{request_id}, turn {turn_index}" if turn_index else request_id


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Ratio of the decode speeds of two sides, in tokens per second.

    Attributes:
        ratio: ratio of the pooled speeds; None without pairs.
        interval: two-sided 95 % interval; None for fewer than MIN_PAIRS pairs.
        num_pairs: number of rows, or rounds, that both sides have.
    """

    ratio: float | None
    interval: tuple[float, float] | None
    num_pairs: int

    @classmethod
    def of(cls, pairs: list[Pair]) -> SpeedUp:
        """Compute the ratio and its interval."""
        if not pairs:
            return cls(None, None, 0)
        counts = np.array(pairs, float)
        ratio = float(_ratios(counts.sum(0)))
        return cls(ratio, _ratio_interval(counts), len(pairs))

    def as_json(self) -> dict[str, float | list[float] | int | None]:
        return {
            "speed_up": self.ratio,
            "speed_up_interval": list(self.interval) if self.interval else None,
            "speed_up_pairs": self.num_pairs,
        }


def speed_ups(run: ReadColumns, baseline: ReadColumns, by: str | None) -> dict[str | None, SpeedUp]:
    """Return the speed-up of `run` over `baseline` for each value of the column `by` of `run`.

    The entry TOTAL is for all rows.
    """
    others = _decode_speeds(baseline, None)
    pairs: dict[str | None, list[Pair]] = defaultdict(list)
    for key, (group, tokens, seconds) in _decode_speeds(run, by).items():
        if key in others:
            _, plain_tokens, plain_seconds = others[key]
            pairs[group].append((tokens, seconds, plain_tokens, plain_seconds))

    by_group: dict[str | None, SpeedUp] = {}
    if by:
        for name, of_group in pairs.items():
            by_group[name] = SpeedUp.of(of_group)
    all_pairs = [pair for of_group in pairs.values() for pair in of_group]
    by_group[TOTAL] = SpeedUp.of(all_pairs)
    return by_group


def _decode_speeds(read: ReadColumns, by: str | None) -> dict[Key, tuple[str, float, float]]:
    """Return the group of each row that decoded, its tokens after the first, and its seconds of decoding."""
    by_key = {}
    columns = SPEED_COLUMNS + ([by] if by else [])
    for table in read(columns):
        is_ok = pc.equal(table["status"], "ok")
        has_time = pc.greater(table["decode_s"], 0)
        has_tokens = pc.greater(table["completion_tokens"], 1)
        has_decoded = pc.and_(has_time, has_tokens)
        decoded = table.filter(pc.and_(is_ok, has_decoded))

        groups = [""] * len(decoded)
        if by:
            groups = as_text(decoded[by]).to_pylist()
        rows = decoded.select(SPEED_COLUMNS).to_pylist()
        for row, group in zip(rows, groups, strict=True):
            id = id_of_turn(row["request_id"], row["turn_index"])
            key = (id, row["sample_index"])
            num_tokens = row["completion_tokens"] - 1
            by_key[key] = (group, num_tokens, row["decode_s"])
    return by_key


def _ratio_interval(counts: np.ndarray) -> tuple[float, float] | None:
    """Return the bootstrap interval over pairs, with percentiles expanded for few pairs.

    The expansion is from Hesterberg 2015, section 4.1.
    """
    num_pairs = len(counts)
    if num_pairs < MIN_PAIRS:
        return None

    # Many pairs are summed in blocks, in a random order, as neighbours may be alike.
    num = min(num_pairs, MAX_BLOCKS)
    order = np.random.default_rng(0).permutation(num_pairs)
    starts = np.arange(num) * num_pairs // num
    blocks = np.add.reduceat(counts[order], starts)

    drawn = np.random.default_rng(1).integers(num, size=(COMPARISON_RESAMPLES, num))
    ratios = _ratios(blocks[drawn].sum(1))

    # The percentile is the one that the normal distribution has at Student's expanded quantile.
    expansion = math.sqrt(num / (num - 1))
    share = NormalDist().cdf(-expansion * t_quantile(0.975, num - 1))
    low, high = np.quantile(ratios, [share, 1 - share])
    return float(low), float(high)


def _ratios(sums: np.ndarray) -> np.ndarray:
    """Return the ratios of speeds. The last dimension of `sums` is a Pair."""
    tokens, seconds, other_tokens, other_seconds = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (tokens / seconds) / (other_tokens / other_seconds)
    return np.nan_to_num(ratios, nan=1.0, posinf=math.inf)


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Row with different outputs in two runs.

    Attributes:
        key: request_id and sample_index.
        position: index of the first token that differs; None if the row is an error row in one of
            the runs.
    """

    key: Key
    position: int | None

    @classmethod
    def of(cls, key: Key, a: Output, b: Output) -> OutputDifference:
        if a is None or b is None:
            return cls(key, None)
        tokens = enumerate(zip_longest(a, b))
        position = next(i for i, (x, y) in tokens if x != y)
        return cls(key, position)

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
        speed_ups: speed-up of the second run over the first on shared rows, by group and under
            TOTAL for all rows.
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
        total_a = sum_groups({name: a for name, (a, _) in self.groups.items()})
        total_b = sum_groups({name: b for name, (_, b) in self.groups.items()})
        groups = {}
        if self.by:
            for name, (a, b) in self.groups.items():
                groups[name] = _pair(a, b) | self._speed_up(name)

        num_a, num_b, num_both = self.rows
        return {
            "rows": {"a": num_a, "b": num_b, "both": num_both},
            "identical": self.identical,
            "differing": [difference.as_json() for difference in self.differences],
            "by": self.by,
            "total": _pair(total_a, total_b) | self.speed_ups[TOTAL].as_json(),
            "groups": groups,
        }

    def _speed_up(self, name: str) -> dict[str, Any]:
        return self.speed_ups.get(name, SpeedUp.of([])).as_json()


def side_by_side(read_a: ReadColumns, read_b: ReadColumns, by: str | None) -> SideBySide:
    """Compare two runs. Raises ValueError if a run stored no token ids.

    Args:
        read_a, read_b: readers of the runs' columns.
        by: a column of both runs that defines the groups, or None.
    """
    a = outputs(read_a)
    b = outputs(read_b)
    both = sorted(a.keys() & b.keys())
    differences = []
    for key in both:
        if a[key] != b[key]:
            differences.append(OutputDifference.of(key, a[key], b[key]))

    counts_a = summarise(read_a, by)
    counts_b = summarise(read_b, by)
    groups = {}
    for name in sorted(counts_a.keys() | counts_b.keys()):
        own_a = counts_a.get(name, RunStats())
        own_b = counts_b.get(name, RunStats())
        groups[name] = (own_a, own_b)

    return SideBySide(
        rows=(len(a), len(b), len(both)),
        differences=differences,
        by=by,
        groups=groups,
        speed_ups=speed_ups(read_b, read_a, by),
    )


def _pair(a: RunStats, b: RunStats) -> dict[str, dict[str, Any]]:
    return {"a": a.as_json(), "b": b.as_json()}
