"""MetricsAggregator: the last snapshot of every replica, so that any of them can answer for all.

Counters never go back: those of replicas that have ended are kept, and a board that was lost and is made anew goes on
from what the first replica to come was told by the old one.

    >>> board = Board()
    >>> await board.put("a", meter.snapshot(...), known={})
    {'a': Snapshot(...)}
"""

from __future__ import annotations

import time

from eagle_ray.serve.metrics_snapshot import Snapshot, merge

STALE_S = 10.0  # a replica that has said nothing for so long does not answer: what it holds does not count
RETIRED_S = 600.0  # and will not come back: its counters are kept among all others' that have ended
RETIRED = ""


class MetricsAggregator:
    def __init__(self):
        self._last: dict[str, tuple[float, Snapshot]] = {}

    async def put(self, replica: str, snapshot: Snapshot, known: dict[str, Snapshot]) -> dict[str, Snapshot]:
        """Keep this replica's snapshot; returns everybody's. known: what the replica was told the last time."""
        now = time.monotonic()
        if not self._last:
            self._last = {name: (now, part) for name, part in known.items()}
        before = self._last[replica][1].counters if replica in self._last else {}
        counters = {name: max(before.get(name, 0), value) for name, value in snapshot.counters.items()}
        self._last[replica] = now, Snapshot(before | counters, snapshot.gauges)
        self._retire(now)
        return {
            name: part if now - said < STALE_S else Snapshot(part.counters, {})
            for name, (said, part) in self._last.items()
        }

    def _retire(self, now: float) -> None:
        ended = [name for name, (said, _) in self._last.items() if name != RETIRED and now - said > RETIRED_S]
        for name in ended:
            _, kept = self._last.get(RETIRED, (now, Snapshot()))
            self._last[RETIRED] = now, merge([Snapshot(kept.counters), Snapshot(self._last.pop(name)[1].counters)])
