"""Speed-up of one run over another: the ratio of decode speeds on their shared rows, and its 95 % interval.

Rows are paired by key, so a prompt that is slow in both runs does not widen the interval. The interval covers the
variance between rows. It does not cover other load on the machine during one of the runs.

    speed_ups(read_run, read_baseline, by="category")["code"]
    # SpeedUp(ratio=1.46, interval=(1.31, 1.62), num_pairs=8)
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pyarrow.compute as pc

from eagle_ray.report.intervals import t_quantile
from eagle_ray.report.outputs import Key, id_of_turn
from eagle_ray.report.summary import ReadColumns, as_text

FEWEST_PAIRS = 8  # 92 % of 300 simulated intervals contained the true ratio with 8 pairs, 82 % with 4 pairs
MOST_BLOCKS = 200  # more pairs are first summed in blocks, which bounds time and memory
RESAMPLES = 4000
COLUMNS = ["request_id", "turn_index", "sample_index", "status", "completion_tokens", "decode_s"]
TOTAL = None  # the group of all pairs
Pair = tuple[float, float, float, float]  # tokens and seconds of the faster side, tokens and seconds of the other


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Ratio of the decode speeds of two sides, in tokens per second.

    Attributes:
        ratio: ratio of the pooled speeds; None without pairs.
        interval: two-sided 95 % interval; None for fewer than FEWEST_PAIRS pairs.
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
        return cls(float(_ratios(counts.sum(0))), _interval(counts), len(pairs))

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
    others = _speeds(baseline, None)
    pairs: dict[str | None, list[Pair]] = defaultdict(list)
    for key, (group, tokens, seconds) in _speeds(run, by).items():
        if key in others:
            _, plain_tokens, plain_seconds = others[key]
            pairs[group].append((tokens, seconds, plain_tokens, plain_seconds))
    found = {group: SpeedUp.of(of_group) for group, of_group in pairs.items() if by}
    return found | {TOTAL: SpeedUp.of([pair for of_group in pairs.values() for pair in of_group])}


def _speeds(read: ReadColumns, by: str | None) -> dict[Key, tuple[str, float, float]]:
    """Return the group of each row that decoded, its tokens after the first, and its seconds of decoding."""
    found = {}
    for table in read(COLUMNS + ([by] if by else [])):
        has_decoded = pc.and_(pc.greater(table["decode_s"], 0), pc.greater(table["completion_tokens"], 1))
        decoded = table.filter(pc.and_(pc.equal(table["status"], "ok"), has_decoded))
        groups = as_text(decoded[by]).to_pylist() if by else [""] * len(decoded)
        ids, turns, samples, _, tokens, seconds = (decoded[name].to_pylist() for name in COLUMNS)
        for id, turn, sample, group, count, spent in zip(ids, turns, samples, groups, tokens, seconds, strict=True):
            found[id_of_turn(id, turn), sample] = (group, count - 1, spent)
    return found


def _interval(counts: np.ndarray) -> tuple[float, float] | None:
    """Return the bootstrap interval over pairs, with percentiles expanded for few pairs.

    The expansion is from Hesterberg 2015, section 4.1.
    """
    if len(counts) < FEWEST_PAIRS:
        return None
    num = min(len(counts), MOST_BLOCKS)
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
