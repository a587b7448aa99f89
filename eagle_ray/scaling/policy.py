"""Policies: how many workers a run should have now, from what is known of it. State in, decision out.

    policy = DeadlinePolicy()
    policy.decide(state)        # FleetSize(spot=6, on_demand=0)

They read no clock and start nothing, so a simulation (jobs/bench/deadlines.py) and a job run one
code. Workers on spot nodes are cheap and may be lost; workers on demand are neither.

UniformProgress is the policy of "Can't Be Late" (Wu et al., NSDI 2024) for several workers, and the
baseline: a worker is on demand only while the run's progress is under the line that reaches its
end at the deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

# Spot workers that are asked for, in times of those that would do if spot nodes were always there:
# at least, and with the share of time for which they were. What they do early needs no worker on
# demand later.
MIN_HEADROOM = 1.5
MIN_STARTS_WORTH = 12.0  # a worker is added only for work of this many times its start
# Share of all workers that would have to run from now on, above which workers on demand begin.
CATCH_UP_SHARE = 0.6
KEEP_SHARE = 0.8  # a worker is let go if so much of the others' time would be enough


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Workers on spot nodes and on demand. Without two markets all workers are on demand."""

    spot: int
    on_demand: int

    @property
    def total(self) -> int:
        return self.spot + self.on_demand


@dataclass(frozen=True, slots=True)
class FleetState:
    """What is known of a run at a moment.

    Attributes:
        now, began, finish_by: seconds of one clock; no finish_by is infinity.
        start_s: seconds from the request for a worker to its first row.
        tail_s: seconds that the last rows take once no row waits.
        done_share: share of all tokens that are made.
        expected_work_s, likely_work_s: seconds of one worker, expected and in 80 % of cases.
        running: workers that decode.
        starting: workers that were asked for and do not decode yet.
        spot_share: share of the time for which spot workers that were asked for were there.
        min_workers, max_workers: limits of both together.
        has_spot: whether there are two markets.
    """

    now: float
    began: float
    finish_by: float
    start_s: float
    tail_s: float
    done_share: float
    expected_work_s: float
    likely_work_s: float
    running: FleetSize
    starting: FleetSize
    spot_share: float
    min_workers: int
    max_workers: int
    has_spot: bool

    @property
    def time_left(self) -> float:
        """Return the seconds in which all slots can be full."""
        return self.finish_by - self.now - self.tail_s

    @property
    def requested(self) -> FleetSize:
        running, starting = self.running, self.starting
        return FleetSize(
            running.spot + starting.spot,
            running.on_demand + starting.on_demand,
        )

    @property
    def line(self) -> float:
        """Return the share of tokens that a run of uniform progress has made by now."""
        whole = self.finish_by - self.began - self.tail_s - self.start_s
        if math.isinf(whole):
            return 0.0
        return min(1.0, (self.now - self.began) / max(whole, 1e-9))

    def needed(self, start_s: float) -> int:
        """Return the workers that are done in time in 80 % of cases, if each of them loses start_s seconds."""
        seconds = self.time_left - start_s
        if math.isinf(seconds):
            return 1
        if seconds <= 0:
            return self.max_workers
        return max(1, math.ceil(self.likely_work_s / seconds - 1e-9))

    def within(self, number: int) -> int:
        return max(self.min_workers, min(self.max_workers, number))


class Policy(Protocol):
    """Decides on the workers of a run."""

    def decide(self, state: FleetState) -> FleetSize:
        """Return the workers that there should be now."""


