# ruff: noqa: F401, F811
"""Inputs that shrink, grow again and move, and what a start does about damage and late files after the end."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_ray.batch.driver import run as run_module
from eagle_ray.batch.driver.run import run_to_completion
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.row_index import INDEX
from tests.batch.test_starts import answered, append, cut_off, engine, flipped, rows, without_segments
from tests.conftest import MakeJob


def test_a_file_after_the_count_is_counted_at_the_next_start(make_job: MakeJob, engine, tmp_path, monkeypatch):
    config = make_job(rows(*"abcdefg"))
    summarize = run_module.summarize_run

    def summarize_before_a_late_file(run):
        found, data = summarize(run), Path(run.data.text)
        shutil.copy(data / "part-001-000000.parquet", data / "part-001-000099.parquet")
        return found

    monkeypatch.setattr(run_module, "summarize_run", summarize_before_a_late_file)
    run_to_completion(config)
    monkeypatch.setattr(run_module, "summarize_run", summarize)
    run_to_completion(config)
    assert answered(tmp_path).keys() == set("abcdefg")


@pytest.mark.parametrize("damage", [cut_off, without_segments, flipped])
def test_a_damaged_index_of_a_finished_run_is_built_again_where_it_is_needed(
    make_job: MakeJob,
    engine,
    tmp_path,
    damage: Callable,
):
    config = make_job(rows(*"abcdefg"), **{"execution.max_error_rate": 1.0})
    engine.bad = {"c"}
    run_to_completion(config)
    damage(tmp_path / "out" / INDEX)
    run_to_completion(config)  # needs no row
    engine.bad = set()
    assert run_to_completion(config, retry_errors=True)["total"]["errors"] == 0
    assert answered(tmp_path).keys() == set("abcdefg")


def test_content_that_changed_behind_an_old_time_is_found(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdefg"))
    run_to_completion(config)
    path = tmp_path / "in.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("Hi c", "Ho c"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OutputMismatch, match=r"1 rows of .* other rows now: c"):
        run_to_completion(config)


@pytest.mark.parametrize("num_starts_between", [0, 1])
def test_a_file_that_moved_may_grow(make_job: MakeJob, engine, tmp_path, num_starts_between):
    run_to_completion(make_job(rows(*"abc")))
    (tmp_path / "moved").mkdir()
    path = Path(shutil.move(tmp_path / "in.jsonl", tmp_path / "moved" / "in.jsonl"))
    config = make_job(**{"input.path": str(path)})
    for _ in range(num_starts_between):
        run_to_completion(config)
    append(path, rows("d"))
    run_to_completion(config)
    assert sorted(engine.made) == list("abcd") and answered(tmp_path).keys() == set("abcd")
    path.write_text(path.read_text().replace("Hi a", "Ho a"))
    with pytest.raises(OutputMismatch):
        run_to_completion(config)


def test_a_last_line_that_was_cut_is_answered_once_it_is_whole(make_job: MakeJob, engine, tmp_path, caplog):
    caplog.set_level(logging.INFO, "eagle_ray")
    config = make_job(rows(*"abc"))
    path = tmp_path / "in.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + last[:12])
    run_to_completion(config)
    assert answered(tmp_path).keys() == {"a", "b"} and "line 3: the last line is not whole" in caplog.text
    with path.open("a") as file:
        file.write(last[12:] + json.dumps({"id": "d", "prompt": "Hi d"}))
    run_to_completion(config)
    assert sorted(engine.made) == list("abcd") and answered(tmp_path).keys() == set("abcd")
    assert "has grown" in caplog.text and "rewritten" not in caplog.text
    path.write_text(path.read_text() + " x")
    run_to_completion(config)
    assert "1 rows are gone from" in caplog.text and answered(tmp_path).keys() == set("abcd")


def test_a_last_line_without_an_end_may_get_one(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abc"))
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    run_to_completion(config)
    with path.open("a") as file:
        file.write("\n" + json.dumps({"id": "d", "prompt": "Hi d"}))
    run_to_completion(config)
    with path.open("a") as file:
        file.write(" \n")  # no other row
    run_to_completion(config)
    assert sorted(engine.made) == list("abcd") and answered(tmp_path).keys() == set("abcd")


def test_a_row_that_went_and_comes_back_is_compared(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdef"))
    run_to_completion(config)
    path = tmp_path / "in.jsonl"
    path.write_text("")
    append(path, rows(*"abc"))
    run_to_completion(config)
    append(path, rows(*"xyzd"))  # d is what it was
    run_to_completion(config)
    assert sorted(engine.made) == list("abcdefxyz")
    append(path, rows("e", text="Other"))
    with pytest.raises(OutputMismatch, match=r"1 rows of .* other rows now: e"):
        run_to_completion(config)
    path.write_text(path.read_text().replace("Other e", "Hi e"))
    run_to_completion(config)
    path.write_text(path.read_text().replace("Hi d", "Other d"))
    with pytest.raises(OutputMismatch, match=r"1 rows of .* other rows now: d"):
        run_to_completion(config)


def test_a_row_may_move_to_another_file(make_job: MakeJob, engine, tmp_path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    append(inputs / "a.jsonl", rows(*"abc"))
    append(inputs / "b.jsonl", rows(*"xyz"))
    config = make_job(None, **{"input.path": str(inputs)})
    run_to_completion(config)
    (inputs / "a.jsonl").write_text("")
    append(inputs / "a.jsonl", rows(*"ab"))
    append(inputs / "b.jsonl", rows("c"))
    run_to_completion(config)
    (inputs / "b.jsonl").unlink()
    run_to_completion(config)
    assert sorted(engine.made) == list("abcxyz")
    append(inputs / "b.jsonl", rows(*"xyz", text="Other"))
    with pytest.raises(OutputMismatch, match=r"3 rows of .*b.jsonl"):
        run_to_completion(config)


def test_answered_rows_keep_their_carried_columns_and_the_log_says_so(make_job: MakeJob, engine, tmp_path, caplog):
    caplog.set_level(logging.INFO, "eagle_ray")
    config = make_job([row | {"category": "one"} for row in rows(*"abc")])
    run_to_completion(config)
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().replace("one", "two"))
    run_to_completion(config)
    assert "in.jsonl was rewritten" in caplog.text and "keep the carried columns" in caplog.text
