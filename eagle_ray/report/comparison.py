"""Compare two runs: identical outputs of the rows that both have, the numbers of both by group, and the speed-up.

side_by_side(read_a, read_b, by="category").identical          # 479
speed_ups(read_run, read_baseline, by="category")["code"]      # SpeedUp(ratio=1.46, interval=(1.31, 1.62), num_pairs=8)

A speed-up is the ratio of decode speeds on shared rows. Rows are paired by key, so a prompt that is slow in both runs
does not widen its 95 % interval. The interval covers the variance between rows. It does not cover other load on the
machine during one of the runs.

Methods of drafting are compared as text, by task as in the EAGLE papers, from the JSON of the evaluation:

    T = 0: speed-up over plain decoding, tau
    method         chat        code         all
    eagle1   2.10x 2.95  2.61x 3.60  2.34x 3.21
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
from eagle_ray.report.text import ABSENT, number, render

Key = tuple[str, int]  # id_of_turn, sample_index
Output = list[int] | None  # token ids; None for an error row
OUTPUT_COLUMNS = ["request_id", "turn_index", "sample_index", "status", "output_token_ids"]

MIN_PAIRS = 8  # 92 % of 300 simulated intervals contained the true ratio with 8 pairs, 82 % with 4 pairs
MAX_BLOCKS = 200  # more pairs are first summed in blocks, which bounds time and memory
RESAMPLES = 4000
SPEED_COLUMNS = ["request_id", "turn_index", "sample_index", "status", "completion_tokens", "decode_s"]
TOTAL = None  # the group of all pairs
Pair = tuple[float, float, float, float]  # tokens and seconds of the faster side, tokens and seconds of the other
LEGEND = """\
speed-up: tokens a second over plain decoding's in the same round, prompts included; geometric mean, 95 % interval
tau: tokens per pass of the target; nodes: verified drafts per pass; accepted: share of passes, by depth 1, 2, ...
error: calibration error of the drafter's probabilities, as they were drafted and as they were used
same: outputs that are token for token plain decoding's"""


def outputs(read: ReadColumns) -> dict[Key, Output]:
    """Return the output token ids of each row. Raises ValueError if the run stored no token ids."""
    by_key: dict[Key, Output] = {}
    for table in read(OUTPUT_COLUMNS):
        for row in table.to_pylist():
            if row["status"] == "ok" and row["output_token_ids"] is None:
                raise ValueError("no token ids were stored (output.store_token_ids), so outputs cannot be compared")
            by_key[id_of_turn(row["request_id"], row["turn_index"]), row["sample_index"]] = row["output_token_ids"]
    return by_key


def id_of_turn(request_id: str, turn_index: int | None) -> str:
    """Return the request's id, and the turn with it if it is a later one of a conversation."""
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
        return cls(float(_ratios(counts.sum(0))), _ratio_interval(counts), len(pairs))

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
    by_group = {group: SpeedUp.of(of_group) for group, of_group in pairs.items() if by}
    return by_group | {TOTAL: SpeedUp.of([pair for of_group in pairs.values() for pair in of_group])}


def _decode_speeds(read: ReadColumns, by: str | None) -> dict[Key, tuple[str, float, float]]:
    """Return the group of each row that decoded, its tokens after the first, and its seconds of decoding."""
    by_key = {}
    for table in read(SPEED_COLUMNS + ([by] if by else [])):
        has_decoded = pc.and_(pc.greater(table["decode_s"], 0), pc.greater(table["completion_tokens"], 1))
        decoded = table.filter(pc.and_(pc.equal(table["status"], "ok"), has_decoded))
        groups = as_text(decoded[by]).to_pylist() if by else [""] * len(decoded)
        ids, turns, samples, _, tokens, seconds = (decoded[name].to_pylist() for name in SPEED_COLUMNS)
        for id, turn, sample, group, count, spent in zip(ids, turns, samples, groups, tokens, seconds, strict=True):
            by_key[id_of_turn(id, turn), sample] = (group, count - 1, spent)
    return by_key


