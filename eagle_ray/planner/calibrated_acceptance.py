"""CalibratedAcceptance: an acceptance model corrected by its past accuracy, one per range of batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from torch import Tensor

from eagle_ray.planner.acceptance_model import FADED, MEMORY, PRIOR_COUNT, AcceptanceModel

KNOWN_COUNT = 30.0  # accepted drafts that a state counts as for the accuracy


class CalibratedAcceptance:
    """An acceptance model and its accuracy: accepted over expected drafts, averaged over MEMORY steps."""

    def __init__(self, model: AcceptanceModel):
        self.model = model
        self._accepted = PRIOR_COUNT
        self._expected = PRIOR_COUNT

    @property
    def accuracy(self) -> float:
        return (self._accepted + PRIOR_COUNT) / (self._expected + PRIOR_COUNT)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a model's state, with a weight that the next few drafts cannot overturn. Raises as the model does."""
        self.model.load_state(state)
        self._accepted = KNOWN_COUNT
        self._expected = KNOWN_COUNT

    def update(self, num_accepted: float, num_expected: float) -> None:
        """Update the accuracy from one step. A step without drafts changes nothing."""
        if not num_expected:
            return
        decay = 1 - 1 / MEMORY
        self._accepted = decay * self._accepted + num_accepted
        self._expected = decay * self._expected + num_expected

    def fade(self) -> None:
        """Reduce the weight of all earlier drafts, because the texts have changed."""
        self.model.fade()
        self._accepted = FADED * self._accepted + PRIOR_COUNT
        self._expected = FADED * self._expected + PRIOR_COUNT

    def copy(self) -> CalibratedAcceptance:
        """Return a copy that is updated separately."""
        self.model.sync()
        return deepcopy(self)


def octave(size: int) -> int:
    """Return the index of the range of batch sizes (1, 2, 3 to 4, 5 to 8, ...) that a batch size is in."""
    return (size - 1).bit_length()


class AcceptanceByBatchSize:
    """One CalibratedAcceptance per octave of batch sizes: 1, 2, 3 to 4, 5 to 8, ... sequences.

    The last sequences of a job differ from its first ones: long answers, hard texts and high
    temperatures are left. Their acceptance says little about the full batch of the next job. A new
    octave starts with a copy of the last one.

    Attributes:
        last: the acceptance that was used last; at first one that belongs to no batch size.
    """

    def __init__(self, model: AcceptanceModel):
        self.last = CalibratedAcceptance(model)
        self._by_octave: dict[int, CalibratedAcceptance] = {}
        self._num_uses: dict[int, int] = {}  # uses of each octave

    def of(self, size: int) -> CalibratedAcceptance:
        """Return the acceptance for a batch size; it is one object per octave."""
        key = octave(size)
        if key not in self._by_octave:
            self._by_octave[key] = self.last.copy()
        self._num_uses[key] = self._num_uses.get(key, 0) + 1
        self.last = self._by_octave[key]
        return self.last

    @property
    def usual(self) -> CalibratedAcceptance:
        """Return the acceptance of the octave that was used most, or the initial one if none was used."""
        if not self._num_uses:
            return self.last
        return self._by_octave[max(self._num_uses, key=self._num_uses.__getitem__)]
