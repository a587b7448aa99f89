"""Speeds and dollars of a run, and the estimate next to them."""

import pytest

from eagle_ray.report.cost import cost, cost_lines, duration, money

TOTAL = {"rows": 200, "errors": 0, "output_tokens": 40_000}
USAGE = {"elapsed_s": 100.0, "worker_s": 360.0, "gpus_per_worker": 2}


def test_dollars_are_of_gpu_hours_or_of_worker_hours():
    spent = cost(TOTAL, USAGE, 3.0)
    assert (spent["rows_per_s"], spent["tokens_per_s"]) == (2.0, 400.0)
    assert (spent["unit"], spent["hours"]) == ("GPU", pytest.approx(0.2))
    assert spent["dollars"] == pytest.approx(0.6) and spent["rows_per_dollar"] == pytest.approx(
        200 / 0.6
    )
    assert spent["dollars_per_million_tokens"] == pytest.approx(15.0)
    on_cpu = cost(TOTAL, USAGE | {"gpus_per_worker": 0}, 3.0)
    assert (on_cpu["unit"], on_cpu["dollars"]) == ("worker", pytest.approx(0.3))


def test_nothing_known_is_nothing_said():
    assert cost(TOTAL, None, 3.0) is None and cost_lines(None, None) == []
    assert cost(TOTAL, USAGE | {"elapsed_s": 0.0}, None) is None
    spent = cost({"rows": 1, "errors": 1, "output_tokens": 0}, USAGE, None)
    assert spent["dollars"] is None and spent["dollars_per_million_tokens"] is None


def test_the_lines_show_the_truth_next_to_the_estimate():
    estimate = {"seconds": [90.0, 80.0, 130.0], "dollars": [0.5, 0.4, 0.7]}
    assert cost_lines(cost(TOTAL, USAGE, 3.0), estimate) == [
        "time: 100 s with loading and all attempts, 2.00 rows/s, 400 tokens/s",
        "cost: $0.6 for 0.2 GPU hours at $3.00; 333 rows and 66,667 tokens per dollar",
        "estimate: 90 s [80 s, 2.2 min], $0.5 [$0.4, $0.7]; it took 100 s, $0.6",
    ]
    unpriced = cost_lines(cost(TOTAL, USAGE, None), estimate | {"dollars": None})
    assert unpriced[1:] == ["estimate: 90 s [80 s, 2.2 min]; it took 100 s"]


def test_units():
    assert [duration(s) for s in (7, 119, 600, 7200, 400_000)] == [
        "7 s",
        "119 s",
        "10.0 min",
        "2.0 h",
        "111.1 h",
    ]
    assert [money(x) for x in (0, 0.00123, 0.5, 12, 1234.5)] == [
        "$0.00",
        "$0.0012",
        "$0.5",
        "$12.00",
        "$1,234.50",
    ]
