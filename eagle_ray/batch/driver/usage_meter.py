"""UsageMeter: the time that a run and its workers took, over all attempts. It is what a run costs.

A worker counts from its start, loading included, until the job ends, because its GPU is taken for as long. Between the
fewest and the most workers of the job's plan, the ready ones are counted. An attempt that was killed counts up to its
last ``_progress.json``.

    >>> meter = UsageMeter(fewest=2, most=2, num_gpus=1, earlier=None, now=0.0)
    >>> meter.update(num_ready=0, now=10.0)
    >>> meter.usage()
    {'elapsed_s': 10.0, 'worker_s': 20.0, 'gpus_per_worker': 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USAGE = "usage"  # the key of `_progress.json`


class UsageMeter:
    """Args are a WorkerPlan's, and what came before.

    Args:
        earlier: ``_progress.json`` as the attempts before left it, or None.
        now: seconds of any steady clock.
    """

    def __init__(self, fewest: int, most: int, num_gpus: float, earlier: Mapping[str, Any] | None, now: float):
        self._fewest, self._most, self._num_gpus = fewest, most, num_gpus
        self._now = now
        before = {"elapsed_s": 0.0, "worker_s": 0.0} if earlier is None else earlier.get(USAGE)
        self._is_known = before is not None  # not after an attempt of a version that did not count
        self._elapsed_s = before["elapsed_s"] if before else 0.0
        self._worker_s = before["worker_s"] if before else 0.0

    def update(self, num_ready: int, now: float) -> None:
        """Count the time since the last update. num_ready: workers that have reported, restarted ones included."""
        seconds, self._now = now - self._now, now
        self._elapsed_s += seconds
        self._worker_s += seconds * min(max(num_ready, self._fewest), self._most)

    def usage(self) -> dict[str, float] | None:
        """Return the seconds so far, or None if an earlier attempt's are not known."""
        if not self._is_known:
            return None
        return {
            "elapsed_s": round(self._elapsed_s, 1),
            "worker_s": round(self._worker_s, 1),
            "gpus_per_worker": self._num_gpus,
        }