def _ratio_interval(counts: np.ndarray) -> tuple[float, float] | None:
    """Return the bootstrap interval over pairs, with percentiles expanded for few pairs.

    The expansion is from Hesterberg 2015, section 4.1.
    """
    if len(counts) < MIN_PAIRS:
        return None
    num = min(len(counts), MAX_BLOCKS)
    order = np.random.default_rng(0).permutation(len(counts))
    blocks = np.add.reduceat(counts[order], np.arange(num) * len(counts) // num)

    drawn = np.random.default_rng(1).integers(num, size=(RESAMPLES, num))
    ratios = _ratios(blocks[drawn].sum(1))
    share = NormalDist().cdf(-math.sqrt(num / (num - 1)) * t_quantile(0.975, num - 1))
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
        whole = [sum_groups({name: pair[side] for name, pair in self.groups.items()}) for side in (0, 1)]
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


def evaluation_text(numbers: dict[str, Any]) -> str:
    """Return the table by task and the table of details for each temperature."""
    temperatures = dict.fromkeys(cell["temperature"] for cell in numbers["cells"])
    parts = [_about(numbers)]
    for temperature in temperatures:
        cells = [cell for cell in numbers["cells"] if cell["temperature"] == temperature]
        parts += [f"T = {temperature:g}: speed-up over plain decoding, tau\n{_by_task(cells)}", _details(cells)]

    return "\n\n".join([*parts, _legend(numbers)])


def _legend(numbers: dict[str, Any]) -> str:
    num_prompts, takes = max(cell["questions"] for cell in numbers["cells"]), numbers["interval_takes"]
    if num_prompts >= takes:
        return LEGEND
    return f"{LEGEND}\n[{ABSENT}]: an interval takes {takes} prompts, these are {num_prompts}"


def _about(numbers: dict[str, Any]) -> str:
    where = f"{numbers['device']}, threads: {numbers['threads']}, {numbers['dtype']}, torch {numbers['torch']}"
    return f"{numbers['target']}, batches of {numbers['batch']}, on {where}"


def _by_task(cells: list[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    methods = dict.fromkeys(cell["method"] for cell in cells)
    by_place = {(cell["method"], cell["task"]): cell for cell in cells}
    lines = [[method, *(_speed_and_tau(by_place[method, task]) for task in tasks)] for method in methods]
    return render(["method", *("all" if task is None else task for task in tasks)], lines)


def _speed_and_tau(cell: dict[str, Any]) -> str:
    return f"{cell['speed_up']['mean']:.2f}x {number(cell['tau'], 2)}"


def _details(cells: list[dict[str, Any]]) -> str:
    header = ["all tasks", "speed-up", "tau", "tau less that of", "nodes", "accepted", "error", "same"]
    return render(header, [_detail(cell) for cell in cells if cell["task"] is None])


def _detail(cell: dict[str, Any]) -> list[str]:
    error, accepted = cell["calibration_error"], cell["accepted_by_depth"]
    return [
        cell["method"],
        _interval(cell["speed_up"], ".2f", "x"),
        number(cell["tau"], 2),
        ABSENT if cell["tau_less"] is None else f"{_interval(cell['tau_less'], '+.2f')} {cell['tau_less']['of']}",
        number(cell["nodes_per_step"], 1),
        " ".join(f"{share:.0%}" for share in accepted) or ABSENT,
        ABSENT if error["drafted"] is None else f"{error['drafted']:.3f} {error['calibrated']:.3f}",
        _same(cell["identity"]),
    ]


def _interval(interval: dict[str, Any], form: str, unit: str = "") -> str:
    if interval["low"] is None:
        return f"{interval['mean']:{form}}{unit} [{ABSENT}]"
    return f"{interval['mean']:{form}}{unit} [{interval['low']:{form}}, {interval['high']:{form}}]"


def _same(identity: dict[str, Any]) -> str:
    """Return how many outputs are identical to plain decoding, and how many differences rounding explains."""
    differing = identity["num_compared"] - identity["num_equal"]
    same = f"{identity['num_equal']} of {identity['num_compared']}"
    edges = f", {identity['num_edges']} at a filter's edge" if identity["num_edges"] else ""
    return f"{same}, {identity['num_near_ties']} near-ties{edges}" if differing else same
