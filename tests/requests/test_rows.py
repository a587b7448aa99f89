"""One row: exactly one prompt, values in range, and errors that name file, row and column."""

import json
from datetime import date
from decimal import Decimal

import pytest

from eagle_ray.config import SamplingConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import PROMPTS, ColumnPath, RequestColumns, RowLocation, RowPosition
from eagle_ray.requests.request import parse_row
from eagle_ray.requests.row_schema import REQUEST, SAMPLING_FIELDS, table_of

COLUMNS = RequestColumns(ColumnPath.of("id"), {name: ColumnPath.of(name) for name in PROMPTS})
PLACE = RowLocation("sub/a.jsonl", "/data/sub/a.jsonl", RowPosition(7, 8))
USER = {"role": "user", "content": "Hi"}
DAY = date(
    2026, 1, 31
)  # a value, or a key of a map, as Parquet files have them and JSON lacks them
TOOL = {"type": "function", "function": {"name": "add"}}
FORMAT = {"type": "json_object", "schema": {"maximum": Decimal("9.90")}}


def request(**row):
    return {
        name: value
        for name, value in parse_row(row, COLUMNS, PLACE).to_row().items()
        if value is not None
    }


def test_a_prompt_of_each_kind():
    assert request(id="q", prompt="Hi")["prompt"] == "Hi"
    assert request(prompt_token_ids=[0, 3])["prompt_token_ids"] == [0, 3]
    assert json.loads(request(messages=[USER])["messages"]) == [USER]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (81, "81"),
        ("q-1", "q-1"),
        (81.0, "81"),
        (0.5, "0.5"),
        ("", "sub/a.jsonl:7"),
        (None, "sub/a.jsonl:7"),
    ],
)
def test_an_id_becomes_a_string_and_a_missing_one_the_place(given, wanted):
    assert request(id=given, prompt="Hi")["request_id"] == wanted


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (json.dumps([USER]), [USER]),
        (" [ {\n \"content\": \"Hi\", \"role\": \"user\"}]", [{"content": "Hi", "role": "user"}]),
        ("Hi", [USER]),
        ("[1, 2] sort these", [{"role": "user", "content": "[1, 2] sort these"}]),
        ('[{"a": 1}] what is this', [{"role": "user", "content": '[{"a": 1}] what is this'}]),
        ([USER | {"name": None}], [USER]),
        ([{"role": "system", "content": "ß"}, USER], [{"role": "system", "content": "ß"}, USER]),
    ],
)  # fmt: skip
def test_messages_may_be_a_list_its_json_or_one_text(messages, wanted):
    assert json.loads(request(messages=messages)["messages"]) == wanted


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        (
            {},
            "prompt_missing",
            "column 'prompt' or 'messages' or 'prompt_token_ids' is absent or null",
        ),
        ({"prompt": None}, "prompt_missing", "absent or null"),
        (
            {"prompt": "a", "messages": "b"},
            "prompt_ambiguous",
            "columns 'prompt' and 'messages' are set",
        ),
        ({"prompt": 5}, "bad_type", "column 'prompt' must be a text, got 5 (int)"),
        ({"prompt": ["a"]}, "bad_type", "got ['a'] (list)"),
        ({"messages": []}, "prompt_empty", "column 'messages' holds no message"),
        ({"messages": {"role": "user"}}, "bad_type", "must be a list of messages or a text"),
        ({"messages": ["Hi"]}, "bad_type", "messages[0] must be an object with role and content"),
        (
            {"messages": [USER, {"role": "bot", "content": ""}]},
            "bad_role",
            "messages[1].role must be system,",
        ),
        ({"messages": [{"role": ["user"], "content": ""}]}, "bad_role", "got ['user'] (list)"),
        (
            {"messages": [{"role": "user"}]},
            "bad_type",
            "messages[0].content must be a text, got None",
        ),
        (
            {"messages": '[{"role": "user", "content": '},
            "bad_json",
            "begins like messages but is not JSON",
        ),
        (
            {"messages": [USER | {"meta": {DAY: 1}}]},
            "bad_type",
            "column 'messages': a key of an object is no text",
        ),
        (
            {"prompt": "Hi", "tools": [TOOL | {"x": {DAY: 1}}]},
            "bad_type",
            "column 'tools': a key of an object",
        ),
        (
            {"prompt": "Hi", "json_schema": {"const": DAY}},
            "bad_sampling",
            "column 'json_schema' must be a JSON schema",
        ),
        (
            {"prompt": "Hi", "json_schema": {"enum": [b"a"]}},
            "bad_sampling",
            "column 'json_schema' must be a JSON",
        ),
        (
            {"prompt": "Hi", "response_format": FORMAT},
            "bad_sampling",
            "column 'response_format' must be OpenAI's",
        ),
        ({"prompt_token_ids": []}, "prompt_empty", "holds no token id"),
        ({"prompt_token_ids": "1 2"}, "bad_type", "must be a list of integers, got '1 2' (str)"),
        ({"prompt_token_ids": [1, True]}, "bad_type", "prompt_token_ids[1] must be a token id"),
        (
            {"prompt_token_ids": [-1]},
            "bad_type",
            "prompt_token_ids[0] must be a token id, an integer from 0, got -1",
        ),
        ({"prompt_token_ids": [2**63]}, "bad_type", "prompt_token_ids[0]"),
        ({"id": ["a"], "prompt": "Hi"}, "bad_type", "column 'id' must be a text or a number"),
        (
            {"prompt": "Hi", "temperature": -1},
            "bad_sampling",
            "column 'temperature' must be a number between 0",
        ),
        (
            {"prompt": "Hi", "temperature": 1e308},
            "bad_sampling",
            "between 0 (greedy) and 100, got 1e+308",
        ),
        (
            {"prompt": "Hi", "min_p": 1.5},
            "bad_sampling",
            "column 'min_p' must be a number between 0 (off) and 1",
        ),
        (
            {"prompt": "Hi", "ignore_eos": 1},
            "bad_sampling",
            "column 'ignore_eos' must be true or false, got 1",
        ),
        (
            {"prompt": "Hi", "logprobs": "yes"},
            "bad_sampling",
            "column 'logprobs' must be true or false",
        ),
        (
            {"id": "", "prompt": "Hi"},
            "empty_id",
            "column 'id' is an empty text ('' (str)). Give the row an id",
        ),
        ({"id": " \n", "prompt": "Hi"}, "empty_id", "column 'id' is an empty text"),
        ({"prompt": "Hi", "temperature": "0.5"}, "bad_sampling", "got '0.5'"),
        (
            {"prompt": "Hi", "max_tokens": 1.5},
            "bad_sampling",
            "column 'max_tokens' must be an integer, 1 or more",
        ),
        ({"prompt": "Hi", "n": 0}, "bad_sampling", "column 'n'"),
        ({"prompt": "Hi", "stop": [""]}, "bad_sampling", "column 'stop'"),
        (
            {"prompt": "Hi", "seed": 2**64},
            "bad_sampling",
            "column 'seed' must be a 64-bit integer, at most 18446744",
        ),
        (
            {"prompt": "Hi", "n": 1025},
            "bad_sampling",
            "'n' must be a number of samples per row, 1 to 1024, got 1025",
        ),
        (
            {"prompt": "Hi", "max_tokens": -1},
            "bad_sampling",
            "column 'max_tokens' must be an integer, 1 or more, or 0 where something is scored, got -1",
        ),
        (
            {"prompt": "Hi", "top_k": 10**12},
            "bad_sampling",
            "(off) or more, at most 2147483647, got 1000000000000",
        ),
        (
            {"prompt": "Hi", "json_schema": "{'a'"},
            "bad_sampling",
            "got \"{'a'\" (Expecting property name",
        ),
        (
            {"prompt": "Hi", "choice": "[1"},
            "bad_sampling",
            "grammar and response_format is set, got '[1'",
        ),
        (
            {"prompt": "Hi", "regex": "a", "choice": ["b"]},
            "bad_sampling",
            "columns 'regex' and 'choice' both",
        ),
        (
            {"prompt": "Hi", "parallel_tool_calls": 1},
            "bad_type",
            "'parallel_tool_calls' must be true or false, got 1 (",
        ),
        (
            {"prompt": "Hi", "tools": {"a": None}},
            "bad_type",
            "column 'tools': must be a list of tools",
        ),
    ],
)
def test_a_bad_row_says_what_is_wrong_where(row, code, says):
    bad = request(**row)
    assert bad["error_code"] == code
    assert bad["error_message"].startswith("/data/sub/a.jsonl, line 8: ")
    assert says in bad["error_message"]
    assert not {"prompt", "messages", "prompt_token_ids"} & bad.keys()
    table_of([bad], REQUEST)


