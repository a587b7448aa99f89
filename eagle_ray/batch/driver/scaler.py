"""Scaler: lets the fleet of a run follow a policy.

    scaler = Scaler(fleet, DeadlinePolicy(), limits, finish_by=deadline, now=time.monotonic())
    scaler.step(foresight, progress, time.monotonic(), has_rows_left=True)

Each second it looks at the engines; each minute, or more often in a short run, it asks the policy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from eagle_ray.batch.driver.fleet import Fleet
from eagle_ray.batch.driver.foresight import Foresight
from eagle_ray.batch.worker.progress import Progress
from eagle_ray.scaling.policy import FleetSize, FleetState, Policy
from eagle_ray.scaling.work import LIKELY

log = logging.getLogger("eagle_ray")
DECIDE_EVERY_S = 60.0
DECISIONS = 100.0  # of a short run, at least
MIN_DECIDE_S = 2.0
USUAL_START_S = 60.0  # of a worker, until one has started
PRIOR_S = 1800.0  # for which spot nodes are taken to be there half of the time


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Minimum and maximum number of workers, and whether spot nodes can be used."""

    min_workers: int
    max_workers: int
    has_spot: bool


class Scaler:
    """Resizes the fleet of one attempt as its policy decides.

    Args:
        finish_s: the deadline on the monotonic clock.
        now: current time on the monotonic clock.
        start_s: measured seconds of a worker's start; None if none was measured.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        limits: FleetLimits,
        finish_s: float,
        now: float,
        start_s: float | None = None,
    ):
        self._fleet = fleet
        self._policy = policy
        self._limits = limits
        self._finish_s = finish_s
        self._began = now
        self._start_s = start_s
        self._next = now
        self._every_s = min(DECIDE_EVERY_S, max(MIN_DECIDE_S, (finish_s - now) / DECISIONS))
        # Seconds in which spot workers were asked for, and in which half of them were there.
        self._requested_s = self._there_s = 0.0

    @property
    def paid(self) -> FleetSize:
        """Return the workers that have a node."""
        return self._fleet.paid

    def stop_admission(self) -> None:
        """Start no further row and no further worker."""
        self._fleet.stop_admission()
        self._next = float("inf")

    def step(
        self, foresight: Foresight, progress: Progress, now: float, has_rows_left: bool
    ) -> int:
        """Check the engines, resize the fleet if that is due, and return how many engines decode."""
        self._fleet.poll()
        if self._start_s is None and self._fleet.running.total:
            self._start_s = now - self._began
        if now >= self._next:
            self._next = now + self._every_s
            self._decide(foresight, now, has_rows_left)
        return self._fleet.running.total

    def _decide(self, foresight: Foresight, now: float, has_rows_left: bool) -> None:
        there = self._fleet.running.total + self._fleet.starting.total
        if there and (not has_rows_left or foresight.num_waiting < 1):
            self._fleet.release_idle()  # the last rows are in engines
            return
        self._watch_spot()
        before = FleetSize(
            self._fleet.running.spot + self._fleet.starting.spot,
            self._fleet.running.on_demand + self._fleet.starting.on_demand,
        )
        wanted = self._policy.decide(self._state(foresight, now))
        if wanted != before:
            log.info("workers: %d on spot nodes and %d on demand", wanted.spot, wanted.on_demand)
        self._fleet.resize(wanted)

    def _watch_spot(self) -> None:
        running = self._fleet.running.spot
        starting = self._fleet.starting.spot
        if running + starting:
            self._requested_s += self._every_s
            self._there_s += self._every_s * (2 * self._fleet.paid.spot >= running + starting)

    def _state(self, foresight: Foresight, now: float) -> FleetState:
        outlook = foresight.outlook
        limits = self._limits
        work = outlook.work
        if work is None:  # nothing is known: one worker shows how fast it is
            expected = likely = 1.0
        else:
            expected = work.expected
            likely = work.quantile(LIKELY)
        return FleetState(
            now=now,
            began=self._began,
            finish_by=self._finish_s,
            start_s=USUAL_START_S if self._start_s is None else self._start_s,
            tail_s=outlook.tail_s(limits.max_workers, LIKELY),
            done_share=outlook.done_share,
            expected_work_s=expected,
            likely_work_s=likely,
            running=self._fleet.running,
            starting=self._fleet.starting,
            spot_share=(self._there_s + PRIOR_S / 2) / (self._requested_s + PRIOR_S),
            min_workers=max(limits.min_workers, 0),
            max_workers=limits.max_workers,
            has_spot=limits.has_spot,
        )
