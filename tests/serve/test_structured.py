"""Structured outputs of requests: over HTTP they are what a batch row's are, streamed or not."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.support.schemas import FORMAT, SCHEMA
from tests.support.serving import CHAT, FRANCE, TEXT, ask, batch_rows, texts


def test_answers_are_the_batch_jobs(app, tmp_path):
    asked = [
        (CHAT, FRANCE | {"response_format": FORMAT, "max_tokens": 120}),
        (CHAT, FRANCE | {"choice": ["Paris", "London"], "temperature": 0.9, "seed": 3}),
        (
            TEXT,
            {
                "prompt": "Once",
                "json_schema": SCHEMA,
                "max_tokens": 120,
                "temperature": 0.7,
                "seed": 5,
            },
        ),
        (TEXT, {"prompt": "Once", "regex": "[a-c]{3}x", "n": 2, "seed": 1}),
        (
            CHAT,
            FRANCE
            | {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 120},
        ),
    ]
    rows = batch_rows(tmp_path, [{"id": f"{i}", **body} for i, (_, body) in enumerate(asked)])
    by_request = {
        str(i): [row for row in rows if row["request_id"] == str(i)] for i in range(len(asked))
    }
    for i, (path, body) in enumerate(asked):
        choices = ask(app, path, body).json["choices"]
        found = [
            choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices
        ]
        assert found == [row["text"] for row in by_request[str(i)]]
        assert texts(ask(app, path, body | {"stream": True}).events) == found
    for i in ("0", "4"):
        jsonschema.validate(json.loads(by_request[i][0]["text"]), SCHEMA)
    assert by_request["1"][0]["text"] in ["Paris", "London"]


BAD_FORM = {"type": "json_object", "schema": {"type": "nothing"}}


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"regex": "(", "max_tokens": 4}, "regex", "regex: "),
        (
            {"response_format": {"type": "yaml"}},
            "response_format",
            "response_format: must be {type: text}",
        ),
        (
            {"regex": "a", "json_object": True},
            "regex",
            "json_object and regex both say what the output must be",
        ),
        ({"json_schema": {"type": "nothing"}}, "json_schema", "json_schema: "),
        ({"response_format": BAD_FORM}, "response_format", "response_format: "),
        ({"response_format": BAD_FORM, "stream": True}, "response_format", "response_format: "),
        ({"choice": ["a"], "min_tokens": 9}, "min_tokens", "the other controls forbid every token"),
        (
            {"choice": ["a"], "ignore_eos": True},
            "ignore_eos",
            "ignore_eos must be false with choice",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(app, extra, param, message):
    answer = ask(app, CHAT, FRANCE | extra)
    error = answer.json["error"]
    assert answer.status == 400 and message in error["message"]
    assert error["param"] == param


def test_a_stream_that_fails_in_the_engine_ends_with_an_error(app):
    events = ask(app, CHAT, FRANCE | {"choice": ["a"], "min_tokens": 9, "stream": True}).events
    assert any(event["error"]["code"] == "grammar_conflict" for event in events if "error" in event)


def test_grammar_that_is_slow_to_follow_fails_soon(app):
    """Its text can be read in a number of ways that grows with its length, so each mask takes longer than the last."""
    grammar = "root ::= p p p\np ::= [a-z ] | [a-z ] p [a-z ] | p p"
    body = {
        "prompt": "Hi",
        "grammar": grammar,
        "min_tokens": 300,
        "max_tokens": 400,
        "temperature": 1,
        "seed": 1,
    }
    answer = ask(app, TEXT, body)
    assert answer.status == 400 and answer.json["error"]["code"] == "grammar_limit"
    assert answer.json["error"]["message"].startswith(
        "grammar: following it takes more parser time"
    )