@dataclass(slots=True)
class UniformProgress:
    """The baseline: a fixed number of workers, on spot nodes where there are any, and on demand under the line.

    Once workers are on demand they stay until the run is two starts ahead of the line, and near the
    end all of them are (the paper's hysteresis and safety net).

    Attributes:
        spare: time of the workers in times of what the run needs, by which their number is fixed.
        workers: that number; None before the first decision.
    """

    spare: float = 1.3
    workers: int | None = None
    is_on_demand: bool = False

    def decide(self, state: FleetState) -> FleetSize:
        if self.workers is None:
            whole = replace(state, likely_work_s=state.likely_work_s * self.spare)
            self.workers = state.within(whole.needed(state.start_s))
        everyone, spot = self.workers, min(state.running.spot, self.workers)
        latest = state.likely_work_s / everyone + 2 * state.start_s
        if state.time_left <= latest:
            return FleetSize(spot, everyone - spot)
        margin = 2 * state.start_s / max(state.finish_by - state.began, 1e-9)
        if state.done_share < state.line:
            self.is_on_demand = True
        elif state.done_share >= state.line + margin:
            self.is_on_demand = False
        return FleetSize(everyone, everyone - spot if self.is_on_demand else 0)


@dataclass(slots=True)
class DeadlinePolicy:
    """As few workers as are done in time, on spot nodes first.

    On demand are those that are missing, and only if the run is under the line of uniform progress,
    or so late that most of max_workers would have to run from now on.
    """

    is_on_demand: bool = False

    def decide(self, state: FleetState) -> FleetSize:
        if state.likely_work_s <= 0:
            return state.running
        if not state.has_spot:
            return FleetSize(0, self._number(state))
        spot = self._spot(state)
        self._compare_with_line(state)
        # Two starts before the last moment at which all workers on demand would do, spot workers
        # count no longer: a loss could not be made up for.
        is_last = state.needed(3 * state.start_s) >= state.max_workers
        if not self.is_on_demand and not is_last:
            return FleetSize(spot, 0)
        helpers = 0 if is_last else state.running.spot
        missing = state.within(state.needed(state.start_s)) - helpers
        on_demand = max(missing, self._on_demand_to_retain(state, helpers), 0)
        on_demand = min(on_demand, state.max_workers - state.running.spot)
        return FleetSize(min(spot, state.max_workers - on_demand), on_demand)

    def _number(self, state: FleetState) -> int:
        """Return the workers of a run with one market: more at once if it is late, fewer if it is well ahead."""
        there = state.requested.total
        number = state.needed(0.0)
        if number > there:
            number = max(number, min(state.needed(state.start_s), state.max_workers))
        elif number < there:
            eased = replace(state, likely_work_s=state.likely_work_s / KEEP_SHARE)
            number = min(there, eased.needed(0.0))
        return state.within(number)

    def _spot(self, state: FleetState) -> int:
        """Return the spot workers to ask for: some more than are needed, if each of them has enough to do."""
        headroom = max(MIN_HEADROOM, 1.0 / max(state.spot_share, 0.05))
        wanted = math.ceil(headroom * state.needed(state.start_s))
        worth = int(state.expected_work_s / (MIN_STARTS_WORTH * max(state.start_s, 1e-9)))
        running = state.running.spot  # these have started, and rows in them are not lost
        return state.within(max(min(wanted, worth), running, 1))

    def _on_demand_to_retain(self, state: FleetState, helpers: int) -> int:
        """Return the workers on demand that run and are needed on, since each new start costs."""
        needed = state.needed(0.0) - helpers
        return min(state.requested.on_demand, max(needed, 0))

    def _compare_with_line(self, state: FleetState) -> None:
        horizon = max(state.finish_by - state.began, 1e-9)
        margin = 2 * state.start_s / horizon
        is_urgent = state.needed(state.start_s) >= CATCH_UP_SHARE * state.max_workers
        is_under = state.done_share < state.line
        if is_under and is_urgent:
            self.is_on_demand = True
        elif state.done_share >= state.line + margin or (
            not is_urgent and state.running.spot >= state.needed(0.0)
        ):
            self.is_on_demand = False


@dataclass(frozen=True, slots=True)
class FixedWorkers:
    """The same number of workers at any time."""

    size: FleetSize

    def decide(self, state: FleetState) -> FleetSize:
        return self.size
