"""The summary adds up; its ratios are of sums, not means of ratios; its tables are plain."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.report.comparison import side_by_side
from eagle_ray.report.run_table import run_table, side_by_side_table
from eagle_ray.report.summary import RunStats, sum_groups, summarise, summary_json
from eagle_ray.report.text import render
from eagle_ray.requests.row_schema import table_of
from tests.support.reports import SCHEMA, error, reader, row, write


@pytest.fixture
def run(tmp_path) -> Path:
    first = [row("a", "code", 10, 9), row("b", "chat", 30, 3)]
    return write(tmp_path / "run", first, [row("c", "code", 2, 0, decode_s=2.0), error("d", None)])


def test_groups_add_up_over_files(run):
    groups = summarise(reader(run), by="category")
    assert {name: (group.rows, group.errors) for name, group in groups.items()} == {
        "": (1, 1),
        "chat": (1, 0),
        "code": (2, 0),
    }
    assert sum_groups(groups) == summarise(reader(run))[""]
    assert groups["code"].acceptance_histogram == [3, 9]


def test_tau_is_pooled_over_steps(run):
    code = summarise(reader(run), by="category")["code"]
    assert code.mean_acceptance_length == pytest.approx(1 + 9 / 12)  # not the mean of 1.9 and 1.0
    assert code.nodes_per_step == 3 and code.decode_tokens_per_s == pytest.approx((19 + 2) / 3)


def test_nothing_is_no_division_by_zero(tmp_path):
    assert summarise(reader(tmp_path)) == {}
    empty = sum_groups({})
    assert (
        empty == RunStats()
        and empty.mean_acceptance_length is None
        and empty.decode_tokens_per_s is None
    )


def test_lists_of_different_lengths_are_added_by_depth(tmp_path):
    deep = row("b", "chat", 2, 0) | {"acceptance_histogram": [1, 0, 1], "accepted_by_depth": [1, 1]}
    whole = sum_groups(
        summarise(reader(write(tmp_path / "deep", [row("a", "chat", 2, 1)], [deep])))
    )
    assert whole.acceptance_histogram == [2, 1, 1] and whole.accepted_by_depth == [2, 1]


def test_the_table_shows_the_summary(run):
    work = {"tokens_per_s": 1234.5, "busy_slots": 0.93}
    work["planner_errors"] = {"b": "ZeroDivisionError: no seconds"}
    work["fallbacks"] = {
        "a": {"kernels": "no C compiler", "graphs": "off"},
        "b": {"kernels": "no C compiler"},
    }
    lines = run_table(
        summary_json(summarise(reader(run), "category"), "category") | {"last_work": work}
    ).splitlines()
    assert lines[0].split() == [
        "category",
        "rows",
        "errors",
        "tokens",
        "tau",
        "nodes/step",
        "tokens/s",
        "of",
        "a",
        "row",
    ]
    assert [line.split()[:5] for line in lines[1:5]] == [
        ["(none)", "1", "1", "0", "-"],
        ["chat", "1", "0", "34", "1.10"],
        ["code", "2", "0", "23", "1.75"],
        ["all", "4", "1", "57", "1.29"],
    ]
    assert lines[6:] == [
        "speed: 1,234 tokens/s, all workers together, slots 93% busy",
        "no drafts after the planner failed in b: ZeroDivisionError: no seconds",
        "WARNING: slower, without Triton's kernels in 2 workers: no C compiler (see `eagle-ray doctor`)",
        "WARNING: slower, without CUDA graphs in 1 workers: off (see `eagle-ray doctor`)",
        "steps that accepted depth 1, 2, ...: 29%",
        "finished by: length 3",
        "errors: prompt_too_long 1",
        "too long: 1 rows do not fit. Raise model.max_model_len, and run with --retry-errors.",
    ]


def test_a_comparison_is_by_row_and_names_what_differs(run, tmp_path):
    slower = [row("a", "code", 19, 0, decode_s=3.8), row("b", "chat", 33, 0, decode_s=3.3)]
    other = row("c", "code", 2, 0, decode_s=2.0) | {"output_token_ids": [0, 7, 2]}
    plain = write(tmp_path / "plain", slower, [other, error("d", None)])
    comparison = side_by_side(reader(plain), reader(run), "category")
    assert comparison.identical == 3 and [row.key for row in comparison.differences] == [("c", 0)]
    code = comparison.as_json()["groups"]["code"]
    assert code["speed_up"] == pytest.approx((21 / 3) / (21 / 5.8))
    assert "1.93x" in side_by_side_table(comparison.as_json())


def test_tables_are_aligned_plain_text():
    assert render(["task", "rows"], [["code", "4"], ["mathematics", "12"]]).splitlines() == [
        "task         rows",
        "code            4",
        "mathematics    12",
    ]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pa.array([b"code", b"\xff", None]), ["", "\\xff", "code"]),
        (pa.array([["a"], [], None]), ["", "['a']", "[]"]),
        (pa.array([{"a": 1}, {"a": 2}, None]), ["", "{'a': 1}", "{'a': 2}"]),
        (pa.array([1, 2, None]), ["", "1", "2"]),
    ],
)
def test_a_category_of_any_type_groups_by_its_text(tmp_path, values, names):
    (tmp_path / "data").mkdir()
    rows = table_of([row(id, None, 2, 1) for id in "abc"], SCHEMA)
    pq.write_table(
        rows.drop_columns("category").append_column("category", values),
        tmp_path / "data" / "a.parquet",
    )
    assert [
        (name, group.rows) for name, group in summarise(reader(tmp_path), by="category").items()
    ] == [(n, 1) for n in names]
