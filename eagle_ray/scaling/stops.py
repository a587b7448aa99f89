"""Decide when a run must start no further row because of its budget."""

from __future__ import annotations

from eagle_ray.scaling.outlook import Outlook
from eagle_ray.scaling.work import SURE


def is_at_cap(
    spent: float, outlook: Outlook, per_second: float, workers: int, max_dollars: float
) -> bool:
    """Return whether finishing the rows in engines may use up the rest of the budget.

    Args:
        spent: dollars so far.
        per_second: dollars per second of all workers.
        workers: number of workers that are paid for.
    """
    return spent + drain_dollars(outlook, per_second, workers) >= max_dollars


def drain_dollars(outlook: Outlook, per_second: float, workers: int) -> float:
    """Return the dollars that finishing the rows in engines costs, in 95 % of cases.

    A worker is paid until its last row is done. With few workers, the longest of a worker's rows is
    about as long as the longest of all.
    """
    return per_second * outlook.drain_s(SURE) if workers else 0.0
