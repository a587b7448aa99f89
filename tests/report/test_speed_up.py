"""A speed-up has an interval that narrows with the rows, or says that they were too few."""

from pathlib import Path

import numpy as np
import pytest

from eagle_ray.report.comparison import MIN_PAIRS, Pair, SpeedUp, side_by_side
from eagle_ray.report.run_table import side_by_side_table
from eagle_ray.report.text import interval_words
from tests.support.reports import error, reader, row, write

TRUE_RATIO = 1.5
SPREAD = 0.3  # of a row's own ratio, as a standard deviation of its logarithm


def pairs_of(num: int, seed: int = 0) -> list[Pair]:
    """Rows whose seconds under plain decoding are TRUE_RATIO times their seconds with drafts, on average."""
    rng = np.random.default_rng(seed)
    tokens, plain_s = rng.integers(10, 128, num), rng.lognormal(-4.6, 0.2, num)
    saved = rng.lognormal(-(SPREAD**2) / 2, SPREAD, num) / TRUE_RATIO
    return [
        (k, k * s * share, k, k * s) for k, s, share in zip(tokens, plain_s, saved, strict=True)
    ]


def test_the_ratio_is_of_the_pooled_speeds():
    assert SpeedUp.of([(10, 1.0, 10, 2.0), (30, 3.0, 30, 10.0)]).ratio == pytest.approx(3.0)


def test_interval_contains_the_true_ratio_and_narrows_with_rows():
    few, many = (SpeedUp.of(pairs_of(num, seed=1)).interval for num in (MIN_PAIRS, 400))
    assert many[0] < TRUE_RATIO < many[1] and 2 * (many[1] - many[0]) < few[1] - few[0]


def test_nine_of_ten_smallest_intervals_contain_the_true_ratio():
    intervals = [SpeedUp.of(pairs_of(MIN_PAIRS, seed)).interval for seed in range(100)]
    assert sum(low <= TRUE_RATIO <= high for low, high in intervals) >= 88


def test_blocks_of_many_pairs_give_the_interval_of_the_pairs():
    counts = np.array(pairs_of(3000))
    rng = np.random.default_rng(3)
    drawn = [counts[rng.integers(3000, size=3000)].sum(0) for _ in range(1000)]
    low, high = np.quantile([a / b / (c / d) for a, b, c, d in drawn], [0.025, 0.975])
    assert SpeedUp.of(pairs_of(3000)).interval == pytest.approx((low, high), rel=0.01)


def test_the_same_pairs_give_the_same_interval():
    assert SpeedUp.of(pairs_of(20)) == SpeedUp.of(pairs_of(20))


def test_too_few_rows_are_said_in_place_of_the_interval():
    few = SpeedUp.of(pairs_of(MIN_PAIRS - 1))
    assert few.interval is None and few.ratio is not None
    assert interval_words(few.as_json()) == "too few rows for an interval"
    assert SpeedUp.of([]).as_json() == {
        "speed_up": None,
        "speed_up_interval": None,
        "speed_up_pairs": 0,
    }


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    """20 rows of one group and 2 of another, in both runs; the second run is half as fast and lacks one more row."""
    names = [("a", "code")] * 20 + [("b", "chat")] * 2
    fast = [
        row(f"{name}{i}", by, 10, 5, decode_s=1 + 0.05 * (i % 3))
        for i, (name, by) in enumerate(names)
    ]
    slow = [one | {"decode_s": 2.0} for one in fast]
    extra = row("only here", "code", 1000, 0, decode_s=0.001)
    return write(tmp_path / "fast", [*fast, extra]), write(
        tmp_path / "slow", [*slow, error("only here", "code")]
    )


def test_two_runs_are_compared_on_the_rows_that_both_have(runs):
    numbers = side_by_side(*map(reader, runs), "category").as_json()
    low, high = numbers["total"]["speed_up_interval"]
    assert (
        0.5 < low < numbers["total"]["speed_up"] < high < 0.6
        and numbers["total"]["speed_up_pairs"] == 22
    )
    table = side_by_side_table(numbers)
    assert f"[{low:.2f}, {high:.2f}]" in table and "too few rows" in table
    assert max(map(len, table.splitlines())) <= 100


def test_rows_without_tokens_after_their_first_are_no_pairs(tmp_path):
    names = [f"a{i}" for i in range(MIN_PAIRS)]
    one_token = write(tmp_path / "one", [row(name, "code", 0, 0, decode_s=3e-6) for name in names])
    more = write(tmp_path / "more", [row(name, "code", 10, 5) for name in names])
    for pair in ((one_token, more), (more, one_token)):
        numbers = side_by_side(*map(reader, pair), "category").as_json()
        assert SpeedUp.of([]).as_json().items() <= numbers["total"].items()
