"""What one time says about each size, beside the textbook's filter, and about sizes that were not run."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_ray.planner.cost_filter import AT_FIRST, DRIFT, NEAR, NOISE, CurveFilter

ROWS = [1, 8, 16, 64]


def covariance(deviations: tuple[float, float]) -> np.ndarray:
    """Of the logarithms of ROWS' seconds, one pair after the other."""
    together, nearby = deviations
    apart = [[abs(math.log2(a / b)) for b in ROWS] for a in ROWS]
    return np.array([[together**2 + nearby**2 * math.exp(-d / NEAR) for d in row] for row in apart])


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.9, 1.1)), min_size=1, max_size=20))
def test_it_is_the_exact_posterior_of_all_times_heard(times):
    """All logarithms at once, as one Gaussian over everything that drifted, instead of one step after the other."""
    doubt, log = CurveFilter(ROWS), np.zeros(4)
    said, heard, places = [], [], []
    for place, ratio in times:
        log = log + np.log(doubt.factors({place: 1.0}, ratio))
        places.append(place)
        heard.append(math.log(ratio))
        said.append(log)
    first, drift = covariance(AT_FIRST), covariance(DRIFT)
    until = [first + (n + 1) * drift for n in range(len(times))]  # of what is true at time n, and later
    known = np.array([[until[min(i, j)][a, b] for j, b in enumerate(places)] for i, a in enumerate(places)])
    # what was heard is relative to what was known by then
    absolute = [h + (said[i - 1][places[i]] if i else 0.0) for i, h in enumerate(heard)]
    weights = np.linalg.solve(known + NOISE**2 * np.eye(len(times)), absolute)
    wanted = [
        sum(until[i][a, row] * w for i, (a, w) in enumerate(zip(places, weights, strict=True))) for row in range(4)
    ]
    assert log == pytest.approx(wanted, abs=1e-6)


def test_near_sizes_move_more_than_far_ones():
    one, eight, sixteen, many = CurveFilter(ROWS).factors({1: 1.0}, ratio=1.2)
    assert eight > sixteen > many > 1 and eight > one > 1


def test_a_size_between_two_moves_both():
    factors = CurveFilter(ROWS).factors({1: 0.5, 2: 0.5}, ratio=1.2)
    assert factors[1] == pytest.approx(factors[2], rel=1e-3) and factors[1] > factors[3]


def test_the_more_is_known_the_less_one_time_says():
    doubt = CurveFilter(ROWS)
    moves = [doubt.factors({1: 1.0}, ratio=1.05)[1] - 1 for _ in range(50)]
    assert moves[0] > 2 * moves[-1] > 0
    assert doubt.factors({3: 1.0}, ratio=1.05)[3] - 1 > 1.2 * moves[-1]  # nobody has run that yet


def test_a_strange_time_counts_no_more_than_the_strangest_believable_one():
    believed = [CurveFilter(ROWS).factors({0: 1.0}, ratio) for ratio in (3.0, 30.0)]
    assert believed[0] == believed[1] and max(believed[0]) < 1.6


def test_a_new_size_moves_most_and_hardly_the_others():
    doubt = CurveFilter(ROWS)
    doubt.add(128)
    factors = doubt.factors({4: 1.0}, ratio=1.2)
    assert len(factors) == 5 and factors[4] > factors[3] > 0.99


def test_the_first_time_of_a_new_size_is_hardly_believed():
    """It took half as long again as such a size does: the second time puts nearly all of it right."""
    doubt = CurveFilter(ROWS)
    doubt.add(256)
    factors = doubt.factors({4: 1.0}, ratio=1 / 1.5)
    assert factors[4] == pytest.approx(1 / 1.5, rel=0.03) and all(0.97 < factor <= 1 for factor in factors[:4])
