"""RunBounds: the deadline and the budget of a run, and the forecast of whether it keeps them.

    bounds = RunBounds.of(config.execution, now=datetime.now(timezone.utc))
    forecast = bounds.forecast(Pace(seconds_left=5400, drain_s=20, worker_s=7200, ...), now)
    forecast.is_late, bounds.reason_to_stop(forecast)

A run that reaches a bound starts no further row, and rows in engines are finished. So it stops
early enough for the seconds that these rows still need (`drain_s`) and for their price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from eagle_ray.config.deadline import deadline_of
from eagle_ray.config.job import ExecutionConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.report.cost import Prices, duration, money

# Mean seconds of a row, after which the rows in engines are taken to be done. The last of many rows
# takes longer than the mean.
DRAIN_ROWS = 2.0
# Keys of `execution`, and reasons of a stop.
DEADLINE = "finish_by"
DOLLARS = "max_dollars"
# Kinds of warnings.
LATE = "late"
OVER_BUDGET = "over"
NEARLY_SPENT = "nearly_spent"
NEARLY = 0.9  # share of the dollars


@dataclass(frozen=True, slots=True)
class Pace:
    """Current speed of a run and the work that is left.

    Attributes:
        seconds_left: seconds until all rows are done; None if no row is done yet.
        drain_s: seconds until the rows in the engines are done.
        worker_s: seconds of all workers so far, over all attempts; None if those of an earlier
            attempt are unknown.
        num_workers: workers that cost money now.
        gpus_per_worker: GPUs of a worker; 0 on CPUs.
        spot_s, num_spot: shares of worker_s and num_workers on spot nodes.
        likely_left, surely_left: seconds within which all rows are done with a probability of 80
            and 95 %; None if unknown.
    """

    seconds_left: float | None
    drain_s: float
    worker_s: float | None
    num_workers: int
    gpus_per_worker: float
    spot_s: float = 0.0
    num_spot: int = 0
    likely_left: float | None = None
    surely_left: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted end and cost of a run.

    Attributes:
        ends_at: time when all rows are done; None if no row is done yet.
        likely_at, surely_at: times by which all rows are done with a probability of 80 and 95 %;
            None if unknown.
        drained_at: time when the rows in the engines are done.
        spent: dollars so far; None without a price.
        drained: dollars spent once the rows in the engines are done.
        dollars: dollars spent once all rows are done; None if no row is done yet.
    """

    finish_by: datetime | None
    max_dollars: float | None
    ends_at: datetime | None
    drained_at: datetime
    spent: float | None
    drained: float | None
    dollars: float | None
    likely_at: datetime | None = None
    surely_at: datetime | None = None

    @property
    def is_late(self) -> bool:
        """Return whether the last row is expected after the deadline."""
        return self.finish_by is not None and bool(self.ends_at and self.ends_at > self.finish_by)

    @property
    def is_over(self) -> bool:
        """Return whether all rows are expected to cost more than max_dollars."""
        return self.max_dollars is not None and (self.dollars or 0.0) > self.max_dollars

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as it stands in ``_progress.json``."""
        moments = {
            "finish_by": self.finish_by,
            "ends_at": self.ends_at,
            "likely_at": self.likely_at,
            "surely_at": self.surely_at,
        }
        texts = {
            name: moment and moment.isoformat(timespec="seconds")
            for name, moment in moments.items()
        }
        return texts | {
            "max_dollars": self.max_dollars,
            "spent": self.spent,
            "dollars": self.dollars,
        }


@dataclass(frozen=True, slots=True)
class RunBounds:
    """Deadline and budget of a run.

    Attributes:
        finish_by: the deadline; None for none.
        max_dollars: budget over all attempts; None for no limit.
        price_per_hour: dollars per hour for a GPU, or for a worker without one.
        spot_price: price per hour on spot nodes; None if it does not differ.
        stops_if_late: whether a run that would be late stops at its deadline.
    """

    finish_by: datetime | None = None
    max_dollars: float | None = None
    price_per_hour: float | None = None
    stops_if_late: bool = False
    spot_price: float | None = None

    @classmethod
    def of(cls, execution: ExecutionConfig, now: datetime) -> RunBounds:
        """Return the bounds of a run whose command starts now."""
        text = execution.finish_by
        prices = execution.prices
        return cls(
            None if text is None else deadline_of(text, now),
            execution.max_dollars,
            None if prices is None else prices.on_demand,
            execution.on_late == "stop",
            None if prices is None else prices.spot,
        )

    def check_start(
        self, usage: Mapping[str, float] | None, now: datetime, is_known: bool = True
    ) -> None:
        """Raise ConfigError if the deadline is past, or if the budget is spent or earlier spending is unknown.

        Args:
            usage: seconds of workers in earlier attempts; None for none.
            is_known: whether the seconds of earlier attempts are on record.
        """
        if self.finish_by is not None and self.finish_by <= now:
            moment = self.finish_by.isoformat(timespec="minutes")
            raise ConfigError(f"execution.{DEADLINE}: {moment} is past. Set a later one, or null")
        if self.max_dollars is None:
            return
        if not is_known:
            raise ConfigError(
                f"execution.{DOLLARS}: what earlier attempts have spent is not known (_progress.json is damaged or of "
                "an older release). Set it to null"
            )
        if usage is None:
            return
        spent = self._dollars(usage["worker_s"], usage.get("spot_s", 0.0), usage["gpus_per_worker"])
        if spent is not None and spent >= self.max_dollars:
            raise ConfigError(
                f"execution.{DOLLARS}: {money(self.max_dollars)} is not more than the {money(spent)} that earlier "
                "attempts have spent. Set more, or null"
            )

    def forecast(self, pace: Pace, now: datetime) -> Forecast:
        """Predict the end and the cost of the run at its current pace."""
        spent = None
        if pace.worker_s is not None:
            spent = self._dollars(pace.worker_s, pace.spot_s, pace.gpus_per_worker)
        per_second = self._dollars(pace.num_workers, pace.num_spot, pace.gpus_per_worker) or 0.0
        ends_at = dollars = None
        if pace.seconds_left is not None:
            ends_at = now + timedelta(seconds=pace.seconds_left)
            if spent is not None:
                dollars = spent + per_second * pace.seconds_left
        return Forecast(
            finish_by=self.finish_by,
            max_dollars=self.max_dollars,
            ends_at=ends_at,
            drained_at=now + timedelta(seconds=pace.drain_s),
            spent=spent,
            drained=None if spent is None else spent + per_second * pace.drain_s,
            dollars=dollars,
            likely_at=_after(now, pace.likely_left),
            surely_at=_after(now, pace.surely_left),
        )

    def reason_to_stop(self, forecast: Forecast) -> str | None:
        """Return DOLLARS or DEADLINE if no further row may be started, else None."""
        if self.max_dollars is not None and (forecast.drained or 0.0) >= self.max_dollars:
            return DOLLARS
        if (
            self.stops_if_late
            and self.finish_by is not None
            and forecast.drained_at >= self.finish_by
        ):
            return DEADLINE
        return None

    def warnings(self, forecast: Forecast) -> dict[str, str]:
        """Return a log line for each bound that will be missed or is nearly reached, by the kind of warning."""
        lines = {}
        if forecast.is_late and forecast.ends_at is not None and self.finish_by is not None:
            late = duration((forecast.ends_at - self.finish_by).total_seconds())
            then = "no row begins once the deadline is near" if self.stops_if_late else "it goes on"
            lines[LATE] = (
                f"late: the last row is expected {late} after execution.{DEADLINE}; {then}. More workers "
                "(execution.actors) would help"
            )
        if forecast.is_over and self.max_dollars is not None:
            lines[OVER_BUDGET] = (
                f"all rows are expected to cost {money(forecast.dollars or 0.0)}, and execution.{DOLLARS} is "
                f"{money(self.max_dollars)}: no row begins once that is near"
            )
        spent = forecast.spent or 0.0
        if self.max_dollars is not None and spent >= NEARLY * self.max_dollars:
            lines[NEARLY_SPENT] = (
                f"{money(spent)} are spent, and execution.{DOLLARS} is {money(self.max_dollars)}"
            )
        return lines

    def _dollars(self, worker_s: float, spot_s: float, gpus_per_worker: float) -> float | None:
        if self.price_per_hour is None:
            return None
        spot_price = self.price_per_hour if self.spot_price is None else self.spot_price
        return Prices(self.price_per_hour, spot_price).dollars(worker_s, spot_s, gpus_per_worker)


def _after(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


NO_BOUNDS = RunBounds()
