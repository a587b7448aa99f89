"""The same command again, with other flags: --limit, --retry-errors, --overwrite, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from eagle_ray import cli
from tests.conftest import PAIR, token_rows

NEVER = ["--set", "execution.row_timeout_s=0.001"]  # nothing is done so soon after its admission


@pytest.fixture
def job(ray_session, tmp_path) -> list[str]:
    """Flags of a job over eight good rows and a bad one in the middle."""
    rows = token_rows(8)
    rows.insert(2, {"id": "bad", "prompt": "needs a tokenizer"})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model.target": PAIR / "target",
        "speculative.method": "none",
        "sampling.max_tokens": 24,
        "sampling.ignore_eos": "true",
        "execution.slots": 4,
        "execution.rows_per_file": 2,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out", *sets]


def table(output: Path) -> dict[str, tuple[str | None, int]]:
    """Error code and attempt of each id; an id that stands twice fails."""
    query = f"select request_id, error_code, attempt from '{output}/data/*.parquet'"
    rows = duckdb.sql(query).fetchall()
    assert len({row[0] for row in rows}) == len(rows)
    return {id: (code, attempt) for id, code, attempt in rows}


def test_limit_grows_errors_are_tried_again_and_overwrite_begins_anew(job, tmp_path, capsys):
    assert cli.main(["run", *job, *NEVER, "--limit", "4"]) == 0
    first = table(tmp_path / "out")
    assert first == dict.fromkeys(["q0", "q1", "q2"], ("timeout", 1)) | {"bad": ("no_tokenizer", 1)}
    assert "timeout 3" in capsys.readouterr().out

    assert cli.main(["run", *job, "--limit", "6"]) == 0
    grown = table(tmp_path / "out")
    assert grown == first | dict.fromkeys(["q3", "q4"], (None, 2))
    kept = {file: file.read_bytes() for file in (tmp_path / "out" / "data").glob("part-002-*")}

    assert cli.main(["run", *job, "--retry-errors"]) == 0
    again = table(tmp_path / "out")
    assert again["bad"] == ("no_tokenizer", 3)
    assert {id: found for id, found in again.items() if id != "bad"} == {
        **dict.fromkeys(["q0", "q1", "q2", "q5", "q6", "q7"], (None, 3)),
        **dict.fromkeys(["q3", "q4"], (None, 2)),
    }
    assert {file: file.read_bytes() for file in kept} == kept

    assert cli.main(["run", *job, "--overwrite", "--limit", "1"]) == 0
    assert table(tmp_path / "out") == {"q0": (None, 4)}


def test_errors_of_another_input_are_not_tried_again(job, tmp_path):
    """Taking them out would lose them: nothing would make them again."""
    assert cli.main(["run", *job, *NEVER, "--limit", "2"]) == 0
    (tmp_path / "other.jsonl").write_text(json.dumps(token_rows(1, start=20)[0]))
    assert cli.main(["run", *job, "-i", f"{tmp_path}/other.jsonl", "--retry-errors"]) == 0
    assert table(tmp_path / "out") == dict.fromkeys(["q0", "q1"], ("timeout", 1)) | {"q20": (None, 2)}


def test_too_many_errors_are_exit_4_and_what_is_there_can_be_gone_on_from(job, tmp_path):
    assert cli.main(["run", *job, *NEVER, "--limit", "2", "--set", "execution.max_error_rate=0.4"]) == 4
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert cli.main(["run", *job, "--limit", "2", "--retry-errors", "--set", "execution.max_error_rate=0.4"]) == 0
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert cli.main(["run", *job, "--limit", "2", "--retry-errors"]) == 0
    assert table(tmp_path / "out") == dict.fromkeys(["q0", "q1"], (None, 2))


def test_on_bad_row_fail_stops_before_anything_starts(job, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n{"prompt_token_ids": "one"}\n')
    assert cli.main(["run", *job, "--set", "input.on_bad_row=fail"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/in.jsonl, row 1: column 'prompt_token_ids' must be a list" in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_checks_are_made_once_again_where_lost_and_anew_for_new_rows(job, tmp_path, capsys, monkeypatch):
    import eagle_ray.data.checks

    calls, checked = [], eagle_ray.data.checks.checked
    monkeypatch.setattr(eagle_ray.data.checks, "checked", lambda *args: calls.append(1) or checked(*args))
    drafted = ["--set", "speculative.method=eagle2", "--set", f"model.draft={PAIR}/draft"]
    asked = ["--set", "report.baseline_rows=3", "--set", "report.verify_rows=4", "--limit", "5"]
    command, summary = ["run", *job, *drafted, *asked], tmp_path / "out" / "_summary.json"

    assert cli.main(command) == 0
    found = json.loads(summary.read_text())
    assert (found["baseline_rows"]["asked"], found["baseline_rows"]["rows"]) == (3, 3)
    assert found["baseline_rows"]["speed_up"] > 0
    assert found["verify_rows"] == {"asked": 4, "rows": 4, "identical": 4, "differing": []}
    printed = capsys.readouterr().out
    assert "x over plain decoding" in printed and "verified: 4 of 4 rows are plain decoding's" in printed

    assert cli.main(command) == 0
    assert json.loads(summary.read_text())["baseline_rows"] == found["baseline_rows"] and len(calls) == 1
    summary.unlink()
    assert cli.main(command) == 0
    assert json.loads(summary.read_text())["verify_rows"] == found["verify_rows"] and len(calls) == 2
    assert cli.main([*command[:-1], "7"]) == 0
    assert json.loads(summary.read_text())["total"]["rows"] == 7 and len(calls) == 3
