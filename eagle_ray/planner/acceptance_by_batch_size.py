"""AcceptanceByBatchSize: an acceptance model for each octave of batch sizes.

The last sequences of a job differ from its first ones: long answers, hard texts and high temperatures are left. Their
acceptance says little about the full batch of the next job. A new octave starts with a copy of the last one used.
"""

from __future__ import annotations

from copy import deepcopy

from eagle_ray.planner.acceptance_model import AcceptanceModel

MEMORY = 0.98  # decay per step of accepted and expected drafts
PRIOR = 2.0  # drafts: prior that expectations are right


class AcceptanceByBatchSize:
    """An acceptance model, and how accurate it was: accepted over expected drafts."""

    def __init__(self, curves: AcceptanceModel):
        self.curves = curves
        self._accepted = self._expected = PRIOR

    @property
    def accuracy(self) -> float:
        return (self._accepted + PRIOR) / (self._expected + PRIOR)

    def update(self, num_accepted: float, num_expected: float) -> None:
        """Observe the drafts of one step."""
        self._accepted = MEMORY * self._accepted + num_accepted
        self._expected = MEMORY * self._expected + num_expected

    def copy(self) -> AcceptanceByBatchSize:
        """Return a copy that learns separately."""
        self.curves.settle()
        return deepcopy(self)


class ExpectationsBySize:
    """One for 1, 2, 3 to 4, 5 to 8, ... sequences.

    Attributes:
        last: the one used last; at first one without a size, for what is observed before any size is requested.
    """

    def __init__(self, curves: AcceptanceModel):
        self.last = AcceptanceByBatchSize(curves)
        self._of: dict[int, AcceptanceByBatchSize] = {}

    def of(self, size: int) -> AcceptanceByBatchSize:
        """Return the one for a batch size, the same object every time."""
        octave = (size - 1).bit_length()
        if octave not in self._of:
            self._of[octave] = self.last.copy()
        self.last = self._of[octave]
        return self.last
