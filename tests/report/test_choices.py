"""What a run says of its scored rows: accuracy, label mass, and whether confidence can be trusted."""

import math

import pyarrow as pa
import pytest

from eagle_ray.report.choices import choices_line, choices_summary, confidence_of

SCHEMA = pa.schema(
    [
        ("scores", pa.list_(pa.float64())),
        ("best", pa.int32()),
        ("best_by_byte", pa.int32()),
        ("label_mass", pa.float64()),
        ("answer", pa.int64()),
    ]
)


def read(*rows):
    tables = [pa.Table.from_pylist([row], SCHEMA) for row in rows]
    return lambda columns: [table.select(columns) for table in tables]


def row(scores, best, by_byte, mass, answer):
    values = (scores, best, by_byte, mass, answer)
    return dict(zip(SCHEMA.names, values, strict=True))


CERTAIN = row([math.log(0.9), math.log(0.05)], 0, 1, 0.95, 0)
WRONG = row([math.log(0.2), math.log(0.6)], 1, 1, 0.8, 0)
OPEN = row([-1.0, -2.0], 0, 0, 0.5, None)
GENERATED = row(None, None, None, None, 1)


def test_accuracy_is_of_rows_with_an_answer():
    summary = choices_summary(read(CERTAIN, WRONG, OPEN, GENERATED), has_answer=True)
    assert (summary["rows"], summary["answered"], summary["accuracy"]) == (3, 2, 0.5)
    assert summary["accuracy_by_byte"] == 0.0
    assert summary["label_mass"] == pytest.approx((0.95 + 0.8 + 0.5) / 3)
    assert (
        choices_line(summary) == "scores: 3 rows, accuracy 0.500, by byte 0.000, label mass 0.750"
    )


def test_each_confidence_bin_counts_its_rows_and_right_ones():
    calibration = choices_summary(read(CERTAIN, WRONG), has_answer=True)["calibration"]
    assert calibration["rows"] == [0] * 7 + [1, 0, 1]
    assert calibration["right"] == [0] * 7 + [0, 0, 1]
    assert calibration["confidence"][9] == pytest.approx(0.9 / 0.95)
    assert confidence_of([-3.0, -3.0]) == 0.5


def test_best_scores_and_margins_are_counted():
    summary = choices_summary(read(CERTAIN, WRONG, OPEN), has_answer=False)
    best = summary["best_scores"]
    assert best["low"] == -1.0 and sum(best["counts"]) == 3 and best["counts"][-1] == 1
    assert summary["margins"]["low"] == pytest.approx(1.0)
    alone = choices_summary(read(row([-1.0], 0, 0, 0.5, None)), has_answer=False)
    assert alone["margins"] is None and alone["best_scores"]["counts"][0] == 1


@pytest.mark.parametrize("answer", [-1, 2, None])
def test_an_answer_that_is_no_index_does_not_count(answer):
    summary = choices_summary(read(CERTAIN | {"answer": answer}), has_answer=True)
    assert summary["answered"] == 0 and summary["accuracy"] is None
    assert choices_line(summary) == "scores: 1 row, label mass 0.950"


def test_runs_without_scores_say_nothing():
    assert choices_summary(read(GENERATED), has_answer=False) is None and choices_line(None) == ""
