"""The same command again, with other flags: --limit, --retry-errors, --overwrite, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver import verification as module
from eagle_ray.batch.driver.verification import run_checks
from eagle_ray.cli import main as cli
from eagle_ray.requests.row_schema import ADDED_COLUMNS
from tests.support.jobs import PAIR, token_rows

NEVER = ["--set", "execution.row_timeout_s=0.001"]  # nothing is done so soon after its admission


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Flags of a job over eight good rows and a bad one in the middle."""
    rows = token_rows(8)
    rows.insert(2, {"id": "bad", "prompt": "needs a tokenizer"})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model.target": PAIR / "target",
        "speculative.method": "none",
        "sampling.max_tokens": 400,  # long enough for NEVER even where the clock is heard late
        "sampling.ignore_eos": "true",
        "execution.slots": 4,
        "execution.rows_per_file": 2,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out", *sets]


@pytest.fixture
def job(ray_session, flags) -> list[str]:
    return flags


@pytest.fixture
def toy_job(engine, flags) -> list[str]:
    """Flags of a job that a toy engine answers, where the subject is what stands in the files."""
    engine.bad = {"bad"}
    return flags


def table(output: Path) -> dict[str, tuple[str | None, int]]:
    """Error code and attempt of each id; an id that stands twice fails."""
    query = f"select request_id, error_code, attempt from '{output}/data/*.parquet'"
    rows = duckdb.sql(query).fetchall()
    assert len({row[0] for row in rows}) == len(rows)
    return {id: (code, attempt) for id, code, attempt in rows}


@pytest.mark.slow
def test_reruns_with_other_flags_make_only_the_rows_they_need(job, tmp_path):
    """Five starts over one output, each of which makes only what it has to make."""
    strict = ["--set", "execution.max_error_rate=0.4"]
    assert cli.main(["run", *job, *NEVER, *strict, "--limit", "4"]) == 4
    first = dict.fromkeys(["q0", "q1", "q2"], ("timeout", 1)) | {"bad": ("no_tokenizer", 1)}
    assert table(tmp_path / "out") == first and not (tmp_path / "out" / "_SUCCESS").exists()

    (tmp_path / "other.jsonl").write_text(json.dumps(token_rows(1, start=20)[0]))
    assert cli.main(["run", *job, "-i", f"{tmp_path}/other.jsonl", "--retry-errors"]) == 0
    assert table(tmp_path / "out") == first | {
        "q20": (None, 2)
    }  # taken out, nothing would make the others again
    kept = {file: file.read_bytes() for file in (tmp_path / "out" / "data").glob("part-002-*")}

    assert cli.main(["run", *job, *strict, "--limit", "6", "--retry-errors"]) == 0
    again = dict.fromkeys(["q0", "q1", "q2", "q3", "q4"], (None, 3)) | {
        "bad": ("no_tokenizer", 3),
        "q20": (None, 2),
    }
    assert table(tmp_path / "out") == again and (tmp_path / "out" / "_SUCCESS").exists()
    assert {file: file.read_bytes() for file in kept} == kept

    assert cli.main(["run", *job, "--limit", "2"]) == 0  # fewer than there are: all of it stays
    assert table(tmp_path / "out") == again

    assert cli.main(["run", *job, "--overwrite", "--limit", "1"]) == 0
    assert table(tmp_path / "out") == {"q0": (None, 5)}


def test_answers_to_other_rows_of_the_same_ids_are_refused(toy_job, tmp_path, capsys):
    """Tomorrow's file has today's name and ids; today's rows, moved, are still today's."""
    command, output, later = ["run", *toy_job, "--limit", "3"], tmp_path / "out", tmp_path / "later"
    assert cli.main(command) == 0
    assert "error row bad: " in capsys.readouterr().err
    before = table(output)
    later.mkdir()
    others = [row | {"prompt_token_ids": [7]} for row in token_rows(3, start=1)]
    (later / "in.jsonl").write_text("\n".join(map(json.dumps, others)))
    assert cli.main([*command, "-i", f"{later}/in.jsonl"]) == 6
    said = capsys.readouterr().err
    assert f"an answer to the id 'q1' from {tmp_path}/in.jsonl, which is not in this input" in said
    (tmp_path / "in.jsonl").rename(later / "moved.jsonl")
    assert cli.main([*command, "-i", f"{later}/moved.jsonl"]) == 0
    assert table(output) == before


