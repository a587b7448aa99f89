"""Intervals against known quantiles and by how often they hold the truth."""

import math
import random

import pytest

from eagle_ray.report.intervals import pooled_ratio, ratio_interval, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "wanted"),
    [
        (0.95, 1, 6.314),
        (0.975, 1, 12.706),
        (0.95, 4, 2.132),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.95, 100, 1.660),
    ],
)
def test_quantiles_are_the_tables(probability, freedom, wanted):
    assert t_quantile(probability, freedom) == pytest.approx(wanted, abs=2e-3)


def test_the_mean_is_geometric_and_the_interval_holds_it():
    interval = ratio_interval([1.0, 4.0])
    assert interval.mean == pytest.approx(2.0)
    assert interval.low < interval.bound < interval.mean < interval.high
    assert ratio_interval([1.5, 1.5, 1.5]).low == pytest.approx(1.5)


def test_one_round_says_nothing_of_its_error():
    assert ratio_interval([2.0]).bound == 0 and ratio_interval([2.0]).high == math.inf


def test_intervals_hold_the_truth_as_often_as_they_say():
    """1000 sets of 5 rounds; by chance alone a fair interval leaves these ranges once in ten thousand times."""
    rng = random.Random(0)
    sets = [[2 * math.exp(rng.gauss(0, 0.1)) for _ in range(5)] for _ in range(1000)]
    intervals = [ratio_interval(ratios) for ratios in sets]
    assert 920 <= sum(i.low <= 2 <= i.high for i in intervals) <= 977
    assert 920 <= sum(i.bound <= 2 for i in intervals) <= 977


def test_pooled_ratio_is_of_sums_and_unaffected_by_uneven_rounds():
    steady, uneven = [(10, 1.0)] * 40, [(10, 0.5), (10, 1.5)] * 20
    pooled = pooled_ratio(list(zip(uneven, steady, strict=True)))
    assert (
        pooled.mean == pytest.approx(1.0)
        and 0.8 < pooled.low < pooled.bound < 1 < pooled.high < 1.25
    )
    assert ratio_interval([1.0 / seconds for _, seconds in uneven]).mean > 1.1
