"""When a run begins no further row because of what it may cost."""

from __future__ import annotations

from eagle_ray.scaling.outlook import Outlook
from eagle_ray.scaling.work import SURE


def is_at_cap(
    spent: float, outlook: Outlook, per_second: float, workers: int, max_dollars: float
) -> bool:
    """Return whether the rows in engines may cost what is left.

    Args:
        spent: dollars so far.
        per_second: dollars of all workers.
        workers: those that are paid for.
    """
    return spent + drain_dollars(outlook, per_second, workers) >= max_dollars


def drain_dollars(outlook: Outlook, per_second: float, workers: int) -> float:
    """Return the dollars until the rows in engines are done, in 95 % of cases.

    A worker is paid until its last row is done, then it is let go. The longest of a worker's rows is
    about as long as the longest of all, if there are few workers.
    """
    return per_second * outlook.drain_s(SURE) if workers else 0.0
