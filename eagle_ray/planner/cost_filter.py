"""CurveFilter: a Kalman filter over the logarithms of a cost curve's seconds.

What slows a machine down slows all sizes. So costs drift with the machine as a whole and, far less, by neighbourhoods
of sizes: a few slow passes at the start, attributed to their size alone, once kept drafts off for a whole job. An
observed time corrects each size by its covariance with the size that was run.

    >>> curve_filter = CurveFilter([1, 8, 64])
    >>> [f"{factor:.2f}" for factor in curve_filter.factors({1: 1.0}, ratio=1.2)]
    ['1.15', '1.16', '1.15']
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

NOISE = 0.08  # standard deviation of the logarithm of one time
AT_FIRST = (0.15, 0.04)  # standard deviations of the first measurement: of all sizes together, and of a neighbourhood
DRIFT = (0.02, 0.002)  # likewise, added with each observed time
NEAR = 2.0  # doublings of the number of rows over which correlation falls to 1/e
NEW = 0.5  # standard deviation of a size larger than all measured: its first time includes one-time work
STRANGE = 3.0  # standard deviations: larger deviations are clipped, since they come from other work on the machine


class CurveFilter:
    """rows: the sizes of a curve, in order."""

    def __init__(self, rows: Sequence[int]):
        self._rows = list(rows)
        self._covariance = self._prior(AT_FIRST)
        self._drift = self._prior(DRIFT)

    def add(self, rows: int) -> None:
        """Add a size that has been run for the first time."""
        self._rows.append(rows)
        self._covariance = np.pad(self._covariance, (0, 1))  # uncorrelated with the others
        self._covariance[-1, -1] = NEW**2
        self._drift = self._prior(DRIFT)

    def factors(self, shares: Mapping[int, float], ratio: float) -> list[float]:
        """Return the factor by which to correct each size after an observed time.

        Args:
            shares: index and weight of the sizes that were run; weights sum to 1.
            ratio: the observed time over the predicted one.
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
        """Return the covariance of the sizes' logarithms."""
        together, nearby = deviations
        places = np.log2(self._rows)
        return together**2 + nearby**2 * np.exp(-np.abs(places[:, None] - places) / NEAR)
