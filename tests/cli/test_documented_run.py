"""What the pages say of a run, its output and what is done with it: three jobs by `eagle-ray run`, and other commands.

The jobs answer with the embedded pair, as a job without `model` does.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import eagle_ray
from eagle_ray import ConfigError
from eagle_ray.cli import main as cli
from tests.support.documented import block

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FEW = [
    "--set",
    "sampling.max_tokens=4",
    "--set",
    "execution.slots=4",
    "--set",
    "speculative.max_nodes=8",
]


def body(custom_id: str, url: str, **parameters: Any) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": parameters}


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ODD = {"odd": {"x": float("nan")}}
ROWS = [
    {
        "messages": "Hi",
        "temperature": 0.7,
        "seed": 5,
        "max_tokens": 3,
        "stop": ["zzz"],
        "category": "a",
    }
    | ODD,
    {"id": "null", "prompt": "Hi", "max_tokens": None, "min_tokens": 4},
    {"id": "form", "prompt": "Is it so?", "choice": ["yes", "no"], "max_tokens": 9},
    {"id": "cut", "prompt": "Is it so?", "json_schema": SCHEMA, "max_tokens": 2},
    {
        "id": "likely",
        "prompt_token_ids": [5, 6, 7],
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": True,
    },
    {"id": "bad", "messages": 5},
]
BATCH = [
    body("chat", "/v1/chat/completions", **CHAT),
    body("text", "/v1/completions", prompt="Hi"),
    body("response", "/v1/responses", input="Hi"),
    body("stream", "/v1/chat/completions", **CHAT, stream=True),
]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_of(output: Path) -> list[dict]:
    return [
        row
        for file in sorted(output.glob("data/**/*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


@pytest.fixture(scope="module")
def first(ray_session, tmp_path_factory) -> Path:
    """A run over files of each format, in directories of partitions, with partitions of its own."""
    root = tmp_path_factory.mktemp("documented")
    for lang in ("de", "fr"):
        (root / "in" / f"lang={lang}").mkdir(parents=True)
    (root / "in" / "lang=de" / "rows.jsonl").write_bytes(lines(ROWS))
    (root / "in" / "lang=de" / "more.jsonl.zst").write_bytes(
        pa.compress(lines([{"id": "zst", "prompt": "Hi"}]), "zstd", asbytes=True)
    )
    (root / "in" / "lang=fr" / "packed.jsonl.gz").write_bytes(
        gzip.compress(lines([{"id": "gz", "prompt": "Hi"}]))
    )
    (root / "in" / "lang=fr" / "cells.csv").write_text(
        'id,prompt,logit_bias,lang\ncell,Hi,"{""5"": -1}",\n'
    )
    (root / "in" / "batch.jsonl").write_bytes(lines(BATCH))
    table = pa.table(
        {
            "id": [7],
            "prompt": ["Hi"],
            "text": ["given"],
            "amount": pa.array([1], pa.decimal128(9, 2)),
        }
    )
    pq.write_table(table, root / "in" / "table.parquet")
    sets = [
        "output.partition_by=[lang]",
        "speculative.stats=detailed",
        "execution.price_per_hour=2",
    ]
    flags = [part for text in sets for part in ("--set", text)]
    assert cli.main(["run", "-i", f"{root}/in", "-o", f"{root}/out", *FEW, *flags]) == 0
    return root / "out"


@pytest.fixture(scope="module")
def found(first) -> dict[str, dict]:
    return {row["request_id"]: row for row in rows_of(first)}


def test_rows_of_every_format_are_answered(found):
    answered = {name for name, row in found.items() if row["status"] == "ok"}
    assert answered == {
        "lang=de/rows.jsonl:0",
        "null",
        "form",
        "cut",
        "likely",
        "zst",
        "gz",
        "cell",
        "7",
    } | {
        "chat",
        "text",
        "response",
    }
    assert {name for name, row in found.items() if row["status"] == "error"} == {"bad", "stream"}
    assert {row["target_model"] for row in found.values()} == {"embedded:tiny"}
    assert (
        "stream" in found["stream"]["error_message"] and "line 6" in found["bad"]["error_message"]
    )


def test_a_rows_own_sampling_is_in_force_and_stored(found):
    own = found["lang=de/rows.jsonl:0"]
    assert (own["temperature"], own["seed"], own["max_tokens"], own["stop"]) == (0.7, 5, 3, ["zzz"])
    assert found["null"]["max_tokens"] == 4 and json.loads(found["null"]["sampling_controls"]) == {
        "min_tokens": 4
    }
    assert json.loads(found["cell"]["sampling_controls"]) == {"logit_bias": {"5": -1.0}}
    assert found["gz"]["temperature"] == 0 and found["gz"]["sampling_controls"] is None


def test_structured_outputs_say_what_they_are(found):
    assert [found[name]["structured"] for name in ("form", "cut", "gz")] == [
        "choice",
        "json_schema",
        None,
    ]
    assert [found[name]["structured_outcome"] for name in ("form", "cut", "gz")] == [
        "complete",
        "truncated",
        None,
    ]
    assert found["form"]["text"] in ("yes", "no")


def test_log_probabilities_are_stored_if_a_row_asks(found):
    likely = found["likely"]
    assert (
        len(likely["token_logprobs"])
        == likely["completion_tokens"]
        == len(likely["token_top_logprobs"])
    )
    assert {len(tops) for tops in likely["token_top_logprobs"]} == {2} and likely[
        "prompt_token_logprobs"
    ] is not None
    assert found["gz"]["token_logprobs"] is None


def test_each_step_has_its_budget_with_detailed_statistics(found):
    for row in found.values():
        if row["status"] == "ok":
            assert (
                len(row["per_step_budget"])
                == row["num_spec_steps"]
                == len(row["per_step_accepted"])
            )


def test_other_columns_are_carried_with_their_types(first, found):
    assert found["7"]["input_text"] == "given" and found["lang=de/rows.jsonl:0"]["category"] == "a"
    assert json.loads(found["lang=de/rows.jsonl:0"]["odd"]) == {"x": None}
    types = {
        field.name: field.type
        for file in first.glob("data/**/*.parquet")
        for field in pq.read_schema(file)
    }
    assert types["amount"] == pa.decimal128(9, 2)


def test_partitions_are_read_and_written_as_hive_has_them(first):
    names = {file.parent.name for file in first.glob("data/**/*.parquet")}
    assert names == {"lang=de", "lang=fr", "lang=__HIVE_DEFAULT_PARTITION__"}
    query = f"select lang, count(*) from read_parquet('{first}/data/**/*.parquet', hive_partitioning=true) group by 1"
    assert dict(duckdb.sql(query).fetchall()) == {"de": 7, "fr": 1, None: 6}


def test_the_summary_has_what_the_job_cost(first):
    cost = json.loads((first / "_summary.json").read_text())["cost"]
    assert {
        "rows_per_s",
        "tokens_per_s",
        "dollars",
        "rows_per_dollar",
        "tokens_per_dollar",
    } <= cost.keys()


def test_error_rows_can_end_a_finished_run_with_exit_3(first):
    root = first.parent
    sets = [
        "output.partition_by=[lang]",
        "speculative.stats=detailed",
        "execution.price_per_hour=2",
    ]
    flags = [part for text in sets for part in ("--set", text)]
    command = ["run", "-i", f"{root}/in", "-o", str(first), *FEW, *flags]
    assert cli.main([*command, "--fail-on-row-errors"]) == 3
    assert cli.main([*command, "--set", "execution.slots=2", "--set", "logging.level=warning"]) == 0


@pytest.fixture(scope="module")
def judge(first) -> Path:
    """A run over the answers of the first one, by the template of the page."""
    text = block("eagle_ray/batch/README.md", "yaml", "### The answers of another run")
    (first.parent / "judge.yaml").write_text(text.replace("runs/first", str(first)))
    output = first.parent / "judge"
    carried = "input.passthrough=[category, request_id, sample_index, text]"
    command = ["run", "-c", f"{first.parent}/judge.yaml", "-o", str(output), *FEW, "--set", carried]
    assert (
        cli.main([*command, "--set", "sampling.choice=[yes, no]", "--set", "execution.order=input"])
        == 0
    )
    return output


def test_the_answers_of_a_run_are_an_input(first, judge, found):
    judged = {row["request_id"]: row for row in rows_of(judge)}
    assert judged.keys() == found.keys()
    assert {judged[name]["error_code"] for name in ("bad", "stream")} == {"earlier_run_failed"}
    assert judged["gz"]["text"] in ("yes", "no") and judged["gz"]["input_request_id"] == "gz"
    assert (
        judged["gz"]["input_text"] == found["gz"]["text"]
        and judged["gz"]["input_sample_index"] == 0
    )
    prompt = f"Question: {found['gz']['prompt']}\nAnswer: {found['gz']['text']}\nGrade, yes or no:"
    assert judged["gz"]["prompt"].endswith(prompt) and "amount" not in judged["gz"]


def test_a_runs_numbers_are_read_by_duckdb(judge):
    parquet = duckdb.read_parquet(f"{judge}/data/*.parquet")
    [[tau]] = parquet.aggregate("avg(mean_acceptance_length) tau").fetchall()
    assert tau >= 1


def test_a_run_that_is_not_finished_is_no_input(judge, tmp_path, capsys):
    success = judge / "_SUCCESS"
    content = success.read_bytes()
    success.unlink()
    try:
        command = [
            "validate",
            "-i",
            f"run:{judge}",
            "-o",
            f"{tmp_path}/out",
            "--set",
            "input.template={text}",
        ]
        assert cli.main(command) == 2 and "input.allow_unfinished" in capsys.readouterr().err
        assert cli.main([*command, "--set", "input.allow_unfinished=true"]) == 0
    finally:
        success.write_bytes(content)


def test_scores_are_of_a_column_a_judge_or_a_file(judge, tmp_path, capsys):
    assert cli.main(["report", str(judge), "--score", "text"]) == 0
    assert "scores: column text" in capsys.readouterr().out
    (tmp_path / "scores.csv").write_text("request_id,score\ngz,0.5\nzst,yes\n7,incorrect\n")
    command = [
        "report",
        str(judge),
        "--scores",
        f"{tmp_path}/scores.csv",
        "--answer",
        "(yes|no)",
        "--json",
    ]
    assert cli.main([*command, "--pass-at", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["total"]["mean"]["mean"] == pytest.approx(
        0.5
    )


def test_an_unknown_score_column_is_named(judge, capsys):
    assert cli.main(["report", str(judge), "--score", "grade"]) == 2
    assert "grade" in capsys.readouterr().err


@pytest.fixture(scope="module")
def talks(ray_session, tmp_path_factory) -> tuple[Path, dict]:
    """A run over conversations with two samples, by Python, and what it returned."""
    root = tmp_path_factory.mktemp("talks")
    rows = [{"id": "q", "turns": ["Hi", "And in Italy?"]}, {"id": "bad", "turns": ["Hi", "Ho"]}]
    (root / "rows.jsonl").write_bytes(lines(rows))
    config = {
        "input": {"path": f"{root}/rows.jsonl", "columns": {"turns": "turns"}},
        "output": {"path": f"{root}/out", "store_prompt": False},
        "sampling": {"max_tokens": 3, "n": 2, "temperature": 0.8},
        "model.max_model_len": 32,
    }
    return root / "out", eagle_ray.run_job(config)


def test_each_turn_of_each_sample_is_a_row(talks):
    output, summary = talks
    query = block("eagle_ray/batch/README.md", "sql", "### Conversations").replace(
        "runs/a", str(output)
    )
    answers = dict(duckdb.sql(query).fetchall())
    assert summary["total"]["rows"] == 8 and summary["turns"] and len(answers["q"]) == 2
    rows = {
        (row["request_id"], row["sample_index"], row["turn_index"]): row for row in rows_of(output)
    }
    assert len(rows) == 8 and len({rows["q", sample, 1]["seed"] for sample in (0, 1)}) == 2


def test_prompts_are_not_stored_unless_asked_for(talks):
    assert {(row["prompt"], row["messages"]) for row in rows_of(talks[0])} == {(None, None)}


def test_a_run_of_conversations_is_no_batch_file(talks, capsys):
    assert cli.main(["export", str(talks[0]), "--to", "openai-batch"]) == 2
    assert "turn" in capsys.readouterr().err


def test_a_job_of_python_raises_what_is_wrong(talks):
    with pytest.raises(ConfigError, match=r"input\.path"):
        eagle_ray.run_job({"input.path": "none.jsonl", "output.path": str(talks[0])})


def test_tables_written_by_arrow_are_read_back(first, tmp_path):
    """CSV has every row of the run, and can be input again."""
    assert cli.main(["export", str(first), "--to", "csv", "-o", f"{tmp_path}/rows.csv"]) == 0
    assert pa.csv.read_csv(tmp_path / "rows.csv").num_rows == len(rows_of(first))
