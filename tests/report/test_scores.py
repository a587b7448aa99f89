"""Scores over samples: against the slow definitions, and where there is too little to say."""

from itertools import combinations

import numpy as np
import pytest

from eagle_ray.report.scores import (
    ScoredSample,
    as_score,
    interval_of,
    majority_score,
    pass_at_k,
    score_report,
    scores_text,
)


def samples(
    problem: str, scores: list[float | None], answers: str = "", group: str = ""
) -> list[ScoredSample]:
    given = answers or [None] * len(scores)
    return [
        ScoredSample(problem, group, score, answer)
        for score, answer in zip(scores, given, strict=True)
    ]


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_passing_sample(num):
    for passed in range(num + 1):
        for k in range(1, num + 1):
            draws = list(combinations(range(num), k))  # the first `passed` samples pass
            share = sum(min(draw) < passed for draw in draws) / len(draws)
            assert pass_at_k(num, passed, k) == pytest.approx(share)


def test_pass_at_k_of_many_samples_is_the_direct_formula():
    assert pass_at_k(1000, 5, 100) == pytest.approx(
        1 - np.prod([(900 - i) / (1000 - i) for i in range(5)])
    )


@pytest.mark.parametrize(
    "value, score",
    [
        *[
            (True, 1),
            (False, 0),
            (3, 3),
            (0.5, 0.5),
            ("1", 1),
            (" Yes. ", 1),
            ("Incorrect", 0),
            ("7.5", 7.5),
        ],
        *[
            ("maybe", None),
            (None, None),
            (float("nan"), None),
            ("inf", None),
            ([1], None),
            ("", None),
        ],
    ],
)
def test_what_counts_as_a_score(value, score):
    assert as_score(value) == score


def test_majority_is_the_commonest_answer_and_ties_count_equally():
    assert majority_score([("4", 1), ("4", 1), ("5", 0)]) == 1
    assert majority_score([("4", 1), ("5", 0)]) == 0.5
    assert (
        majority_score([(None, 1), (None, 0), ("5", 0), ("5", 0)]) == 0
    )  # answers that are absent are not equal


def test_a_report_by_group_weighs_problems_equally():
    rows = [*samples("a", [1, 1], "xy", "math"), *samples("b", [0, 0, 0, 0], "xxxx", "math")]
    report = score_report([*rows, *samples("c", [0, 1], "xz", "code")])
    assert report["pass_at_score"] == 1 and list(report["groups"]) == ["code", "math"]
    math = report["groups"]["math"]
    assert math["mean"]["mean"] == 0.5 and math["problems"] == 2 and math["samples"] == 6
    assert {k: value["mean"] for k, value in math["pass_at"].items()} == {"1": 0.5, "2": 0.5}
    assert (
        report["groups"]["code"]["pass_at"]["2"]["mean"] == 1
        and report["groups"]["code"]["majority"] is None
    )
    assert report["total"]["majority"]["mean"] == pytest.approx((1 + 0 + 0.5) / 3)


def test_samples_without_a_score_are_counted_and_left_out():
    report = score_report([*samples("a", [1, None, 0, 1]), *samples("b", [None])]) | {
        "column": "passed",
        "by": None,
    }
    assert (
        report["total"]["samples"] == 5
        and report["total"]["scored"] == 3
        and report["total"]["problems"] == 2
    )
    assert report["total"]["mean"]["mean"] == pytest.approx(2 / 3)
    assert list(report["total"]["pass_at"]) == ["1", "2", "3"]
    assert "2 of 5 samples have no score and are left out" in scores_text(report)
    assert "pass@2" in scores_text(report)


def test_grades_have_no_pass_at_k_unless_it_is_said_what_passes():
    rows = [*samples("a", [7, 9]), *samples("b", [2, 3])]
    assert score_report(rows)["total"]["pass_at"] == {}
    passed = score_report(rows, pass_at=8)["total"]["pass_at"]
    assert passed["1"]["mean"] == 0.25 and passed["2"]["mean"] == 0.5


def test_one_sample_per_problem_has_a_mean_only():
    report = score_report([sample for i in range(4) for sample in samples(f"p{i}", [1])])
    assert report["total"]["pass_at"] == {} and report["total"]["majority"] is None


def test_nothing_scored_is_no_number():
    report = score_report(samples("a", [None])) | {"column": "x", "by": None}
    assert report["total"]["mean"] == {"mean": None, "interval": None} and "-" in scores_text(
        report
    )


def test_intervals_are_wilson_for_binary_scores_and_else_student():
    assert interval_of(np.array([1.0] * 8 + [0.0] * 2)) == pytest.approx(
        (0.4902, 0.9433), abs=1e-4
    )  # by hand
    assert interval_of(np.ones(10))[0] == pytest.approx(0.7225, abs=1e-4)
    assert interval_of(np.array([0.5, 0.25])) is None
    low, high = interval_of(np.arange(10) / 10)
    assert (low, high) == pytest.approx(
        (0.2334, 0.6666), abs=2e-3
    )  # 0.45 +- 2.262 * 0.3028 / sqrt(10)


def test_intervals_hold_the_true_mean_about_as_often_as_they_say():
    draw = np.random.default_rng(0)
    for values in (draw.binomial(1, 0.2, (1000, 30)).astype(float), draw.beta(2, 5, (1000, 30))):
        truth = 0.2 if set(np.unique(values)) <= {0.0, 1.0} else 2 / 7
        held = [low <= truth <= high for low, high in map(interval_of, values)]
        assert 0.92 <= np.mean(held) <= 0.985
