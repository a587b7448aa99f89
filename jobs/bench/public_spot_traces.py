"""Spot nodes that there were: traces of cloud providers, for jobs on a simulated clock.

The traces of "Can't Be Late" (NSDI 2024) are JSON files of `{"metadata": {"gap_seconds": 300}, "data": [16, 11, ...]}`:
how many nodes a probe could have at each tick. They are not shipped: `git clone
https://github.com/skypilot-org/spot-traces` has them. Zones that were probed at the same time add up to one
place with more nodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.bench.simulated_fleet import SpotTrace


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """The nodes of one place by time.

    Attributes:
        gap_s: seconds between two ticks.
        rooms: nodes at each tick.
    """

    gap_s: float
    rooms: np.ndarray

    @property
    def seconds(self) -> float:
        return self.gap_s * len(self.rooms)

    def starting_at(self, begin_s: float) -> SpotTrace:
        """Return what a job sees that begins at this moment; its last room lasts for ever."""
        rooms = self.rooms[int(begin_s / self.gap_s) :]
        is_last = np.append(rooms[1:] != rooms[:-1], True)  # of a spell
        ends = (np.flatnonzero(is_last) + 1) * self.gap_s
        return SpotTrace(ends, rooms[is_last])


def read_trace(zones: Sequence[Path]) -> PublicTrace:
    """Return the sum of zones that were probed at the same times. Raises ValueError if their ticks differ."""
    contents = [json.loads(path.read_text()) for path in zones]
    gaps = {content["metadata"]["gap_seconds"] for content in contents}
    if len(gaps) != 1:
        raise ValueError(f"zones of one trace have one gap between ticks, not {sorted(gaps)}")
    num_ticks = min(len(content["data"]) for content in contents)
    rooms = sum(np.array(content["data"][:num_ticks], dtype=np.int64) for content in contents)
    return PublicTrace(float(gaps.pop()), np.asarray(rooms))
