"""Histogram: how often values of equal ranges occur, as a summary stores it.

    >>> histogram([0.0, 1.0, 1.0, 4.0], num_bins=4)
    {'low': 0.0, 'width': 1.0, 'counts': [1, 2, 0, 1]}

The bins cover all but the outermost hundredth of the values at each end, which the outer bins count, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NUM_HISTOGRAM_BINS = 20
SHARE_BEYOND = 0.01  # share of the values at each end that may lie beyond the bins


def histogram(values: Sequence[float], num_bins: int = NUM_HISTOGRAM_BINS) -> dict[str, Any] | None:
    """Return the counts of values in bins of equal width; None without finite values."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    num_beyond = int(SHARE_BEYOND * len(ordered))
    low = ordered[num_beyond]
    width = (ordered[-1 - num_beyond] - low) / num_bins or 1.0
    counts = [0] * num_bins
    for value in ordered:
        place = math.floor((value - low) / width)
        counts[min(max(place, 0), num_bins - 1)] += 1
    return {"low": low, "width": width, "counts": counts}
