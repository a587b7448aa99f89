"""History: what a run promised and what happened, over time, for status and report.

    history = History.after(earlier)              # of ``_progress.json``, or None
    history.add(elapsed_s=62.0, facts=facts, workers=2)
    history.points      # [[62.0, 96, 2, 0.12, 310.0, 355.0, 600.0, 1000], ...]

A point has the names of `report.promises.POINT`. Once there are MAX_HISTORY_POINTS, every second one is
dropped, and further points are twice as far apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from eagle_ray.report.promises import POINT

MAX_HISTORY_POINTS = 240
MIN_STEP_S = 1.0


@dataclass(slots=True)
class History:
    """The points of a run, over all attempts."""

    points: list[list[float | None]] = field(default_factory=list)
    step_s: float = MIN_STEP_S

    @classmethod
    def after(cls, earlier: Mapping[str, Any] | None) -> History:
        """Return the history with the points of earlier attempts, from ``_progress.json``."""
        recorded = (earlier or {}).get("history") or []
        # Another version's points may have other numbers of facts.
        whole = [list(point) for point in recorded if len(point) == len(POINT)]
        last_s = 0.0
        if whole:
            last_s = whole[-1][0] or 0.0
        step_s = max(MIN_STEP_S, last_s / MAX_HISTORY_POINTS)
        return cls(whole, step_s)

    def add(self, elapsed_s: float, facts: Mapping[str, Any], workers: int) -> None:
        """Add a point with the current facts, unless the last point is too recent.

        Args:
            elapsed_s: seconds of all attempts.
            facts: facts of ``_progress.json``, with the forecast.
        """
        if self.points and elapsed_s - (self.points[-1][0] or 0.0) < self.step_s:
            return
        forecast = facts["forecast"]
        written_at = facts["written_at"]
        ends = [
            _seconds_at(forecast.get(key), written_at, elapsed_s)
            for key in ("ends_at", "surely_at", "finish_by")
        ]
        spent = forecast["spent"]
        dollars = None if spent is None else round(spent, 4)
        rows = facts["rows_done"]
        todo = facts["rows_to_do"]
        self.points.append([round(elapsed_s, 1), rows, workers, dollars, *ends, todo])
        if len(self.points) >= MAX_HISTORY_POINTS:
            self.points = self.points[::2]
            self.step_s *= 2


def _seconds_at(moment: str | None, written_at: str, elapsed_s: float) -> float | None:
    """Return the seconds of all attempts at a moment of a record."""
    if moment is None:
        return None
    ahead = datetime.fromisoformat(moment) - datetime.fromisoformat(written_at)
    return round(elapsed_s + ahead.total_seconds(), 1)
