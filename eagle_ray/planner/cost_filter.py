"""CurveFilter: how far the costs that are known may be off by now, and how much a new time says about each of them.

A Kalman filter over the logarithms of a curve's seconds. What slows a machine down slows all sizes, near ones alike, so
what is known drifts with the machine as a whole and, far less, by neighbourhoods of sizes: a few slow passes at the
start, taken to be a matter of their size, once kept drafts off for a whole job. A time heard corrects each size
by how far it is in doubt together with the one that was run.

    >>> doubt = Doubt([1, 8, 64])
    >>> [f"{factor:.2f}" for factor in doubt.factors({1: 1.0}, ratio=1.2)]
    ['1.15', '1.16', '1.15']
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

NOISE = 0.08  # standard deviation of the logarithm of one time, around what such steps take at present
AT_FIRST = (0.15, 0.04)  # the same of what was measured at the start: of all sizes together, and of a neighbourhood
DRIFT = (0.02, 0.002)  # likewise, of what each time heard adds
NEAR = 2.0  # doublings of the number of rows over which neighbours are alike to 1/e
NEW = 0.5  # of a size that was run once, beyond all that were measured: its first time pays for what is made once
STRANGE = 3.0  # standard deviations: what is further off says more about the machine's other work than about this size


class CurveFilter:
    """rows: the sizes of a curve, in order."""

    def __init__(self, rows: Sequence[int]):
        self._rows = list(rows)
        self._covariance = self._prior(AT_FIRST)
        self._drift = self._prior(DRIFT)

    def add(self, rows: int) -> None:
        """One more size, which has just been run for the first time."""
        self._rows.append(rows)
        self._covariance = np.pad(self._covariance, (0, 1))  # that one time was off says nothing of the others
        self._covariance[-1, -1] = NEW**2
        self._drift = self._prior(DRIFT)

    def factors(self, shares: Mapping[int, float], ratio: float) -> list[float]:
        """For each size by how much to correct it, now that a time has been heard.

        shares: the places of the sizes that were run and their weights, which sum to 1. ratio: of the time to what was
        foreseen.
        """
        self._covariance += self._drift
        with_it = sum(share * self._covariance[place] for place, share in shares.items())
        variance = sum(share * with_it[place] for place, share in shares.items()) + NOISE**2
        most = STRANGE * math.sqrt(variance)
        surprise = min(max(math.log(ratio), -most), most)
        gains = with_it / variance
        self._covariance -= np.outer(gains, with_it)
        return np.exp(gains * surprise).tolist()

    def _prior(self, deviations: tuple[float, float]) -> np.ndarray:
        """Covariance of the sizes' logarithms."""
        together, nearby = deviations
        places = np.log2(self._rows)
        return together**2 + nearby**2 * np.exp(-np.abs(places[:, None] - places) / NEAR)
