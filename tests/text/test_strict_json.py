"""JSON text: what is JSON, and that the answer does not depend on who asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.config import load_config
from eagle_ray.text.strict_json import MAX_JSON_DEPTH, HalfSurrogate, check_texts, parse_json


def deep_json(depth: int) -> str:
    return "[" * depth + "]" * depth


def call_nested(calls: int, function: Callable[[], Any]) -> Any:
    return function() if calls == 0 else call_nested(calls - 1, function)


@pytest.mark.parametrize(
    "text", ["{}", "[1, null]", '"x"', deep_json(MAX_JSON_DEPTH), "[" + "{}," * 999 + "{}]"]
)
def test_the_value_is_json_s(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 100_000])
def test_what_is_too_deep_is_refused_whoever_asks(depth):
    for calls in (0, 200):
        with pytest.raises(ValueError, match=f"more than {MAX_JSON_DEPTH} deep"):
            call_nested(calls, lambda: parse_json(deep_json(depth)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": [NaN]}', "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "key 'b' is given more than once"),
        ("[" + "9" * 5000 + "]", "thousands of digits"),
        (r'{"a": ["x", "cut \udc00"]}', r"^a\[1\]: half a surrogate: \\udc00 without"),
        (r'{"a": {"\ud83d": 1}}', r"^a: half a surrogate: \\ud83d without"),
        ('"raw \ud83d"', "^half a surrogate"),
    ],
)
def test_what_a_reader_would_lose_or_fail_at_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_a_whole_pair_is_one_character():
    assert parse_json(r'{"\ud83d\ude00": "\\ud83d"}') == {"😀": r"\ud83d"}


@pytest.mark.parametrize(
    "value", [["a", ("b\ud800",)], {"a": {"\ud800": 1}}, {5: "\ud800"}, "\ud800"]
)
def test_texts_of_python_values_are_checked_at_every_depth(value):
    with pytest.raises(HalfSurrogate):
        check_texts(value)


def test_a_value_that_contains_itself_is_too_deep():
    value: list[Any] = ["a", 1]
    check_texts(value)
    value.append(value)
    with pytest.raises(ValueError, match="deep"):
        check_texts(value)


def test_a_row_has_one_id_however_deep_the_reader_stands(tmp_path):
    """The driver counts ids from a shallow place and workers read them from a deep one."""
    depths = [MAX_JSON_DEPTH - 1, MAX_JSON_DEPTH, 600, sys.getrecursionlimit() - 150]
    lines = [f'{{"id": "d{depth}", "prompt": "Hi", "x": {deep_json(depth)}}}' for depth in depths]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    overrides = {"input.path": str(tmp_path / "a.jsonl"), "output.path": "unused"}
    plan = plan_input(load_config(None, env={}, overrides=overrides))
    shallow, below = list(request_rows(plan)), call_nested(200, lambda: list(request_rows(plan)))
    assert shallow == below
    assert [row["error_code"] for row in shallow] == [None, "bad_json", "bad_json", "bad_json"]
    assert "line 2: " in shallow[1]["error_message"] and "flatten it" in shallow[1]["error_message"]
