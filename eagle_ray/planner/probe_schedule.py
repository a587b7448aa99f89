"""ProbeSchedule: when the next probe may run, by the seconds that probes have cost.

if probes.is_due(step):
    probes.begin(step)
    ...
    probes.charge(seconds)      # what the probe took beyond what its tokens would have taken
probes.pay(seconds)             # of every step
"""

from __future__ import annotations

from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.plan_search import REVIEW_EVERY

PROBE_SHARE = 0.003  # of the time


class ProbeSchedule:
    """When the next probe may run: the debt of probes in seconds, and the step of the last one.

    Probes cost time that the best known plan would not have spent. Their cost is kept within PROBE_SHARE of the time:
    each probe adds its cost to a debt, every step pays some of it off, and the next probe waits until it is paid.

    One exception: after drafts were turned off, the debt is lowered so that a retry comes soon, since their cost is
    only observed while they are on. Each further retry waits twice as long.
    """

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._last_step = -REVIEW_EVERY
        self._retry_after = MEMORY

    def is_due(self, step: int) -> bool:
        """Return whether a probe may run at this step."""
        return self._debt_s <= 0 and step >= self._last_step + REVIEW_EVERY

    def begin(self, step: int) -> None:
        """Record that a probe runs at this step. Its cost is known later, since steps overlap."""
        self._last_step = step

    def charge(self, seconds: float) -> None:
        """Add the cost of a probe."""
        self._debt_s = max(self._debt_s, 0.0) + max(seconds, 0.0)

    def pay(self, seconds: float) -> None:
        """Pay off the share of a step that took this long."""
        self._debt_s -= PROBE_SHARE * seconds

    def allow_retry(self, step_seconds: float) -> None:
        """Lower the debt to what the next steps pay off: MEMORY steps, and twice as many at each further call."""
        self._debt_s = min(self._debt_s, PROBE_SHARE * self._retry_after * step_seconds)
        self._retry_after *= 2
