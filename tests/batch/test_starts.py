"""Second starts: what was indexed is not read again, inputs may grow, and a lost or damaged index costs only time.

A toy engine writes one row per sample where the pipeline would run; the rest is the job's own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver import execute
from eagle_ray.batch.driver import input_plan as plan_module
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import previous_run
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.batch.reader import fingerprints
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.runs.job_errors import OutputDamaged, OutputMismatch
from eagle_ray.runs.layout import STOPPED_FILE
from eagle_ray.runs.row_index import INDEX_DIRECTORY
from tests.support.jobs import MakeJob
from tests.support.starts import (
    DriverKilled,
    answered_prompts,
    append,
    delete_index_files,
    delete_segments,
    flip_segment_bits,
    leave_index_half_written,
    rows,
    truncate_index_files,
    write_other_json,
)


def test_a_second_start_reads_neither_input_nor_output(
    make_job: MakeJob, engine, scans, reads, tmp_path
):
    config = make_job(rows(*"abcdefg"))
    first = complete_job(config)
    assert engine.made == list("abcdefg") and scans == [("in.jsonl", 0)] and len(reads) == 3
    manifest = json.loads((tmp_path / "out" / "_run.json").read_text())
    second = complete_job(config)
    assert scans == [("in.jsonl", 0)] and len(reads) == 3 and len(engine.made) == 7
    assert second == first | {"attempt": 2} and (tmp_path / "out" / "_SUCCESS").exists()
    assert (
        json.loads((tmp_path / "out" / "_run.json").read_text())["attempt"]
        == manifest["attempt"] + 1
    )


def test_a_killed_run_reads_only_what_is_new(make_job: MakeJob, engine, scans, reads):
    config = make_job(rows(*"abcdefgh"))
    engine.max_files = 1
    for _ in range(2):
        with pytest.raises(DriverKilled):
            complete_job(config)
    engine.max_files = None
    complete_job(config)
    assert sorted(engine.made) == list("abcdefgh") and scans == [("in.jsonl", 0)]
    assert reads == [
        "part-001-000000.parquet",
        "part-002-000000.parquet",
        "part-003-000000.parquet",
    ]


def test_a_start_removes_why_an_earlier_one_has_stopped(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdefgh"))
    stopped = tmp_path / "out" / STOPPED_FILE
    engine.max_files = 1
    for text in ("", "{}"):
        with pytest.raises(DriverKilled):
            complete_job(config)
        assert not stopped.exists()
        stopped.write_text(text)


def erase_column_types(index: Path) -> None:
    for file in index.glob("input.json"):
        facts = json.loads(file.read_text())
        file.write_text(json.dumps(facts | {"types": []}))


def replace_index_with_a_file(index: Path) -> None:
    shutil.rmtree(index)
    index.write_text("{}")


def change_one_number(index: Path) -> None:
    for file in index.glob("*.json"):
        file.write_text(file.read_text().replace("1", "2", 1))


@pytest.mark.parametrize(
    "damage",
    [
        delete_index_files,
        truncate_index_files,
        delete_segments,
        flip_segment_bits,
        write_other_json,
        erase_column_types,
        leave_index_half_written,
        replace_index_with_a_file,
        change_one_number,
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_damaged_index_is_built_again(
    make_job: MakeJob, engine, tmp_path, damage: Callable, is_finished: bool
):
    config = make_job(rows(*"abcdefg"))
    engine.max_files = None if is_finished else 1
    if is_finished:
        complete_job(config)
    else:
        with pytest.raises(DriverKilled):
            complete_job(config)
        (tmp_path / "out" / INDEX_DIRECTORY / "finished.json").write_text("{}")
    damage(tmp_path / "out" / INDEX_DIRECTORY)
    engine.max_files = None
    append(tmp_path / "in.jsonl", rows("h"))
    summary = complete_job(config)
    assert sorted(engine.made) == list("abcdefgh") and summary["total"]["rows"] == 8
    assert answered_prompts(tmp_path).keys() == set("abcdefgh")
    assert len(list((tmp_path / "out" / INDEX_DIRECTORY).glob("*.arrow"))) >= 2
    assert not (tmp_path / "out" / INDEX_DIRECTORY / "input-0123456789ab.arrow").exists()


@pytest.mark.parametrize(
    "name, content",
    [
        ("_estimate.json", {"a": 1}),
        ("_estimate.json", []),
        ("_progress.json", {"run_id": 3}),
        ("_summary.json", {"total": {}}),
        ("_summary.json", {"total": {"rows": 3, "errors": 0, "output_tokens": 3}}),
    ],
)
def test_a_record_that_can_be_made_again_stops_nothing(
    make_job, engine, messages, tmp_path, name, content
):
    config = make_job(rows(*"abc"))
    first = complete_job(config)
    (tmp_path / "out" / name).write_text(json.dumps(content))
    assert complete_job(config)["total"] == first["total"]
    assert f"{name} is damaged (" in (said := "\n".join(messages)) and said.count("is damaged") == 1
    assert (tmp_path / "out" / "_SUCCESS").exists() and "groups" in json.loads(
        (tmp_path / "out" / "_summary.json").read_text()
    )


def test_a_run_without_an_index_is_resumed(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdefg"))
    engine.max_files = 1
    with pytest.raises(DriverKilled):
        complete_job(config)
    for file in (tmp_path / "out" / INDEX_DIRECTORY).iterdir():
        file.unlink()
    (tmp_path / "out" / INDEX_DIRECTORY).rmdir()
    engine.max_files = None
    complete_job(config)
    assert sorted(engine.made) == list("abcdefg")


def test_lines_and_files_are_added(make_job: MakeJob, engine, scans, tmp_path):
    config = make_job(rows(*"abcde"), **{"input.path": str(tmp_path / "*.jsonl")})
    complete_job(config)
    append(tmp_path / "in.jsonl", rows("f", "g"))
    append(tmp_path / "a-first.jsonl", rows("x", "y"))
    summary = complete_job(config)
    assert engine.made == [*"abcde", "x", "y", "f", "g"] and summary["total"]["rows"] == 9
    assert scans == [
        ("in.jsonl", 0),
        ("a-first.jsonl", 0),
        ("in.jsonl", 0),
    ]  # its last shard is its first
    complete_job(config)
    assert len(scans) == 3 and len(engine.made) == 9


def test_a_long_file_is_read_from_its_last_shard_on(make_job: MakeJob, engine, scans, tmp_path):
    engine.rows_per_file = 400
    config = make_job(rows(*(f"r{i}" for i in range(1200))))
    complete_job(config)
    size = (tmp_path / "in.jsonl").read_bytes().index(b'{"id": "r1024"')
    append(tmp_path / "in.jsonl", rows("new"))
    complete_job(config)
    assert scans == [("in.jsonl", 0), ("in.jsonl", size)] and engine.made[-1] == "new"
    assert len(engine.made) == 1201 == len(answered_prompts(tmp_path))


def test_rows_without_ids_keep_theirs_as_the_file_grows(make_job: MakeJob, engine, tmp_path):
    config = make_job([{"prompt": "a"}, {"prompt": "b"}])
    complete_job(config)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('\n{"prompt": "c"}')
    complete_job(config)
    assert answered_prompts(tmp_path) == {"in.jsonl:0": "a", "in.jsonl:1": "b", "in.jsonl:3": "c"}


def test_unread_parameter_in_an_added_row_is_refused_in_one_scan(make_job, engine, scans, tmp_path):
    config = make_job(rows("a", "b"))
    complete_job(config)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"id": "c", "prompt": "Hi c", "top_a": 3}\n')
    with pytest.raises(
        plan_module.ConfigError, match=r"in\.jsonl, line 3: column 'top_a' \(3\) is a request param"
    ):
        complete_job(config)
    assert len(scans) == 2 and engine.made == ["a", "b"]


def test_an_id_that_is_added_twice_is_refused(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows("a", "b"))
    complete_job(config)
    append(tmp_path / "in.jsonl", rows("a"))
    with pytest.raises(plan_module.ConfigError, match="id 'a' occurs twice"):
        complete_job(config)


def test_an_answered_row_that_changed_is_named_and_refused(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcd"))
    complete_job(config)
    make_job([*rows("a"), *rows("b", text="Ho"), *rows("c", "d", "e")])
    for _ in range(2):  # refused each time: the refused content is not recorded as the run's
        with pytest.raises(
            OutputMismatch, match=r"1 rows of .*in\.jsonl are other rows now: b\. Put"
        ):
            complete_job(config)
    make_job(rows(*"abcde"))
    complete_job(config)
    assert engine.made == list("abcde")


def test_row_changed_before_it_was_answered_is_refused(make_job: MakeJob, engine, tmp_path):
    """A worker of a killed attempt may still publish an answer to what it was."""
    config = make_job(rows(*"abcdef"))
    engine.max_files = 1
    with pytest.raises(DriverKilled):
        complete_job(config)
    make_job([*rows(*"abc"), *rows("d", text="Ho"), *rows("e", "f")])
    with pytest.raises(OutputMismatch, match=r"1 rows of .* are other rows now: d"):
        complete_job(config)


def test_rows_that_are_gone_are_refused_by_id_and_place(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcd"))
    complete_job(config)
    path = tmp_path / "in.jsonl"
    make_job([*rows("a"), *rows("c", text="Ho"), *rows("d", "e")])
    with pytest.raises(
        OutputMismatch, match=rf"2 rows of {path} are .*: c, b \(row 1 of {path}, which is gone\)\."
    ):
        complete_job(config)
    make_job(rows("e", *"dcba"))  # in any order
    complete_job(config)
    assert answered_prompts(tmp_path).keys() == set("abcde") and len(engine.made) == 5


def test_an_error_row_may_be_corrected_in_another_file(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abc"))
    engine.bad = {"b"}
    complete_job(config)
    append(tmp_path / "fixed.jsonl", rows("b", text="Ho"))
    engine.bad = set()
    fixed = make_job(**{"input.path": str(tmp_path / "fixed.jsonl")})
    with pytest.raises(
        OutputMismatch, match=r"the id 'b' from .*in\.jsonl, which is not in this input"
    ):
        complete_job(fixed)
    complete_job(fixed, retry_errors=True)
    assert answered_prompts(tmp_path) == {"a": "Hi a", "b": "Ho b", "c": "Hi c"}


def test_an_output_file_that_was_lost_is_made_again(make_job: MakeJob, engine, tmp_path):
    config = make_job(rows(*"abcdef"))
    complete_job(config)
    (tmp_path / "out" / "data" / "part-001-000001.parquet").unlink()
    complete_job(config)
    assert engine.made == [*"abcdef", "d", "e", "f"] and answered_prompts(tmp_path).keys() == set(
        "abcdef"
    )


def test_output_file_rewritten_in_place_is_read_again(make_job: MakeJob, engine, reads, tmp_path):
    config = make_job(rows(*"abcdef"))
    complete_job(config)
    file = tmp_path / "out" / "data" / "part-001-000001.parquet"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(reads) == 2
    complete_job(config)
    assert reads[2:] == [file.name] and len(engine.made) == 6


def test_damage_in_a_column_not_needed_for_counts_is_detected(make_job, engine, messages, tmp_path):
    config = make_job(rows(*"abc"))
    complete_job(config)
    [part] = (tmp_path / "out" / "data").iterdir()
    data, group = bytearray(part.read_bytes()), pq.ParquetFile(part).metadata.row_group(0)
    [chunk] = [
        column
        for i in range(group.num_columns)
        if (column := group.column(i)).path_in_schema == "prompt"
    ]
    data[
        (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1
    ] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(OutputDamaged, match=rf"^{part} is damaged \("):
        complete_job(config)
    part.unlink()
    complete_job(config)
    assert answered_prompts(tmp_path).keys() == set("abc")


def test_overwriting_scans_nothing_again(make_job: MakeJob, engine, scans, tmp_path):
    complete_job(make_job(rows(*"abc")))
    complete_job(make_job(**{"output.if_exists": "overwrite", "sampling.max_tokens": 3}))
    assert scans == [("in.jsonl", 0)] and engine.made == list("abcabc")


def test_limits_and_other_inputs_share_an_index(make_job: MakeJob, engine, scans, tmp_path):
    complete_job(make_job(rows(*"abcdef"), **{"input.limit": 2}))
    append(tmp_path / "other.jsonl", rows("x"))
    complete_job(make_job(**{"input.path": str(tmp_path / "other.jsonl")}))
    complete_job(make_job(**{"input.limit": 4}))
    assert engine.made == ["a", "b", "x", "c", "d"]
    assert scans == [("in.jsonl", 0), ("other.jsonl", 0)]


def test_output_deleted_during_the_job_is_not_recreated(
    make_job: MakeJob, engine, monkeypatch, tmp_path
):
    def delete(*_: Any) -> None:
        shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr(execute, "execute", delete)
    with pytest.raises(OutputDamaged, match="the output was deleted while the job ran"):
        complete_job(make_job(rows("a")))
    assert not (tmp_path / "out").exists()


def test_second_start_opens_no_input_and_detects_new_batch_file(
    make_job, engine, tmp_path, monkeypatch
):
    (directory := tmp_path / "in").mkdir()
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    batch = (
        json.dumps(
            {"custom_id": "b0", "url": "/v1/chat/completions", "method": "POST", "body": body}
        )
        + "\n"
    )
    for name, text in (("a", json.dumps(rows("a0")[0]) + "\n"), ("b", batch)):
        (directory / f"{name}.jsonl").write_text(text)
    monkeypatch.setattr(
        fingerprints, "SETTLED_NS", -(10**12)
    )  # files that changed just now are settled, too
    config = make_job(**{"input.path": str(directory)})
    complete_job(config)
    opened = []
    open_file = InputFile.open
    monkeypatch.setattr(InputFile, "open", lambda file: opened.append(file.name) or open_file(file))
    complete_job(config)
    assert sorted(engine.made) == ["a0", "b0"] and opened == []
    (directory / "c.jsonl").write_text(batch.replace("b0", "c0"))
    assert [file.format for file in plan_input(config, previous_run(config)).files] == [
        "jsonl",
        "openai_batch",
        "openai_batch",
    ]
    assert set(opened) == {"c.jsonl"}
