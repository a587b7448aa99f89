"""Inputs that change, grow and move, and what a start does about damage and late files after the end."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from eagle_ray.batch.driver import settle
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.row_index import INDEX_DIRECTORY
from tests.support.jobs import MakeJob
from tests.support.starts import (
    DriverKilled,
    answered_prompts,
    append,
    delete_segments,
    flip_segment_bits,
    rows,
    truncate_index_files,
)


def test_a_file_after_the_count_is_counted_at_the_next_start(
    make_job: MakeJob, engine, tmp_path, monkeypatch
):
    config = make_job(rows(*"abcdefg"))
    summarize = settle.summarize_run

    def summarize_before_a_late_file(run):
        found, data = summarize(run), Path(run.data.text)
        shutil.copy(data / "part-001-000000.parquet", data / "part-001-000099.parquet")
        return found

    monkeypatch.setattr(settle, "summarize_run", summarize_before_a_late_file)
    complete_job(config)
    monkeypatch.setattr(settle, "summarize_run", summarize)
    complete_job(config)
    assert answered_prompts(tmp_path).keys() == set("abcdefg")


@pytest.mark.parametrize("damage", [truncate_index_files, delete_segments, flip_segment_bits])
def test_damaged_index_of_a_finished_run_is_rebuilt_if_needed(
    make_job: MakeJob,
    engine,
    tmp_path,
    damage: Callable,
):
    config = make_job(rows(*"abcdefg"), **{"execution.max_error_rate": 1.0})
    engine.bad = {"c"}
    complete_job(config)
    damage(tmp_path / "out" / INDEX_DIRECTORY)
    complete_job(config)  # needs no row
    engine.bad = set()
    assert complete_job(config, retry_errors=True)["total"]["errors"] == 0
    assert answered_prompts(tmp_path).keys() == set("abcdefg")


def test_content_that_changed_behind_an_old_time_is_found(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdefg"))
    complete_job(config)
    path = tmp_path / "in.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("Hi c", "Ho c"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OutputMismatch, match=r"1 rows of .* other rows now: c"):
        complete_job(config)


@pytest.mark.parametrize("num_starts_between", [0, 1])
def test_a_file_that_moved_may_grow(make_job: MakeJob, engine, tmp_path, num_starts_between):
    complete_job(make_job(rows(*"abc")))
    (tmp_path / "moved").mkdir()
    path = Path(shutil.move(tmp_path / "in.jsonl", tmp_path / "moved" / "in.jsonl"))
    config = make_job(**{"input.path": str(path)})
    for _ in range(num_starts_between):
        complete_job(config)
    append(path, rows("d"))
    complete_job(config)
    assert sorted(engine.made) == list("abcd") and answered_prompts(tmp_path).keys() == set("abcd")
    path.write_text(path.read_text().replace("Hi a", "Ho a"))
    with pytest.raises(OutputMismatch):
        complete_job(config)


def test_a_last_line_that_was_cut_is_answered_once_it_is_whole(
    make_job: MakeJob, engine, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "eagle_ray")
    config = make_job(rows(*"abc"))
    path = tmp_path / "in.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + last[:12])
    complete_job(config)
    assert (
        answered_prompts(tmp_path).keys() == {"a", "b"}
        and "line 3: the last line is not whole" in caplog.text
    )
    with path.open("a") as file:
        file.write(last[12:] + json.dumps({"id": "d", "prompt": "Hi d"}))
    complete_job(config)
    assert sorted(engine.made) == list("abcd") and answered_prompts(tmp_path).keys() == set("abcd")
    assert "has grown" in caplog.text and "rewritten" not in caplog.text
    path.write_text(path.read_text() + " x")
    with pytest.raises(OutputMismatch, match=r"row 3 of .*in.jsonl, which is gone"):
        complete_job(config)


def test_a_last_line_without_an_end_may_get_one(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abc"))
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    complete_job(config)
    with path.open("a") as file:
        file.write("\n" + json.dumps({"id": "d", "prompt": "Hi d"}))
    complete_job(config)
    with path.open("a") as file:
        file.write(" \n")  # no other row
    complete_job(config)
    assert sorted(engine.made) == list("abcd") and answered_prompts(tmp_path).keys() == set("abcd")


@pytest.mark.parametrize("name", ["in.csv", "in.parquet"])
def test_a_file_of_any_format_may_grow(make_job: MakeJob, engine, tmp_path, name):
    path = tmp_path / name
    config = make_job(None, **{"input.path": str(path)})
    for names in ("abc", "abcd", "abcx"):
        table = pa.Table.from_pylist(rows(*names))
        if path.suffix == ".csv":
            write_csv(table, path)
        else:
            pq.write_table(table, path)
        if names == "abcx":
            with pytest.raises(
                OutputMismatch, match=r"1 rows of .*: d \(row 3 of .*, which is gone\)"
            ):
                complete_job(config)
        else:
            complete_job(config)
    assert engine.made == list("abcd")


def test_a_file_of_equal_content_is_the_same_file(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abc"))
    complete_job(config)
    path, moved = tmp_path / "in.jsonl", tmp_path / "moved" / "in.jsonl"
    moved.parent.mkdir()
    shutil.copyfile(path, moved)
    path.unlink()
    shutil.copyfile(moved, path)
    os.utime(path, (1, 1))
    complete_job(config)
    complete_job(make_job(**{"input.path": str(moved)}))
    shutil.rmtree(tmp_path / "out" / INDEX_DIRECTORY)
    path.unlink()
    complete_job(make_job(**{"input.path": str(moved)}))
    assert engine.made == list("abc")


def test_a_row_may_move_to_another_file(make_job: MakeJob, engine, tmp_path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    append(inputs / "a.jsonl", rows(*"abc"))
    append(inputs / "b.jsonl", rows(*"xyz"))
    config = make_job(None, **{"input.path": str(inputs)})
    complete_job(config)
    (inputs / "a.jsonl").write_text("")
    append(inputs / "a.jsonl", rows(*"ab"))
    append(inputs / "b.jsonl", rows("c"))
    complete_job(config)
    (inputs / "b.jsonl").unlink()
    complete_job(config)
    assert sorted(engine.made) == list("abcxyz")
    append(inputs / "b.jsonl", rows(*"xyz", text="Other"))
    with pytest.raises(
        OutputMismatch, match=r"4 rows of .*b.jsonl are other rows now: x, y, z, c \(row 3"
    ):
        complete_job(config)


def test_answered_rows_keep_carried_columns_and_the_log_says_so(
    make_job: MakeJob, engine, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "eagle_ray")
    config = make_job([row | {"category": "one"} for row in rows(*"abc")])
    complete_job(config)
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().replace("one", "two"))
    complete_job(config)
    assert (
        "in.jsonl was rewritten" in caplog.text
        and "answered ones keep their carried columns" in caplog.text
    )


def test_rows_that_are_gone_are_named_by_their_ids(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows("first", "second", "third", "fourth"))
    engine.rows_per_file, engine.max_files = 3, 1
    with suppress(DriverKilled):
        complete_job(config)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(OutputMismatch) as refused:
        complete_job(config)
    place = "of .*in.jsonl, which is gone"
    says = rf"second \(row 1 {place}\), third \(row 2 {place}\), row 3 {place}\."
    assert re.search(says, str(refused.value))
