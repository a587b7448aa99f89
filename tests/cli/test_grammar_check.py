"""validate compiles every grammar of the input once, and names row and column of those that do not compile."""

from __future__ import annotations

import json

import pytest

from eagle_ray.assembly.hub import ASSETS
from eagle_ray.batch.driver.input_plan import requests_of
from eagle_ray.cli import validate as module
from eagle_ray.cli.validate import check_grammars, validate
from eagle_ray.sampling.grammar import GrammarCompiler
from tests.support.inputs import plan, write_jsonl

TARGET = {"model.target": "embedded:tiny", "model.draft": "embedded:tiny"}
GOOD = {"type": "object", "properties": {"age": {"type": "integer"}}}
ROWS = [
    {"id": "a", "prompt": "x", "json_schema": GOOD},
    {"id": "b", "prompt": "x", "json_schema": GOOD},
    {"id": "c", "prompt": "x", "regex": "(never closed"},
    {"id": "d", "prompt": "x", "regex": "(never closed"},
    {
        "id": "e",
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}},
    },
    {"id": "f", "prompt": "x", "response_format": {"type": "text"}},
    {"id": "g", "prompt": "x"},
    {"id": "h", "prompt": "x", "grammar": "root ::= missing"},
]


@pytest.fixture
def compiled_specs(monkeypatch):
    """The specs that are compiled."""
    specs = []
    start = GrammarCompiler.start
    monkeypatch.setattr(
        GrammarCompiler, "start", lambda self, spec: specs.append(spec) or start(self, spec)
    )
    return specs


def compiler() -> GrammarCompiler:
    return GrammarCompiler((ASSETS / "tiny" / "target" / "tokenizer.json").read_text, 1536, [4])


def test_validate_names_row_and_column(make_job, tmp_path):
    shown = validate(make_job(ROWS, **TARGET))
    assert "4 good, 4 would become error rows" in shown
    assert "grammars 4 in 6 rows, 3 do not compile" in shown
    path = next(tmp_path.rglob("*.jsonl"))
    assert f"{path}, line 3: column 'regex': regex: " in shown and "(2 rows have it)" in shown
    assert f"{path}, line 5: column 'response_format': json_schema: " in shown
    assert f"{path}, line 8: column 'grammar': grammar: " in shown


def test_rows_without_grammars_are_not_read_again(make_job, monkeypatch):
    monkeypatch.setattr(
        "eagle_ray.cli.validate.check_grammars",
        lambda *_: pytest.fail("there is nothing to compile"),
    )
    assert "\ngrammars" not in validate(make_job([{"id": "a", "prompt": "x"}], **TARGET))


def test_the_jobs_own_grammar_is_named_by_its_key(make_job):
    job = make_job(
        [{"id": "a", "prompt": "x", "choice": ["a"]}, {"id": "b", "prompt": "x"}], **TARGET
    )
    wrong = make_job(
        [{"id": "a", "prompt": "x", "choice": ["a"]}, {"id": "b", "prompt": "x"}],
        **TARGET,
        **{"sampling.regex": "("},
    )
    assert "grammars 1 in 1 rows, all compile" in validate(job)
    assert "line 2: sampling.regex: regex: " in validate(wrong)


def test_rows_past_the_first_are_compiled_once_each(make_job, tmp_path, compiled_specs):
    rows = [
        {"id": f"{i}", "prompt": "x", "regex": "[" if i == 240 else f"{'ab'[i % 2]}+"}
        for i in range(300)
    ]
    check = check_grammars(
        requests_of(plan(write_jsonl(tmp_path / "a.jsonl", rows))), make_job(), compiler()
    )
    assert (check.num_rows, check.num_compiled, len(compiled_specs)) == (300, 3, 3)
    [bad] = check.bad.values()
    assert bad.first.endswith("line 241") and bad.num_rows == 1


def test_time_is_bounded(make_job, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECK_TIMEOUT_S", -1.0)
    rows = [{"id": f"{i}", "prompt": "x", "regex": "a"} for i in range(3)]
    check = check_grammars(
        requests_of(plan(write_jsonl(tmp_path / "a.jsonl", rows))), make_job(), compiler()
    )
    assert (check.num_compiled, check.num_skipped) == (0, 3)
    assert "those of 3 rows were not compiled within" in check.lines()[-1]


def test_a_batch_file_is_read_too(make_job, tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "regex": "("}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    good = line | {"custom_id": "b", "body": body | {"regex": "a"}}
    path = tmp_path / "batch.jsonl"
    path.write_text(f"{json.dumps(line)}\n{json.dumps(good)}\n")
    assert f"{path}, line 1: column 'regex': regex: " in validate(
        make_job(**TARGET, **{"input.path": str(path)})
    )
