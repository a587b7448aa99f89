"""ProbeSchedule: decide when the next probe may run, by the cost and the promise of earlier ones.

    if schedule.is_due(step):
        schedule.begin(step)
        ...
        schedule.charge(seconds)      # its time beyond that of the same tokens without it
        schedule.back_off()           # if its drafts were hardly accepted
    schedule.pay(seconds)             # at every step

`text_histogram.py` detects that texts have changed; then the schedule restarts.
"""

from __future__ import annotations

from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.plan_search import REVIEW_EVERY

PROBE_SHARE = 0.003  # share of the time
# Factor of the steps until the next probe, after each one whose drafts were hardly accepted.
BACK_OFF = 2


class ProbeSchedule:
    """The debt of probes in seconds, the step of the last one, and the steps until the next.

    Probes cost time that the best known plan would not have spent. Their cost is kept within
    PROBE_SHARE of the time: each probe adds its cost to a debt, every step pays some of it off, and
    the next probe waits until it is paid.

    One exception: after drafts were turned off, the debt is such that a retry comes soon, since
    their cost is only observed while they are on. Each further retry waits twice as long.

    After each probe whose drafts were hardly accepted the next one waits twice as long, so that the
    number of such probes rises with the logarithm of the steps.

    Args:
        share: share of the time that probes may cost; None is PROBE_SHARE.
        wait: minimum steps between two probes.
    """

    def __init__(self, share: float | None = None, wait: int = REVIEW_EVERY) -> None:
        self._share = PROBE_SHARE if share is None else share
        self._debt_s = 0.0
        self._last_step = -REVIEW_EVERY
        self._min_wait = wait  # steps from one probe to the next, at first
        self._wait = wait
        self._retry_after = MEMORY

    def is_due(self, step: int) -> bool:
        """Return whether a probe may run at this step."""
        return self._debt_s <= 0 and step >= self._last_step + self._wait

    def begin(self, step: int) -> None:
        """Record that a probe runs at this step. Its cost is known later, since steps overlap."""
        self._last_step = step

    def charge(self, seconds: float) -> None:
        """Add the seconds that a probe has cost to the debt."""
        self._debt_s = max(self._debt_s, 0.0) + max(seconds, 0.0)

    def pay(self, seconds: float) -> None:
        """Reduce the debt by the allowed share of a step's seconds."""
        self._debt_s -= self._share * seconds

    def allow_retry(self, step_seconds: float) -> None:
        """Set the debt so that a retry is due after MEMORY steps, and after twice as many at each further call."""
        self._debt_s = self._share * self._retry_after * step_seconds
        self._retry_after *= 2

    def back_off(self) -> None:
        """Double the wait for the next probe, since drafts were hardly accepted in the last one."""
        self._wait = max(BACK_OFF * self._wait, self._min_wait)

    def resume(self) -> None:
        """Reset the wait between probes to its initial length."""
        self._wait = self._min_wait

    def restart(self, step_seconds: float) -> None:
        """Make the next probe due soon, since texts may have changed during a long wait."""
        if self._wait > self._min_wait:
            self.resume()
            self.allow_retry(step_seconds)
