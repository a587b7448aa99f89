"""AcceptanceByBatchSize: what drafts for a batch have lately been worth, kept apart by the batch's size.

The last sequences of a job are not like those it began with: the long answers are left, the hard texts, the hot rows.
What they teach says little about the full batch that the next job begins with, which is where a little decides whether
to draft at all. So every octave of sizes has expectations of its own; a new one begins with those last used.
"""

from __future__ import annotations

from copy import deepcopy

from eagle_ray.planner.acceptance_model import AcceptanceModel

MEMORY = 0.98  # per step, of how far expectations came true
PRIOR = 2.0  # tokens that expectations are taken to have been right about before anything was seen


class AcceptanceByBatchSize:
    """curves: what drafts should be worth. trust: how far that came true, accepted over expected draft tokens."""

    def __init__(self, curves: AcceptanceModel):
        self.curves = curves
        self._accepted = self._expected = PRIOR

    @property
    def accuracy(self) -> float:
        return (self._accepted + PRIOR) / (self._expected + PRIOR)

    def update(self, num_accepted: float, num_expected: float) -> None:
        """What came of a step's drafts."""
        self._accepted = MEMORY * self._accepted + num_accepted
        self._expected = MEMORY * self._expected + num_expected

    def copy(self) -> AcceptanceByBatchSize:
        """The same, which from now on learns by itself."""
        self.curves.settle()
        return deepcopy(self)


class ExpectationsBySize:
    """Those of 1, 2, 3 to 4, 5 to 8, ... sequences.

    last: those last used; at first they are of no size, and hear what is learnt before any size is asked for.
    """

    def __init__(self, curves: AcceptanceModel):
        self.last = AcceptanceByBatchSize(curves)
        self._of: dict[int, AcceptanceByBatchSize] = {}

    def of(self, size: int) -> AcceptanceByBatchSize:
        """Those of so many sequences: the same object every time."""
        octave = (size - 1).bit_length()
        if octave not in self._of:
            self._of[octave] = self.last.copy()
        self.last = self._of[octave]
        return self.last
