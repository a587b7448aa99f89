"""From an OpenAI batch file through a job and back out again, and the same run as CSV, through the command line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.reader.csv_files import rows_in_csv
from eagle_ray.cli import main as cli

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str, **body) -> dict:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "gpt-4o"} | body,
    }


LINES = [
    line("chat", CHAT, messages=[{"role": "user", "content": "Say, \"hello\"\nwörld."}], n=2, temperature=0.9, seed=5,
         logprobs=True, top_logprobs=3),
    line("text", COMPLETIONS, prompt="def add(", max_tokens=6, logprobs=2, temperature=0),
    line("tools", CHAT, messages=[{"role": "user", "content": "Hi"}], functions=[{"name": "f"}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(ray_session, tmp_path_factory) -> Path:
    """A finished run over LINES and one line that is no JSON."""
    directory = tmp_path_factory.mktemp("export")
    (directory / "batch.jsonl").write_text("\n".join([*map(json.dumps, LINES), "{", ""]))
    sets = [
        "input.format=openai_batch",
        "sampling.max_tokens=8",
        "execution.slots=4",
        "speculative.max_nodes=8",
    ]
    flags = [part for text in sets for part in ("--set", text)]
    assert (
        cli.main(["run", "-i", f"{directory}/batch.jsonl", "-o", f"{directory}/out", *flags]) == 0
    )
    return directory / "out"


@pytest.fixture
def stored(run) -> dict[str, list[dict]]:
    rows = [
        row for file in sorted((run / "data").iterdir()) for row in pq.read_table(file).to_pylist()
    ]
    return {
        id: [row for row in rows if row["request_id"] == id]
        for id in {row["request_id"] for row in rows}
    }


@pytest.fixture
def exported(run, tmp_path, capsys) -> Callable[[str], str]:
    def export(to: str) -> str:
        assert cli.main(["export", str(run), "--to", to, "-o", f"{tmp_path}/out.txt"]) == 0
        assert f"rows of {run} in {tmp_path}/out.txt" in capsys.readouterr().out
        return (tmp_path / "out.txt").read_bytes().decode()

    return export


def test_every_line_of_a_batch_file_comes_back_under_its_id(exported, stored):
    lines = {
        line["custom_id"]: line for line in map(json.loads, exported("openai-batch").splitlines())
    }
    assert lines.keys() == {"chat", "text", "tools", "batch.jsonl:3"}
    assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines.values())
    assert len({line["id"] for line in lines.values()}) == 4
    assert [lines[id]["response"]["status_code"] for id in ("chat", "text", "tools")] == [
        200,
        200,
        400,
    ]

    body, rows = lines["chat"]["response"]["body"], stored["chat"]
    assert body["object"] == "chat.completion" and body["model"] == "embedded:tiny"
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": row["text"], "refusal": None} for row in rows
    ]
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [
        (row["sample_index"], row["finish_reason"]) for row in rows
    ]
    made = sum(row["completion_tokens"] for row in rows)
    prompt = rows[0]["prompt_tokens"]
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
    for choice, row in zip(body["choices"], rows, strict=True):
        content = choice["logprobs"]["content"]
        assert [token["logprob"] for token in content] == row["token_logprobs"]
        ranked = [[top["logprob"] for top in token["top_logprobs"]] for token in content]
        assert ranked == [[top["logprob"] for top in tops] for tops in row["token_top_logprobs"]]
        assert all(len(tops) == 3 and tops[0] >= tops[-1] for tops in ranked)
        assert "".join(token["token"] for token in content).startswith(row["text"])


def test_completions_have_texts_and_bad_lines_openais_errors(exported, stored):
    lines = {
        line["custom_id"]: line for line in map(json.loads, exported("openai-batch").splitlines())
    }
    [choice] = lines["text"]["response"]["body"]["choices"]
    [row] = stored["text"]
    assert lines["text"]["response"]["body"]["object"] == "text_completion"
    assert (choice["text"], choice["finish_reason"]) == (row["text"], row["finish_reason"])
    assert choice["logprobs"]["token_logprobs"] == row["token_logprobs"]
    assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]
    tops = choice["logprobs"]["top_logprobs"]
    assert [max(top, key=top.get) for top in tops] == choice["logprobs"]["tokens"] and {
        len(top) for top in tops
    } == {2}
    error = lines["tools"]["response"]["body"]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_parameter")
    assert "body.functions" in error["message"] and lines["tools"]["error"] is None


def test_failed_row_is_exported_as_error_instead_of_response():
    from eagle_ray.requests.answers import output_line

    row = {
        "request_id": "a",
        "run_id": "r",
        "status": "error",
        "error_code": "timeout",
        "error_message": "late",
    }
    line = output_line([row], str)
    assert (line["custom_id"], line["response"], line["error"]) == (
        "a",
        None,
        {"code": "timeout", "message": "late"},
    )


def test_an_answer_to_a_response_is_a_response():
    from openai.types.responses import Response

    from eagle_ray.requests.answers import output_line

    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    row = {
        "request_id": "a",
        "sample_index": 0,
        "run_id": "r",
        "status": "ok",
        "error_code": None,
        "url": "/v1/responses",
        "finish_reason": "stop",
        "text": "thinks Hi",
        "content": "Hi",
        "reasoning_content": "thinks",
        "tool_calls": json.dumps([call]),
        "output_token_ids": [5],
        "token_logprobs": [-0.5],
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "finished_at": datetime(2026, 1, 31, tzinfo=timezone.utc),
        "target_model": "m",
        "config_hash": "h",
    }
    body = Response.model_validate(output_line([row], str)["response"]["body"])
    assert (body.output_text, body.status, body.usage.total_tokens) == ("Hi", "completed", 4)
    assert [item.type for item in body.output] == ["reasoning", "message", "function_call"]
    assert body.output[1].content[0].logprobs[0].logprob == -0.5
    cut = output_line([row | {"finish_reason": "length", "tool_calls": None}], str)["response"][
        "body"
    ]
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"} and Response.model_validate(
        cut
    )


def test_csv_has_every_row_and_column_and_can_be_input_again(exported, stored, run):
    content = exported("csv")
    header, *rows = csv.reader(io.StringIO(content, newline=""))
    assert header == pq.read_schema(next((run / "data").iterdir())).names
    assert len(rows) == 5 and content.count("\r\n") == 6
    found = {
        (row["request_id"], row["sample_index"]): row
        for _, _, row in rows_in_csv(io.BytesIO(content.encode()), "")
    }
    for row in (row for rows in stored.values() for row in rows):
        back = found[row["request_id"], str(row["sample_index"])]
        assert (
            back["text"] == (row["text"] or None) and back["error_message"] == row["error_message"]
        )
        assert json.loads(back["output_token_ids"] or "null") == row["output_token_ids"]
        assert json.loads(back["acceptance_histogram"] or "null") == row["acceptance_histogram"]


@pytest.mark.parametrize("flags", [[], ["-o", "-"]])
def test_without_a_file_the_rows_go_to_stdout(run, tmp_path, monkeypatch, capfdbinary, flags):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), "--to", "openai-batch", *flags]) == 0
    assert len(capfdbinary.readouterr().out.splitlines()) == 4 and not list(tmp_path.iterdir())


def test_unfinished_run_is_exported_only_with_partial(run, tmp_path, capsys):
    unfinished = tmp_path / "out"
    (unfinished / "data").mkdir(parents=True)
    (unfinished / "_run.json").write_bytes((run / "_run.json").read_bytes())
    first = sorted((run / "data").iterdir())[0]
    for name in (
        "part-001-000000.parquet",
        "part-002-000000.parquet",
    ):  # a killed run may leave a row twice
        (unfinished / "data" / name).write_bytes(first.read_bytes())
    target = tmp_path / "out.jsonl"
    assert cli.main(["export", str(unfinished), "--to", "openai-batch", "-o", str(target)]) == 2
    assert (
        "is not finished: run the job to its end, or export what is there with --partial"
        in capsys.readouterr().err
    )
    assert not target.exists()
    assert (
        cli.main(
            ["export", str(unfinished), "--to", "openai-batch", "-o", str(target), "--partial"]
        )
        == 0
    )
    ids = [json.loads(line)["custom_id"] for line in target.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == len(set(pq.read_table(first)["request_id"].to_pylist()))


@pytest.mark.parametrize(
    ("make", "says", "code"),
    [
        (lambda out: None, "holds no run (no _run.json)", 2),
        (lambda out: (out / "_run.json").write_text("{"), "_run.json is damaged", 6),
        (
            lambda out: (out / "data" / "part-001-000000.parquet").write_bytes(b"PAR1"),
            "is damaged",
            6,
        ),
    ],
)
def test_what_is_no_run_is_one_message(run, tmp_path, capsys, make, says, code):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    if says == "is damaged":
        (out / "_run.json").write_bytes((run / "_run.json").read_bytes())
    make(out)
    assert cli.main(["export", str(out), "--to", "csv", "--partial"]) == code
    assert says in capsys.readouterr().err


def test_nothing_that_is_there_is_lost(run, tmp_path, capsys):
    """A file is replaced only where that is meant; the run's inputs and its own files never are."""
    mine = tmp_path / "mine.csv"
    mine.write_text("dear to me")
    command = ["export", str(run), "--to", "csv", "-o"]
    assert cli.main([*command, str(mine)]) == 2
    assert (
        f"-o: {mine} is there already: name another file, or --overwrite" in capsys.readouterr().err
    )
    assert mine.read_text() == "dear to me"
    assert cli.main([*command, str(mine), "--overwrite"]) == 0
    assert mine.read_text().startswith("request_id,")
    asked = run.parent / "batch.jsonl"
    before = asked.read_bytes()
    for own in (asked, run / "data" / "x.csv"):
        assert cli.main([*command, str(own), "--overwrite"]) == 2
        assert f"-o: {own} belongs to the run" in capsys.readouterr().err
    assert asked.read_bytes() == before and not (run / "data" / "x.csv").exists()


def test_a_file_that_cannot_be_written_is_named(run, capsys):
    assert cli.main(["export", str(run), "--to", "csv", "-o", "/dev/null/x"]) == 2
    assert "-o: cannot write /dev/null/x" in capsys.readouterr().err
