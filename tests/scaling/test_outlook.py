"""Lengths of outputs, the work that is left, and what is foreseen of it."""

import numpy as np
import pytest

from eagle_ray.scaling.lengths import LengthCounts, bins_of
from eagle_ray.scaling.outlook import Observation, Outlook
from eagle_ray.scaling.work import Amount, ClassLeft, Speed, SpeedWindow, tokens_left


def counts_of(done, running=()) -> LengthCounts:
    counts = LengthCounts(running=bins_of(running))
    counts.add_done(done)
    return counts


def test_the_mean_of_rows_that_are_done_is_theirs():
    curve = counts_of([10, 200, 3000]).curve(8192)
    assert curve.mean == pytest.approx(1070, rel=0.01)
    assert counts_of([7] * 5).curve(8192).variance == pytest.approx(0, abs=1)


def test_rows_that_still_run_are_longer_than_those_that_are_done():
    """A hundred rows of 100 and 1,000 tokens begin together, and after 500 tokens half of them are done."""
    half_way = counts_of([100] * 50, running=[500] * 50)
    assert counts_of([100] * 50).curve(1000).mean == pytest.approx(100, rel=0.01)
    assert 500 < half_way.curve(1000).mean <= 560
    left, _ = half_way.curve(1000).tokens_left(half_way.running)
    assert left == pytest.approx(25_000, rel=0.1)


def test_survival_finds_heavy_tails_mean_from_first_rows():
    """Rows in 64 slots for a while: the plain mean of those that are done is too small."""
    draw = np.random.default_rng(0)
    lengths = np.clip(200 * (1 + draw.pareto(1.5, 4000)), 1, 8192)
    ages = np.zeros(64)
    rows, done = list(range(64)), []
    waiting = iter(range(64, 4000))
    for _ in range(800):
        ages += 1
        for slot in np.flatnonzero(ages >= lengths[rows]):
            done.append(lengths[rows[slot]])
            rows[slot], ages[slot] = next(waiting), 0
    true = lengths.mean()
    curve = counts_of(done, ages).curve(8192)
    assert np.mean(done) < 0.75 * true
    assert abs(curve.mean / true - 1) < abs(np.mean(done) / true - 1) / 2


def test_classes_count_by_their_own_lengths():
    short, long = counts_of([100] * 50), counts_of([1000] * 50)
    classes = {"short": ClassLeft(short, 0.0), "long": ClassLeft(long, 100.0)}
    assert tokens_left(classes, 8192).expected == pytest.approx(100_000, rel=0.1)
    together = {"": ClassLeft(short.plus(long), 100.0)}
    assert tokens_left(together, 8192).expected == pytest.approx(55_000, rel=0.1)


def test_nothing_is_left_without_rows():
    assert tokens_left({"": ClassLeft(counts_of([5, 6]), 0.0)}, 100).expected == 0.0
    assert tokens_left({"": ClassLeft(LengthCounts(), 10.0)}, 100).expected == 1000.0


def test_quantiles_of_an_amount():
    amount = Amount(100.0, 20.0)
    assert amount.quantile(0.5) < 100 < amount.quantile(0.8) < amount.quantile(0.95) < 150
    assert Amount(100.0, 0.0).quantile(0.95) == 100.0
    assert amount.times(2.0).deviation == 40.0 and amount.times(1.0, 0.15).deviation == 25.0


def test_speed_is_that_of_the_last_minutes():
    window = SpeedWindow()
    tokens = 0.0
    for minute in range(60):
        window.add(60.0 * minute, 120.0 * minute, tokens)
        tokens += 60 * (100 if minute < 40 else 50)
    found = window.speed()
    assert found is not None and found.tokens_per_s == pytest.approx(25, rel=0.01)
    window.add(9999.0, 120.0 * 59, tokens)  # no worker has decoded since
    assert window.speed() == found
    assert SpeedWindow().speed() is None


def outlook_of(done, running, waiting, tokens=10_000.0) -> Outlook:
    outlook = Outlook(max_tokens=1000)
    classes = {"": ClassLeft(counts_of(done, running), waiting)}
    outlook.observe(Observation(0.0, 0.0, 0.0, classes, slots=10))
    outlook.observe(Observation(100.0, tokens, 100.0, classes, slots=10))
    return outlook


def test_more_workers_end_earlier_and_wait_for_the_last_rows():
    """100 tokens a second, 10 a slot: 1,000 rows of 100 tokens are 1,000 s of a worker."""
    outlook = outlook_of([100] * 10_000, [], 1000.0)
    one, four = outlook.seconds_left(1), outlook.seconds_left(4)
    assert one.expected == pytest.approx(1005, rel=0.02) and four.expected < 300
    assert one.expected < one.likely < one.sure < 1.2 * one.expected
    assert outlook.done_share == pytest.approx(10 / 11, rel=0.01)
    last = outlook_of([100] * 100, [90.0], 0.0)
    assert 0.5 < last.seconds_left(4).expected < 4  # ten tokens of one row
    assert outlook_of([100] * 100 + [1000], [500.0], 0.0).drain_s(0.8) == pytest.approx(50, rel=0.3)


def test_a_speed_of_before_counts_until_there_is_one():
    outlook = Outlook(1000, prior=Speed(200.0, 0.1))
    classes = {"": ClassLeft(LengthCounts(), 10.0)}
    assert outlook.seconds_left(1) is None and outlook.drain_work() is None
    outlook.observe(Observation(0.0, 0.0, 0.0, classes, slots=10))
    assert outlook.work.expected == pytest.approx(50)
    assert Outlook(1000).work is None
