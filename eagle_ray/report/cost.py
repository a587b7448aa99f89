"""What a run cost: rows and tokens per second, and per dollar if execution.price_per_hour is set.

The price is that of one GPU for an hour, or that of one worker where workers have no GPU.

    >>> usage = {"elapsed_s": 10, "worker_s": 20, "gpus_per_worker": 1}
    >>> cost({"rows": 100, "output_tokens": 3600}, usage, price_per_hour=1.8)
    {'rows_per_s': 10.0, 'tokens_per_s': 360.0, ..., 'dollars': 0.01, 'rows_per_dollar': 10000.0, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOUR_S = 3600
USAGE = "usage"  # the key of `_progress.json` that has the time of the run and its workers
Estimate = Mapping[str, Any]
"""``_estimate.json``: seconds and dollars, each [expected, low, high], and of what."""


def cost(
    total: Mapping[str, Any], usage: Mapping[str, float] | None, price_per_hour: float | None
) -> dict[str, Any] | None:
    """Return speeds and costs of all attempts together, or None if their time is not known.

    Args:
        total: the run's counts. Rows that a killed attempt lost are not in them, but its time is in `usage`.
        usage: seconds of the run and of its workers, and GPUs of a worker.
        price_per_hour: dollars; None leaves the dollars out.
    """
    if not usage or not usage["elapsed_s"]:
        return None
    seconds, rows, tokens = usage["elapsed_s"], total["rows"], total["output_tokens"]
    hours = priced_hours(usage["worker_s"], usage["gpus_per_worker"])
    dollars = None if price_per_hour is None else hours * price_per_hour
    return {
        "rows_per_s": rows / seconds,
        "tokens_per_s": tokens / seconds,
        "elapsed_s": seconds,
        "hours": hours,
        "unit": "GPU" if usage["gpus_per_worker"] else "worker",
        "price_per_hour": price_per_hour,
        "dollars": dollars,
        "rows_per_dollar": rows / dollars if dollars else None,
        "tokens_per_dollar": tokens / dollars if dollars else None,
        "dollars_per_million_tokens": 1e6 * dollars / tokens if dollars and tokens else None,
    }


def priced_hours(worker_s: float, gpus_per_worker: float) -> float:
    """Return the hours of GPUs, or of workers if they have none."""
    return worker_s * (gpus_per_worker or 1) / HOUR_S


def cost_lines(spent: Mapping[str, Any] | None, estimate: Estimate | None) -> list[str]:
    """Return the cost of a run as text, and the estimate that was made before it next to what it took."""
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


def estimate_words(estimate: Estimate) -> str:
    """Return the expected time and cost with their intervals."""
    words = _range(estimate["seconds"], duration)
    return words if estimate["dollars"] is None else f"{words}, {_range(estimate['dollars'], money)}"


def _taken(spent: Mapping[str, Any]) -> str:
    seconds = duration(spent["elapsed_s"])
    return seconds if spent["dollars"] is None else f"{seconds}, {money(spent['dollars'])}"


def _range(values: tuple[float, float, float], show: Any) -> str:
    expected, low, high = values
    return f"{show(expected)} [{show(low)}, {show(high)}]"


def duration(seconds: float) -> str:
    """Return a duration in one unit: 42 s, 7.5 min, 31.2 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * HOUR_S else f"{seconds / HOUR_S:,.1f} h"


def money(dollars: float) -> str:
    """Return dollars with cents, or with two significant digits if there are fewer."""
    return f"${dollars:,.2f}" if dollars >= 1 or not dollars else f"${dollars:.2g}"
