"""Scores of a run's samples, from a column, a judging run or a file."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.cli.run_scores import run_scores
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.runs.part_files import part_name
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath

CATEGORY = pa.field("category", pa.string())
JUDGED = [pa.field("input_request_id", pa.string()), pa.field("input_sample_index", pa.int32())]
JUDGED += [pa.field("input_text", pa.string()), CATEGORY]
COMMON = {"row_index": 0, "source_file": "a", "run_id": "r", "attempt": 1, "status": "ok"}


def write_run(path: Path, rows: list[dict[str, Any]], carried: list[pa.Field]) -> StoragePath:
    output = StoragePath.of(path)
    table = pa.Table.from_pylist([COMMON | row for row in rows], output_schema(carried))
    (output / "data" / part_name(1, 0)).create(parquet_bytes(table, "zstd"))
    (output / "_run.json").write_atomic(b"{}")
    return output


@pytest.fixture
def answers(tmp_path) -> StoragePath:
    """Two problems with two samples each."""
    texts = {"a": ["so 4", "I say 4"], "b": ["5", "6"]}
    rows = [
        {"request_id": id, "sample_index": j, "text": text, "category": id.upper()}
        for id, both in texts.items()
        for j, text in enumerate(both)
    ]
    return write_run(tmp_path / "answers", rows, [CATEGORY])


@pytest.fixture
def judge(tmp_path, answers) -> StoragePath:
    """Its grades: 4 is right, and so is 6."""
    grades = {("a", 0): "Yes.", ("a", 1): "yes", ("b", 0): "no", ("b", 1): "Yes"}
    rows = [
        {
            "request_id": f"{id}#{j}" if j else id,
            "sample_index": 0,
            "text": grade,
            "input_request_id": id,
            "input_sample_index": j,
            "input_text": "so 4" if id == "a" else str(5 + j),
            "category": id.upper(),
        }
        for (id, j), grade in grades.items()
    ]
    return write_run(tmp_path / "judge", rows, JUDGED)


def test_a_judging_run_is_scored_by_the_problems_that_it_judged(judge):
    scores = run_scores(judge, score="text")
    assert scores["by"] == "category" and scores["total"]["problems"] == 2
    assert {k: value["mean"] for k, value in scores["total"]["pass_at"].items()} == {
        "1": 0.75,
        "2": 1.0,
    }
    assert (
        scores["groups"]["A"]["mean"]["mean"] == 1
        and scores["groups"]["A"]["majority"]["mean"] == 1
    )


def test_judged_run_has_the_same_scores_and_its_own_answers(answers, judge):
    scores = run_scores(answers, score="text", source=judge.text, answer_pattern=r"\d+$")
    assert {k: value["mean"] for k, value in scores["total"]["pass_at"].items()} == {
        "1": 0.75,
        "2": 1.0,
    }
    assert scores["total"]["majority"]["mean"] == 0.75  # 4 twice is right; 5 and 6 are tied
    assert (
        run_scores(answers, score="text", source=judge.text)["total"]["majority"] is None
    )  # no two texts are equal


def test_a_file_of_scores_is_joined_by_id_and_sample(answers, tmp_path):
    rows = [{"request_id": "a", "sample_index": j, "passed": j == 1} for j in (0, 1)]
    file = tmp_path / "scores.jsonl"
    file.write_text(
        "\n".join(map(json.dumps, [*rows, {"request_id": "b", "sample_index": 1, "passed": True}]))
    )
    scores = run_scores(answers, source=str(file))
    assert (
        scores["column"] == "passed"
        and scores["total"]["scored"] == 3
        and scores["total"]["samples"] == 4
    )
    file.write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    with pytest.raises(ConfigError, match="has two scores for id 'a' sample 0"):
        run_scores(answers, source=str(file))


def test_a_file_of_scores_whose_texts_are_not_utf_8_is_named(tmp_path, answers):
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"id": bad, "score": [1.0]}), tmp_path / "scores.parquet")
    with pytest.raises(ConfigError, match=r"--scores: cannot read .*scores\.parquet"):
        run_scores(answers, source=str(tmp_path / "scores.parquet"))


def test_a_run_with_a_column_of_a_usual_name_needs_no_flag(tmp_path, answers):
    assert run_scores(answers) is None
    rows = [
        {"request_id": f"q{i}", "sample_index": 0, "text": "x", "score": float(i)} for i in range(4)
    ]
    run = write_run(tmp_path / "graded", rows, [pa.field("score", pa.float64())])
    assert run_scores(run)["total"]["mean"]["mean"] == 1.5


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"score": "grade"}, r"--score: .* has no column 'grade'. Columns: request_id,"),
        ({"score": "txt"}, r"--score: .* has no column 'txt'. Did you mean text\?$"),
        ({"source": "nowhere.jsonl"}, r"--scores: cannot read .*nowhere\.jsonl"),
        ({"source": "nowhere.txt"}, r"is neither a run nor a file of \.parquet, \.jsonl, \.csv"),
        (
            {"source": "ANSWERS", "score": "text"},
            r"must have a score column .* and input_request_id",
        ),
        ({"score": "text", "answer_pattern": "("}, r"--answer: '\(' is not a regular expression"),
    ],
)
def test_what_does_not_fit_is_named(answers, arguments, said):
    if arguments.get("source") == "ANSWERS":
        arguments = arguments | {"source": answers.text}
    with pytest.raises(ConfigError, match=said):
        run_scores(answers, **arguments)