def test_on_bad_row_fail_stops_before_anything_starts(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": 5}\n')
    flags = ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out"]
    assert cli.main(["run", *flags, "--set", "input.on_bad_row=fail"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checks(job, tmp_path, monkeypatch) -> tuple[list[str], list[int]]:
    """A job that asks for both checks, and a list that grows with every time they are made."""
    made = []
    monkeypatch.setattr(module, "run_checks", lambda *args: made.append(1) or run_checks(*args))
    drafted = ["--set", "speculative.method=eagle2", "--set", f"model.draft={PAIR}/draft"]
    asked = ["--set", "report.baseline_rows=3", "--set", "report.verify_rows=4"]
    return ["run", *job, *drafted, *asked, "--limit", "5"], made


def test_checks_run_once_and_again_only_if_results_are_lost(checks, tmp_path, capsys):
    command, made = checks
    assert cli.main(command) == 0
    summary = tmp_path / "out" / "_summary.json"
    found = json.loads(summary.read_text())
    assert (found["baseline_rows"]["asked"], found["baseline_rows"]["rows"]) == (3, 3)
    assert found["baseline_rows"]["speed_up"] > 0
    assert found["verify_rows"] == {"asked": 4, "rows": 4, "identical": 4, "differing": []}
    printed = capsys.readouterr().out
    assert (
        "x over plain decoding" in printed
        and "verified: 4 of 4 rows are plain decoding's" in printed
    )
    assert cli.main(command) == 0
    assert (
        json.loads(summary.read_text())["baseline_rows"] == found["baseline_rows"]
        and len(made) == 1
    )
    summary.unlink()
    assert cli.main(command) == 0
    assert json.loads(summary.read_text())["verify_rows"] == found["verify_rows"] and len(made) == 2


@pytest.mark.slow
def test_checks_are_made_anew_for_new_rows(checks, tmp_path):
    command, made = checks
    assert cli.main(command) == 0
    assert cli.main([*command[:-1], "7"]) == 0
    summary = json.loads((tmp_path / "out" / "_summary.json").read_text())
    assert summary["total"]["rows"] == 7 and len(made) == 2


def downgrade_run(output: Path) -> None:
    """Take out what a run begun before rows could set min_p and ignore_eos does not have."""
    record = json.loads((output / "_run.json").read_text())
    del record["config"]["input"]["on_unknown"]
    (output / "_run.json").write_text(json.dumps(record))
    for file in (output / "data").glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(list(ADDED_COLUMNS)), file)


def test_run_of_an_earlier_version_resumes_with_its_own_columns(toy_job, tmp_path):
    assert cli.main(["run", *toy_job, "--limit", "3"]) == 0
    downgrade_run(tmp_path / "out")
    assert cli.main(["run", *toy_job, "--limit", "6"]) == 0
    assert len(table(tmp_path / "out")) == 6
    columns = {
        tuple(pq.read_schema(file).names) for file in (tmp_path / "out" / "data").glob("*.parquet")
    }
    [names] = columns
    assert not set(ADDED_COLUMNS) & set(names)


@pytest.mark.parametrize("carried", [True, False])
def test_rows_without_min_p_are_not_mixed_with_rows_using_it(toy_job, tmp_path, capsys, carried):
    """An earlier version carried min_p through as data, or left it out with input.passthrough."""
    path = tmp_path / "in.jsonl"
    rows = [json.loads(line) | {"min_p": 0.2} for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["run", *toy_job, "--limit", "3"]) == 0
    values = [
        pq.read_table(file)["min_p"]
        for file in sorted((tmp_path / "out" / "data").glob("*.parquet"))
    ]
    downgrade_run(tmp_path / "out")
    for file, column in zip(
        sorted((tmp_path / "out" / "data").glob("*.parquet")), values, strict=True
    ):
        if carried:
            pq.write_table(pq.read_table(file).append_column("min_p", column), file)
    assert cli.main(["run", *toy_job, "--limit", "3"]) == 0  # nothing is missing
    assert cli.main(["run", *toy_job, "--limit", "6"]) == 6
    assert "did not read the input's min_p. Choose another output.path" in capsys.readouterr().err
