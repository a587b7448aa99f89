"""Structured outputs of a job: from its configuration and from a row's columns into the output rows."""

from __future__ import annotations

import json
import re

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.requests.batch_lines import parse_batch_line
from eagle_ray.requests.request_rows import controls_json
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.structured import response_format_text
from tests.support.inputs import TINY, line, plan, request, write
from tests.support.row_invariants import broken_invariants
from tests.support.schemas import FORMAT, SCHEMA
from tests.support.workers import answers

STORY = "Tell me a story about a fox."
ROWS = [
    {"id": "job", "messages": STORY},
    {"id": "format", "messages": STORY, "response_format": FORMAT, "temperature": 0.8},
    {"id": "choice", "messages": STORY, "choice": ["a fox", "a dog", "no answer"]},
    {"id": "regex", "messages": STORY, "regex": r"(fox|dog){2,3}\."},
    {
        "id": "grammar",
        "messages": STORY,
        "grammar": 'start: "x" ("," "x")*',
        "temperature": 1.0,
        "max_tokens": 20,
    },
    {"id": "object", "messages": STORY, "json_object": True},
    {"id": "cut", "messages": STORY, "json_schema": SCHEMA, "max_tokens": 5},
    {"id": "stop", "messages": STORY, "regex": "one two three four", "stop": ["three"]},
    {"id": "free", "messages": STORY, "response_format": {"type": "text"}},
    {"id": "bad", "messages": STORY, "regex": "(never closed"},
    {"id": "unknown", "messages": STORY, "json_schema": {"type": "nothing"}},
    {"id": "conflict", "messages": STORY, "choice": ["a"], "min_tokens": 20},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("json_schema", json.dumps(SCHEMA, indent=1), json.dumps(SCHEMA)),
        ("json_object", True, True),
        ("regex", "a|b", "a|b"),
        ("choice", ["yes", "no"], ["yes", "no"]),
        ("grammar", 'start: "x"', 'start: "x"'),
        ("response_format", json.dumps({"type": "json_object"}), '{"type": "json_object"}'),
    ],
)
def test_every_format_has_columns_for_what_an_output_must_be(tmp_path, suffix, name, value, read):
    the_plan = plan(write(tmp_path / f"a.{suffix}", {"prompt": "x", name: value}))
    [row] = [row for row in request_rows(the_plan) if row["prompt"] == "x"]
    assert (row["error_message"], row[name], the_plan.carried_fields) == (None, read, [])


def test_a_struct_of_parquet_is_a_response_format(tmp_path):
    pq.write_table(pa.table({"prompt": ["x"], "response_format": [FORMAT]}), tmp_path / "a.parquet")
    [row] = request_rows(plan(tmp_path / "a.parquet"))
    assert (
        json.loads(row["response_format"])["json_schema"]["schema"]["required"]
        == SCHEMA["required"]
    )


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA, "json_schema": None},
        {"type": "json_schema", "schema": SCHEMA, "name": "a", "strict": True},
        {
            "type": "json_schema",
            "json_schema": {"schema": SCHEMA, "name": "a", "description": None, "strict": False},
        },
    ],
)
def test_a_response_format_keeps_its_schema_wherever_it_stands(form):
    kept = json.dumps({"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    assert response_format_text(form) == response_format_text(json.dumps(form)) == kept


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "schema": True},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA, "strict": True},
        {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "any_whitespace": False}},
        {"type": "json_object", "format": "a"},
        {"type": ["json_object"]},
        {"type": "text", "json_schema": 5},
    ],
)
def test_a_response_format_is_refused_if_it_asks_for_more(form):
    with pytest.raises(ValueError):
        response_format_text(form)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"json_schema": "{"}, "'json_schema' must be a JSON schema, as an object or as JSON text"),
        ({"json_schema": "[]"}, "'json_schema' must be a JSON schema"),
        ({"regex": "", "choice": "yes"}, "'choice' must be a list of texts"),
        ({"choice": "yes"}, "'choice' must be a list of texts, none of them empty"),
        ({"choice": []}, "'choice' must be a list of texts"),
        ({"response_format": {"type": "xml"}}, "'response_format' must be OpenAI's"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "'response_format' must be OpenAI's",
        ),
        (
            {"regex": "a", "grammar": 'start: "x"'},
            "columns 'regex' and 'grammar' both say what the output must be",
        ),
    ],
)
def test_a_wrong_column_is_an_error_of_its_row(tmp_path, columns, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "x"} | columns) + "\n")
    [row] = request_rows(plan(path))
    assert row["error_code"] == "bad_sampling" and message in row["error_message"]


