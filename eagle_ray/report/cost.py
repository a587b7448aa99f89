"""What a run cost: rows and tokens per second, and per dollar if execution.price_per_hour is set.

The price is that of one GPU for an hour, or that of one worker where workers have no GPU.

    >>> usage = {"elapsed_s": 10, "worker_s": 20, "gpus_per_worker": 1}
    >>> cost({"rows": 100, "output_tokens": 3600}, usage, price_per_hour=1.8)
    {'rows_per_s': 10.0, 'tokens_per_s': 360.0, ..., 'dollars': 0.01, 'rows_per_dollar': 10000.0, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

HOUR_S = 3600
Price = float | Mapping[str, float] | None  # of an hour, or those of `on_demand` and `spot`
USAGE = "usage"  # the key of `_progress.json` that has the time of the run and its workers
Estimate = Mapping[str, Any]
"""``_estimate.json``: seconds and dollars, each [expected, low, high], and of what."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for an hour of one GPU, or of one worker without a GPU."""

    on_demand: float
    spot: float

    @classmethod
    def of(cls, price: Price) -> Prices | None:
        """Return both prices of execution.price_per_hour, which may be one number, or None."""
        if price is None:
            return None
        if isinstance(price, Mapping):
            return cls(price["on_demand"], price["spot"])
        return cls(price, price)

    def dollars(self, worker_s: float, spot_s: float, gpus_per_worker: float) -> float:
        """Return the dollars for seconds of workers.

        Args:
            worker_s: seconds of all workers.
            spot_s: seconds of those on spot nodes.
        """
        on_demand = self.on_demand * priced_hours(worker_s - spot_s, gpus_per_worker)
        return on_demand + self.spot * priced_hours(spot_s, gpus_per_worker)


def cost(
    total: Mapping[str, Any], usage: Mapping[str, float] | None, price_per_hour: Price
) -> dict[str, Any] | None:
    """Return speeds and costs of all attempts together, or None if their time is not known.

    Args:
        total: counts of the run. Rows that a killed attempt has lost are not included, but its time
            is in `usage`.
        usage: seconds of the run and of its workers, and GPUs of a worker.
        price_per_hour: dollars per hour; None leaves the dollars out. The result has the mean price
            of an hour.
    """
    if not usage or not usage["elapsed_s"]:
        return None
    seconds = usage["elapsed_s"]
    rows = total["rows"]
    tokens = total["output_tokens"]
    hours = priced_hours(usage["worker_s"], usage["gpus_per_worker"])
    prices = Prices.of(price_per_hour)
    dollars = mean_price = None
    if prices is not None:
        dollars = prices.dollars(
            usage["worker_s"], usage.get("spot_s", 0.0), usage["gpus_per_worker"]
        )
        mean_price = dollars / hours if hours else prices.on_demand
    return {
        "rows_per_s": rows / seconds,
        "tokens_per_s": tokens / seconds,
        "elapsed_s": seconds,
        "hours": hours,
        "unit": "GPU" if usage["gpus_per_worker"] else "worker",
        "price_per_hour": mean_price,
        "dollars": dollars,
        "rows_per_dollar": rows / dollars if dollars else None,
        "tokens_per_dollar": tokens / dollars if dollars else None,
        "dollars_per_million_tokens": 1e6 * dollars / tokens if dollars and tokens else None,
    }


def priced_hours(worker_s: float, gpus_per_worker: float) -> float:
    """Return the hours that are paid for: of GPUs, or of workers without any."""
    return worker_s * (gpus_per_worker or 1) / HOUR_S


def cost_lines(spent: Mapping[str, Any] | None, estimate: Estimate | None) -> list[str]:
    """Return the cost of a run as text, next to the estimate that was made before it."""
    if not spent:
        return []
    speed = f"{spent['rows_per_s']:,.2f} rows/s, {spent['tokens_per_s']:,.0f} tokens/s"
    lines = [f"time: {duration(spent['elapsed_s'])} with loading and all attempts, {speed}"]
    if spent["dollars"] is not None:
        lines.append(
            f"cost: {money(spent['dollars'])} for {spent['hours']:.3g} {spent['unit']} hours at "
            f"{money(spent['price_per_hour'])}; {spent['rows_per_dollar']:,.0f} rows and "
            f"{spent['tokens_per_dollar']:,.0f} tokens per dollar"
        )
    if estimate:
        lines.append(f"estimate: {estimate_words(estimate)}; it took {_taken(spent)}")
    return lines


def bounds_outcome(
    work: Mapping[str, Any] | None, spent: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the bounds of a run (deadline, dollars) next to its actual end and cost, or None without bounds.

    Args:
        work: content of ``_progress.json``, whose last forecast has the bounds.
        spent: result of `cost`.
    """
    forecast = (work or {}).get("forecast")
    if work is None or forecast is None:
        return None
    return {
        "finish_by": forecast["finish_by"],
        "finished_at": work["written_at"],
        "max_dollars": forecast["max_dollars"],
        "dollars": None if spent is None else spent["dollars"],
    }


def bounds_lines(outcome: Mapping[str, Any] | None) -> list[str]:
    """Return a line for the deadline and one for the dollars of a run, with what happened."""
    if not outcome:
        return []
    lines = []
    if outcome["finish_by"] is not None:
        wanted, done = (
            datetime.fromisoformat(outcome[key]) for key in ("finish_by", "finished_at")
        )
        seconds = (wanted - done).total_seconds()
        when = f"{duration(abs(seconds))} {'before' if seconds >= 0 else 'after'} it"
        lines.append(
            f"deadline: {wanted.isoformat(timespec='minutes')}; the last row was done {when}"
        )
    if outcome["max_dollars"] is not None and outcome["dollars"] is not None:
        lines.append(
            f"limit: {money(outcome['max_dollars'])}; {money(outcome['dollars'])} were spent"
        )
    return lines


def estimate_words(estimate: Estimate) -> str:
    """Return the expected time and cost with their intervals."""
    words = _range(estimate["seconds"], duration)
    if estimate["dollars"] is None:
        return words
    return f"{words}, {_range(estimate['dollars'], money)}"


def _taken(spent: Mapping[str, Any]) -> str:
    seconds = duration(spent["elapsed_s"])
    if spent["dollars"] is None:
        return seconds
    return f"{seconds}, {money(spent['dollars'])}"


def _range(values: tuple[float, float, float], show: Any) -> str:
    expected, low, high = values
    return f"{show(expected)} [{show(low)}, {show(high)}]"


def duration(seconds: float) -> str:
    """Return a duration in one unit: 42 s, 7.5 min, 31.2 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / HOUR_S:,.1f} h"


def money(dollars: float) -> str:
    """Return dollars with cents; amounts below a dollar have two significant digits."""
    if dollars >= 1 or not dollars:
        return f"${dollars:,.2f}"
    return f"${dollars:.2g}"


def spend_line(spend: Mapping[str, Any] | None) -> str | None:
    """Return a line with requests, tokens and dollars of all attempts at an endpoint; None for our own engine."""
    if spend is None:
        return None
    tokens = f"{spend['prompt_tokens']:,} prompt and {spend['completion_tokens']:,} output tokens"
    counts = f"{spend['requests']:,} requests, {spend['limited']:,} of them limited, {tokens}"
    line = f"spend: {counts}"
    if spend["dollars"]:
        line += f", {money(spend['dollars'])}"
    if spend.get("perhaps_dollars"):
        line += f", perhaps {money(spend['perhaps_dollars'])} more for requests without an answer"
    return line