def test_a_row_that_is_no_row_keeps_its_reason():
    bad = parse_row(RequestError("bad_json", "the line is not JSON"), COLUMNS, PLACE)
    assert bad.id == "sub/a.jsonl:7"
    assert (bad.error.code, str(bad.error)) == (
        "bad_json",
        "/data/sub/a.jsonl, line 8: the line is not JSON",
    )


def test_a_rows_own_sampling():
    given = dict(
        temperature=1, top_p=0.5, top_k=0, min_p=0.1, max_tokens=3.0, n=2, seed=5, stop="END"
    )
    given |= {"ignore_eos": True, "logprobs": False}
    good = request(prompt="Hi", other=1, **given)
    assert {name: good[name] for name in given} == given | {"stop": ["END"]}
    assert request(prompt="Hi", top_k=-1)["top_k"] == 0
    empty = request(prompt="Hi", **dict.fromkeys(given))
    assert [empty.get(name) for name in given] == [None] * len(given)


def test_a_row_takes_every_key_of_sampling_and_the_seed():
    assert {field.name for field in SAMPLING_FIELDS} == {*SamplingConfig.model_fields, "seed"}


def test_a_seed_keeps_its_64_bits():
    assert request(prompt="Hi", seed=2**64 - 1)["seed"] == -1
    assert request(prompt="Hi", seed=-(2**63))["seed"] == -(2**63)
    table_of([request(prompt="Hi", seed=2**63)], REQUEST)
