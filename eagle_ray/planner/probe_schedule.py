"""ProbeSchedule: when the next probe may run, by what probes have cost and promised. TextHistogram: other texts.

if schedule.is_due(step):
    schedule.begin(step)
    ...
    schedule.charge(seconds)      # what the probe took beyond what its tokens would have taken
    schedule.back_off()           # if its drafts were hardly accepted
schedule.pay(seconds)             # of every step
if texts.have_changed(batch):
    schedule.restart(step_seconds)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.plan_search import REVIEW_EVERY

PROBE_SHARE = 0.003  # of the time
BACK_OFF = 2  # times as many steps until the next probe, after each one whose drafts were hardly accepted
NUM_BINS = 1024  # of token ids
NUM_TOKENS = 256  # the last ones of the batch that are counted
# Of SmolLM2's tokens, two histograms of one task of Spec-Bench agree by 0.41 to 0.9, of English and Finnish by 0.16,
# of prose and code by 0.2 to 0.35, and of two tasks by 0.3 to 0.47.
MIN_AGREEMENT = 0.35


class ProbeSchedule:
    """The debt of probes in seconds, the step of the last one, and the steps until the next.

    Probes cost time that the best known plan would not have spent. Their cost is kept within PROBE_SHARE of the time:
    each probe adds its cost to a debt, every step pays some of it off, and the next probe waits until it is paid.

    One exception: after drafts were turned off, the debt is such that a retry comes soon, since their cost is only
    observed while they are on. Each further retry waits twice as long.

    After each probe whose drafts were hardly accepted the next one waits twice as long, so that the number of such
    probes rises with the logarithm of the steps.

    Args:
        share: share of the time; None is PROBE_SHARE.
        wait: least steps between two probes.
    """

    def __init__(self, share: float | None = None, wait: int = REVIEW_EVERY) -> None:
        self._share = PROBE_SHARE if share is None else share
        self._debt_s = 0.0
        self._last_step = -REVIEW_EVERY
        self._min_wait = self._wait = wait  # steps from one probe to the next
        self._retry_after = MEMORY

    def is_due(self, step: int) -> bool:
        """Return whether a probe may run at this step."""
        return self._debt_s <= 0 and step >= self._last_step + self._wait

    def begin(self, step: int) -> None:
        """Record that a probe runs at this step. Its cost is known later, since steps overlap."""
        self._last_step = step

    def charge(self, seconds: float) -> None:
        """Add the cost of a probe."""
        self._debt_s = max(self._debt_s, 0.0) + max(seconds, 0.0)

    def pay(self, seconds: float) -> None:
        """Pay off the share of a step that took this long."""
        self._debt_s -= self._share * seconds

    def allow_retry(self, step_seconds: float) -> None:
        """Set the debt to what the next steps pay off: MEMORY steps, and twice as many at each further call."""
        self._debt_s = self._share * self._retry_after * step_seconds
        self._retry_after *= 2

    def back_off(self) -> None:
        """Wait longer for the next probe, since drafts were hardly accepted in the last one."""
        self._wait = max(BACK_OFF * self._wait, self._min_wait)

    def resume(self) -> None:
        """Wait no longer than at first."""
        self._wait = self._min_wait

    def restart(self, step_seconds: float) -> None:
        """Probe soon again after a long wait, since what the last probes showed says little about what comes."""
        if self._wait > self._min_wait:
            self.resume()
            self.allow_retry(step_seconds)


class TextHistogram:
    """How often tokens occur among the last ones of a batch, to notice texts unlike those of the last probe.

    Ids share NUM_BINS bins. Two histograms agree by the Bhattacharyya coefficient: 1 if they are equal.
    """

    def __init__(self) -> None:
        self._reference: Float[np.ndarray, " bins"] | None = None  # square roots of frequencies

    def remember(self, batch: DecodeBatch) -> None:
        """Compare later batches with this one."""
        self._reference = _root_frequencies(batch)

    def have_changed(self, batch: DecodeBatch) -> bool:
        """Return whether the batch's texts are unlike the remembered ones."""
        if self._reference is None:
            return False
        return float(self._reference @ _root_frequencies(batch)) < MIN_AGREEMENT


def _root_frequencies(batch: DecodeBatch) -> Float[np.ndarray, " bins"]:
    each = -(-NUM_TOKENS // len(batch))
    ids: list[int] = []
    for sequence in batch.sequences:
        outputs = sequence.output_ids[-each:]
        lacking = each - len(outputs)
        ids += sequence.prompt_ids[-lacking:] if lacking else []
        ids += outputs
    counts = np.bincount(np.asarray(ids, dtype=np.int64) % NUM_BINS, minlength=NUM_BINS)
    return np.sqrt(counts / max(len(ids), 1))
