"""Predict when a job ends and what it costs for each number of workers.

The seconds per row come from a sample decoded here (`validate --estimate`, which assumes that
workers resemble this machine), or from the costs of steps on a card (`plan`).

    counts = WorkerCounts(lambda workers: sampled, num_rows=20_000, slots=16, start_s=40.0,
                          per_worker_hour=3.9, now=now)
    print(counts_text(counts, bounds, "from 32 rows decoded here"))
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from statistics import NormalDist
from typing import Any

from eagle_ray.batch.driver.run_bounds import RunBounds
from eagle_ray.cli.estimate import SampledRow, drawn_seconds, quantile
from eagle_ray.config import JobConfig
from eagle_ray.report.cost import HOUR_S, money, priced_hours
from eagle_ray.report.text import NO_VALUE, render
from eagle_ray.scaling.work import LIKELY, SURE

MAX_PLANNED_WORKERS = 256
MOMENT = "%m-%d %H:%M"
NUM_SPEEDS = 9  # for each draw of rows


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """Predicted end and cost of a job with a given number of workers.

    Attributes:
        ends_at: time by which half of the draws have ended.
        likely_at, surely_at: times by which the shares LIKELY and SURE of the draws have ended.
        dollars: cost at surely_at; None without a price.
    """

    workers: int
    ends_at: datetime
    likely_at: datetime
    surely_at: datetime
    dollars: float | None

    def is_in_time(self, bounds: RunBounds) -> bool:
        """Return whether the job is done by its deadline in all but a few draws."""
        return bounds.finish_by is None or self.surely_at <= bounds.finish_by

    def holds(self, bounds: RunBounds) -> bool:
        """Return whether the job meets its deadline and its budget in all but a few draws."""
        is_paid = bounds.max_dollars is None or (self.dollars or 0.0) <= bounds.max_dollars
        return is_paid and self.is_in_time(bounds)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Predicts the end and the cost of a job for each number of workers.

    Attributes:
        rows_with: returns rows with the seconds that they take with this many workers.
        slots: slots of a worker.
        start_s: seconds until a worker answers its first row.
        per_worker_hour: dollars per worker and hour; None without a price.
        now: start time of the job.
        deviation: relative standard deviation of the speed, in addition to the draws of rows.
        max_workers: maximum number of workers.
    """

    rows_with: Callable[[int], Sequence[SampledRow]]
    num_rows: int
    slots: int
    start_s: float
    per_worker_hour: float | None
    now: datetime
    deviation: float = 0.0
    max_workers: int = MAX_PLANNED_WORKERS

    @property
    def largest(self) -> int:
        """Return the largest number of workers to consider: more workers than rows would be idle."""
        return max(1, min(self.max_workers, self.num_rows))

    def with_workers(self, workers: int) -> WorkerCount:
        """Predict the end and the cost of the job with this many workers."""
        rows = self.rows_with(workers)
        draws = spread(drawn_seconds(rows, self.num_rows, workers, self.slots), self.deviation)
        middle, likely, sure = (
            self.start_s + quantile(draws, share) for share in (0.5, LIKELY, SURE)
        )
        ends_at, likely_at, surely_at = (
            self.now + timedelta(seconds=seconds) for seconds in (middle, likely, sure)
        )
        dollars = None
        if self.per_worker_hour is not None:
            dollars = self.per_worker_hour * workers * sure / HOUR_S
        return WorkerCount(workers, ends_at, likely_at, surely_at, dollars)

    def cheapest(self, bounds: RunBounds) -> WorkerCount | None:
        """Return the prediction for the fewest workers that meet the deadline, or None if it exceeds the budget.

        More workers end earlier and cost more, since each of them has to start.
        """
        counts = range(1, self.largest + 1)
        place = bisect_left(counts, True, key=lambda n: self.with_workers(n).is_in_time(bounds))
        if place == len(counts):
            return None
        count = self.with_workers(counts[place])
        return count if count.holds(bounds) else None


def spread(draws: Sequence[float], deviation: float) -> list[float]:
    """Return the draws multiplied by log-normal factors with this relative standard deviation, sorted."""
    if not deviation:
        return list(draws)
    normal = NormalDist(0.0, deviation)
    shares = ((i + 0.5) / NUM_SPEEDS for i in range(NUM_SPEEDS))
    factors = [math.exp(normal.inv_cdf(share)) for share in shares]
    return sorted(factor * draw for factor in factors for draw in draws)


def counts_text(counts: WorkerCounts, bounds: RunBounds, source: str) -> str:
    """Return a table of some numbers of workers. A star marks the cheapest that meets the bounds.

    Args:
        source: text on the origin of the numbers.
    """
    best = counts.cheapest(bounds)
    numbers = {1 << i for i in range(counts.largest.bit_length())}
    if best is not None:
        numbers.add(best.workers)
    shown = [counts.with_workers(number) for number in sorted(numbers)]
    header = ["workers", "ends", f"{LIKELY:.0%}", f"{SURE:.0%}", f"dollars, {SURE:.0%}"]
    table = render(header, [_line(count, count == best) for count in shown])
    if best is None:
        end = f"no number of workers up to {counts.largest} holds"
    else:
        end = f"* {best.workers} workers hold" if best.workers > 1 else "* 1 worker holds"
    return f"{table}\n{end}{bounds_text(bounds)}; {source}"


def _line(count: WorkerCount, is_best: bool) -> list[str]:
    moments = (count.ends_at, count.likely_at, count.surely_at)
    return [
        f"{'* ' if is_best else ''}{count.workers}",
        *(moment.astimezone().strftime(MOMENT) for moment in moments),
        NO_VALUE if count.dollars is None else money(count.dollars),
    ]


def bounds_text(bounds: RunBounds) -> str:
    """Return the bounds as the end of a sentence."""
    parts = []
    if bounds.finish_by is not None:
        parts.append(f" until {bounds.finish_by.astimezone().strftime(f'{MOMENT} %Z')}")
    if bounds.max_dollars is not None:
        parts.append(f" for at most {money(bounds.max_dollars)}")
    return "".join(parts)


def counts_of(estimate: Mapping[str, Any], config: JobConfig) -> str:
    """Return the table for an estimate of a job, with the bounds in its configuration."""
    now = datetime.now(timezone.utc)
    prices = config.execution.prices
    per_worker_hour = None
    if prices is not None:
        per_worker_hour = prices.on_demand * priced_hours(HOUR_S, estimate["gpus_per_worker"])
    sampled = [SampledRow(slot_s) for slot_s in estimate["slot_s"]]
    counts = WorkerCounts(
        rows_with=lambda workers: sampled,
        num_rows=estimate["input_rows"],
        slots=estimate["slots"],
        start_s=estimate["start_s"],
        per_worker_hour=per_worker_hour,
        now=now,
    )
    source = (
        f"from {estimate['sampled_rows']} rows decoded here, as if by more workers like this one"
    )
    return counts_text(counts, RunBounds.of(config.execution, now), source)
