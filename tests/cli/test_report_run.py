"""Looking at runs afterwards, on the command line: report and compare, without Ray or torch."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.cli import main as cli
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.storage import local, s3
from eagle_ray.storage.checked_parquet import parquet_bytes
from tests.support.jobs import small_job
from tests.support.reports import error, row

SCHEMA = output_schema([pa.field("category", pa.string())])


def make_run(directory: Path, rows: list[dict]) -> Path:
    """A run that is at work: its record, and one file of rows."""
    (directory / "out").mkdir(parents=True)
    run = open_run(small_job(directory, []), {})
    (run.data / "part-001-000000.parquet").write_atomic(
        parquet_bytes(table_of(rows, SCHEMA), "zstd")
    )
    return Path(str(run.output))


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(
        tmp_path, [row("a", "code", 10, 9), row("b", "chat", 30, 3), error("c", "chat")]
    )


def test_a_running_run_is_added_up_and_has_its_report(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines()[1:4]] == [
        ["chat", "2"],
        ["code", "1"],
        ["all", "3"],
    ]
    assert f"report in {run}/report.html" in shown
    assert "still running" in (run / "report.html").read_text()
    assert not (run / "_summary.json").exists()


def test_the_report_has_the_scores_that_were_asked_for(run, capsys):
    assert cli.main(["report", str(run), "--score", "completion_tokens"]) == 0
    shown, html = capsys.readouterr().out, (run / "report.html").read_text()
    assert (
        "scores: column completion_tokens" in shown and "Scores: column completion_tokens" in html
    )


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_report_that_cannot_be_written_leaves_the_table(run, capsys, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local, "write_atomic", refuse)
    assert cli.main(["report", str(run)]) == 0
    output = capsys.readouterr()
    assert (
        output.out.splitlines()[-1]
        == f"{run}/report.html could not be written: {os.strerror(number)}"
    )
    assert output.out.splitlines()[3].split()[:2] == ["all", "3"] and output.err == ""


def test_json_is_every_number_and_writes_nothing(run, capsys):
    assert cli.main(["report", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (
        numbers["total"]["rows"] == 3 and numbers["groups"]["code"]["mean_acceptance_length"] == 1.9
    )
    assert not (run / "report.html").exists()


def test_a_finished_runs_numbers_are_its_summarys(run, capsys):
    cli.main(["report", str(run), "--json"])
    numbers = json.loads(capsys.readouterr().out)
    numbers["total"]["rows"] = 7777
    (run / "_summary.json").write_text(json.dumps(numbers))
    (run / "_SUCCESS").touch()
    assert cli.main(["report", str(run)]) == 0
    assert "7,777" in capsys.readouterr().out and "7,777" in (run / "report.html").read_text()


@pytest.mark.parametrize("command", [["report", "RUN"], ["compare", "RUN", "RUN"]])
@pytest.mark.parametrize(
    ("damage", "code"), [(None, 2), ("{", 6), ("null", 6), ('{"attempts": []}', 6)]
)
def test_what_is_no_run_is_one_line(tmp_path, capsys, command, damage, code):
    if damage is not None:
        (tmp_path / "_run.json").write_text(damage)
    assert cli.main([word.replace("RUN", str(tmp_path)) for word in command]) == code
    output = capsys.readouterr()
    assert (
        output.err.startswith("eagle-ray: ")
        and str(tmp_path) in output.err
        and output.err.count("\n") == 1
    )
    assert output.out == ""


@pytest.fixture
def other_run(tmp_path) -> Path:
    """The same rows but for one that parts at its third token, one that is an error here only, and one more."""
    parted = row("b", "chat", 30, 3) | {"output_token_ids": [0, 1, 99, *range(3, 34)]}
    more = [row("c", "chat", 1, 1), row("d", "chat", 1, 1)]
    return make_run(tmp_path / "other", [row("a", "code", 10, 9), parted, *more])


def test_two_runs_stand_side_by_side(run, other_run, capsys):
    assert cli.main(["compare", str(run), str(other_run)]) == 0
    names, *lines = capsys.readouterr().out.splitlines()
    assert names == f"A: {run}, B: {other_run}"
    assert [line.split()[:5] for line in lines[1:4]] == [
        ["chat", "2", "3", "1.10", "1.16"],
        ["code", "1", "1", "1.90", "1.90"],
        ["all", "3", "4", "1.30", "1.33"],
    ]
    assert lines[5] == "1 of the 3 rows that both have are token for token the same"
    assert lines[6:] == [
        "  differs: b sample 0, from token 2 on",
        "  differs: c sample 0, an error row in one of them",
    ]


def test_the_comparison_as_json_names_every_row_that_differs(run, other_run, capsys):
    assert cli.main(["compare", str(run), str(other_run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["rows"] == {"a": 3, "b": 4, "both": 3} and numbers["identical"] == 1
    assert [(d["request_id"], d["position"]) for d in numbers["differing"]] == [
        ("b", 2),
        ("c", None),
    ]
    assert numbers["groups"]["code"]["b"]["output_tokens"] == 20


def test_a_run_beside_itself_is_the_same(run, capsys):
    assert cli.main(["compare", str(run), str(run)]) == 0
    assert "3 of the 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["report", "s3://b/x"], ["compare", "s3://b/x", "s3://b/y"]])
def test_storage_that_does_not_answer_is_exit_5_and_one_line(monkeypatch, capsys, command):
    monkeypatch.setattr(s3, "WAITS_S", (0.01,))
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    assert cli.main(command) == 5
    error = capsys.readouterr().err
    assert (
        error.startswith("eagle-ray: s3://b/x/_run.json")
        and endpoint in error
        and error.count("\n") == 1
    )


def test_outputs_that_were_not_stored_cannot_be_compared(tmp_path, run, capsys):
    bare = make_run(tmp_path / "bare", [row("a", "code", 10, 9) | {"output_token_ids": None}])
    assert cli.main(["compare", str(run), str(bare)]) == 2
    assert "output.store_token_ids" in capsys.readouterr().err


def test_runs_without_a_row_in_common_are_not_compared(tmp_path, run, capsys):
    stranger = make_run(tmp_path / "stranger", [row("z", "code", 10, 9)])
    assert cli.main(["compare", str(run), str(stranger)]) == 2
    assert "no row is in both" in capsys.readouterr().err


def test_looking_back_needs_neither_ray_nor_torch(run):
    look = f"import sys; from eagle_ray.cli.main import main; main(['report', '{run}'])"
    code = f"{look}; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("damage", ["{", "[]", "3"])
def test_a_damaged_summary_is_added_up_anew(run, capsys, damage):
    for name in ("_summary.json", "_progress.json"):
        (run / name).write_text(damage)
    (run / "_SUCCESS").touch()
    assert cli.main(["report", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["total"]["rows"] == 3 and numbers["last_work"] is None


@pytest.mark.parametrize("key", ["total", "groups", "timeline", "budget", "by"])
def test_a_summary_with_a_value_of_another_type_is_added_up_anew(run, capsys, messages, key):
    cli.main(["report", str(run), "--json"])
    numbers = json.loads(capsys.readouterr().out)
    (run / "_summary.json").write_text(json.dumps(numbers | {key: {"a": 1}}))
    (run / "_SUCCESS").touch()
    assert cli.main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    assert (
        "_summary.json is damaged (" in messages[-1]
        and "the rows are counted again" in messages[-1]
    )
    assert cli.main(["report", str(run)]) == 0


def with_damaged_pages(part: Path) -> bytes:
    """The file with another last byte of every column but the ids, which are read first."""
    group = pq.ParquetFile(part).metadata.row_group(0)
    data = bytearray(part.read_bytes())
    for chunk in map(group.column, range(group.num_columns)):
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        if chunk.path_in_schema != "request_id":
            data[start + chunk.total_compressed_size - 1] ^= 255
    return bytes(data)


@pytest.mark.parametrize("damage", ["cut", "pages"])
@pytest.mark.parametrize(
    "command",
    [
        ["report", "RUN"],
        ["report", "RUN", "--score", "text"],
        ["compare", "RUN", "RUN"],
        ["export", "RUN", "--to", "csv"],
        ["export", "RUN", "--to", "openai-batch", "-o", "RUN.jsonl"],
    ],
)
def test_a_damaged_part_is_named_in_one_line(run, capsys, command, damage):
    (run / "_SUCCESS").touch()
    part = run / "data" / "part-001-000000.parquet"
    part.write_bytes(b"PAR1" if damage == "cut" else with_damaged_pages(part))
    assert cli.main([word.replace("RUN", str(run)) for word in command]) == 6
    error = capsys.readouterr().err
    assert error.startswith(f"eagle-ray: {part} is damaged (") and error.count("\n") == 1
    assert not Path(f"{run}.jsonl").exists()


def test_a_run_that_lost_a_part_is_not_exported_as_if_whole(run, capsys):
    (run / "_SUCCESS").touch()
    (run / "_summary.json").write_text(json.dumps({"total": {"rows": 5}}))
    assert cli.main(["export", str(run), "--to", "csv"]) == 2
    assert "3 rows of 5" in capsys.readouterr().err
    assert cli.main(["export", str(run), "--to", "csv", "--partial"]) == 0
