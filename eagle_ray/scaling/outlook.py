"""Outlook: predict the remaining time of a run from its workers' reports.

outlook = Outlook(max_tokens=4096)
outlook.observe(Observation(now, tokens, worker_s, classes, slots=64))
outlook.seconds_left(workers=4)      # Seconds(expected=5210.0, likely=5480.0, sure=5770.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_ray.scaling.work import (
    LIKELY,
    SURE,
    Amount,
    ClassLeft,
    Speed,
    SpeedWindow,
    all_classes,
    tokens_left,
    work_left,
)


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a run at one moment, from its workers' reports.

    Attributes:
        now: time of the observation, in seconds of any steady clock.
        tokens: tokens that all workers have generated so far, including those of decoding and lost
            rows.
        worker_s: seconds in which workers could decode, summed over workers and multiplied by the
            share of busy slots.
        classes: state of the rows of each class.
        slots: number of sequences that one worker decodes at a time.
    """

    now: float
    tokens: float
    worker_s: float
    classes: Mapping[str, ClassLeft]
    slots: float

    @property
    def waiting(self) -> float:
        return sum(each.waiting for each in self.classes.values())


@dataclass(frozen=True, slots=True)
class Seconds:
    """A predicted time in seconds from now: the expected value, and the values that hold in LIKELY and SURE cases."""

    expected: float
    likely: float
    sure: float


@dataclass(slots=True)
class Outlook:
    """Prediction of the remaining work and time of a run.

    Attributes:
        max_tokens: maximum tokens of an output.
        prior: speed that was measured before the run, for example by ``validate --estimate``; None
            for none.
    """

    max_tokens: float
    prior: Speed | None = None
    _window: SpeedWindow = field(default_factory=SpeedWindow)
    _latest: Observation | None = None

    def observe(self, observation: Observation) -> None:
        """Add an observation, which must be later than the previous one."""
        self._latest = observation
        self._window.add(observation.now, observation.worker_s, observation.tokens)

    @property
    def speed(self) -> Speed | None:
        """Return the speed of a worker over the last minutes, or the prior until there is one."""
        return self._window.speed() or self.prior

    @property
    def tokens_left(self) -> Amount:
        latest = self._latest
        assert latest is not None, "something was observed"
        return tokens_left(latest.classes, self.max_tokens)

    @property
    def work(self) -> Amount | None:
        """Return the remaining work in seconds of one worker, or None while the speed is unknown."""
        speed = self.speed
        if speed is None or self._latest is None:
            return None
        return work_left(self.tokens_left, speed)

    @property
    def done_share(self) -> float:
        """Return the share of all expected tokens that are generated."""
        if self._latest is None:
            return 0.0
        made = all_classes(self._latest.classes).tokens_so_far
        total = made + self.tokens_left.expected
        return made / total if total > 0 else 1.0

    def drain_s(self, share: float = LIKELY) -> float:
        """Return a quantile of the seconds until the rows that are decoding now are done."""
        if self._latest is None or self.speed is None:
            return 0.0
        pooled = all_classes(self._latest.classes)
        longest = pooled.curve(self.max_tokens).longest_of(pooled.running, share)
        return longest * self._token_s(self.speed)

    def drain_work(self) -> Amount | None:
        """Return the work that decoding rows still need, in seconds of one worker."""
        if self._latest is None or self.speed is None:
            return None
        running = {name: ClassLeft(each.counts, 0.0) for name, each in self._latest.classes.items()}
        return work_left(tokens_left(running, self.max_tokens), self.speed)

    def tail_s(self, workers: float, share: float = 0.5) -> float:
        """Return a quantile of the seconds that the last rows need after slots can no longer be kept full."""
        latest = self._latest
        speed = self.speed
        if latest is None or speed is None:
            return 0.0
        pooled = all_classes(latest.classes)
        curve = pooled.curve(self.max_tokens)
        slots = workers * latest.slots
        if latest.waiting >= slots:
            longest = curve.longest_left(slots, share)
            mean = curve.mean_left
        else:
            waiting = curve.longest_row(latest.waiting, share)
            longest = max(waiting, curve.longest_of(pooled.running, share))
            mean = self.tokens_left.expected / max(slots, 1.0)
        return max(0.0, longest - mean) * self._token_s(speed)

    def seconds_left(self, workers: float) -> Seconds | None:
        """Return the predicted seconds until the end with this many workers from now on; None while unknown."""
        work = self.work
        if work is None or workers <= 0:
            return None
        expected = work.expected / workers + self.tail_s(workers)
        ends = []
        for share in (LIKELY, SURE):
            of_work = (work.quantile(share) - work.expected) / workers
            of_tail = self.tail_s(workers, share) - self.tail_s(workers)
            ends.append(expected + math.hypot(max(of_work, 0.0), of_tail))
        return Seconds(expected, *ends)

    def _token_s(self, speed: Speed) -> float:
        """Return the seconds that a row in a slot takes for a token."""
        assert self._latest is not None
        return self._latest.slots / speed.tokens_per_s
