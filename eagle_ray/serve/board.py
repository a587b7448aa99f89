"""Board: the last snapshot of every replica, so that any of them can answer for all.

Counters of replicas that have ended are kept: they never go back. Does not know Ray, which runs one beside the
replicas, nor torch.

    >>> board = Board()
    >>> board.put("a", meter.snapshot(...)).counters["generation_tokens_total"]
"""

from __future__ import annotations

import time

from eagle_ray.serve.snapshot import Snapshot, added_up

SILENT_S = 10.0  # a replica that has said nothing for so long has ended


class Board:
    def __init__(self):
        self._last: dict[str, tuple[float, Snapshot]] = {}

    def put(self, replica: str, snapshot: Snapshot) -> Snapshot:
        """Keep this replica's snapshot; returns all replicas' together."""
        now = time.monotonic()
        self._last[replica] = now, snapshot
        return added_up(
            part if now - said < SILENT_S else Snapshot(part.counters, {}) for said, part in list(self._last.values())
        )