def test_the_configuration_takes_mappings_and_names_wrong_keys(make_job):
    mapping, text = (
        make_job(**{"sampling.json_schema": SCHEMA}),
        make_job(**{"sampling.json_schema": json.dumps(SCHEMA)}),
    )
    assert mapping.sampling == text.sampling
    paths = ["input.path=a.jsonl", "output.path=out"]
    with pytest.raises(ConfigError, match=r"sampling\.choice: .* at most one of"):
        load_config(None, env={}, sets=[*paths, "sampling.regex=a", "sampling.choice=[b]"])


def test_a_row_does_without_what_the_job_says(make_job):
    job = make_job(**{"sampling.json_schema": SCHEMA})

    def spec(**row):
        return sequences_of(request(prompt_token_ids=[1], **row), job, None)[0].grammar_spec

    assert spec() == spec(json_object=False) == GrammarSpec("json_schema", json.dumps(SCHEMA))
    assert spec(regex="a") == GrammarSpec("regex", "a")
    assert (
        spec(json_object=True)
        == spec(response_format='{"type": "json_object"}')
        == GrammarSpec("json_object")
    )
    assert spec(response_format='{"type": "text"}') is None
    assert json.loads(
        controls_json(request(prompt_token_ids=[1], regex="a").sampling_params(job))
    ) == {"regex": "a"}


def test_without_an_end_a_grammar_is_refused(make_job):
    with pytest.raises(RequestError, match="ignore_eos must be false with regex"):
        sequences_of(request(prompt_token_ids=[1], regex="a", ignore_eos=True), make_job(), None)


def test_a_batch_file_has_them_in_its_body():
    row = parse_batch_line(line(response_format=FORMAT, temperature=0.5))
    assert json.loads(row["response_format"])["json_schema"]["schema"] == SCHEMA
    assert parse_batch_line(line(choice=["a"]))["choice"] == ["a"]


def test_a_batch_file_may_have_vllms_spelling():
    row = parse_batch_line(line(structured_outputs={"json": SCHEMA, "regex": None}))
    assert json.loads(row["json_schema"]) == SCHEMA and "structured_outputs" not in row
    refused = parse_batch_line(line(structured_outputs={"structural_tag": "a"}))["prompt"]
    assert "body.structured_outputs is not supported" in str(
        refused
    ) and "json_object, regex, choice" in str(refused)
    assert "use regex" in str(parse_batch_line(line(guided_regex="a"))["prompt"])


def test_drafting_rows_are_plain_decodings_and_what_they_must_be(make_job):
    job = {**TINY, "sampling.json_schema": SCHEMA, "sampling.max_tokens": 120}
    drafted, plain = (
        answers(make_job(ROWS, **job)),
        answers(make_job(ROWS, **job | {"speculative.method": "none"})),
    )
    for row, other in zip(drafted, plain, strict=True):
        for name in (
            "status",
            "error_code",
            "output_token_ids",
            "text",
            "structured",
            "structured_outcome",
        ):
            assert row[name] == other[name], (row["request_id"], name)
        assert row["status"] == "error" or broken_invariants(row) == []
    assert sum(row["num_accepted_draft_tokens"] or 0 for row in drafted) > 10
    _check({row["request_id"]: row for row in drafted})


def _check(rows: dict[str, dict]) -> None:
    for name in ("job", "format"):
        assert (rows[name]["structured"], rows[name]["structured_outcome"]) == (
            "json_schema",
            "complete",
        )
        jsonschema.validate(json.loads(rows[name]["text"]), SCHEMA)
    assert rows["choice"]["text"] in ["a fox", "a dog", "no answer"]
    assert re.fullmatch(r"(fox|dog){2,3}\.", rows["regex"]["text"])
    assert set(rows["grammar"]["text"]) == {"x", ","} or rows["grammar"]["text"] == "x"
    assert rows["object"]["structured"] == "json_object"
    outcomes = {
        name: (rows[name]["finish_reason"], rows[name]["structured_outcome"])
        for name in ("object", "cut")
    }
    assert outcomes == {"object": ("stop", "complete"), "cut": ("length", "truncated")}
    assert isinstance(json.loads(rows["object"]["text"]), dict)
    assert (rows["stop"]["text"], rows["stop"]["structured_outcome"]) == ("one two ", "truncated")
    assert (rows["free"]["structured"], rows["free"]["structured_outcome"]) == (None, None)
    codes = {name: row["error_code"] for name, row in rows.items() if row["status"] == "error"}
    assert codes == {"bad": "bad_grammar", "unknown": "bad_grammar", "conflict": "grammar_conflict"}
