"""JSON text: what is JSON, and that the answer does not depend on who asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from eagle_ray.batch.input.plan import plan_input, requests_of
from eagle_ray.config import load_config
from eagle_ray.strict_json import MAX_JSON_DEPTH, parse_json


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


def called_from(calls: int, function: Callable[[], Any]) -> Any:
    return function() if calls == 0 else called_from(calls - 1, function)


@pytest.mark.parametrize("text", ["{}", "[1, null]", '"x"', deep(MAX_JSON_DEPTH), "[" + "{}," * 999 + "{}]"])
def test_the_value_is_json_s(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 100_000])
def test_what_is_too_deep_is_refused_whoever_asks(depth):
    for calls in (0, 200):
        with pytest.raises(ValueError, match=f"more than {MAX_JSON_DEPTH} deep"):
            called_from(calls, lambda: parse_json(deep(depth)))


def test_a_row_has_one_id_however_deep_the_reader_stands(tmp_path):
    """The driver counts ids from a shallow place and workers read them from a deep one."""
    depths = [MAX_JSON_DEPTH - 1, MAX_JSON_DEPTH, 600, sys.getrecursionlimit() - 150]
    lines = [f'{{"id": "d{depth}", "prompt": "Hi", "x": {deep(depth)}}}' for depth in depths]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    overrides = {"input.path": str(tmp_path / "a.jsonl"), "output.path": "unused"}
    plan = plan_input(load_config(None, env={}, overrides=overrides))
    shallow, below = list(requests_of(plan)), called_from(200, lambda: list(requests_of(plan)))
    assert shallow == below
    assert [row["error_code"] for row in shallow] == [None, "bad_json", "bad_json", "bad_json"]
    assert "line 2: " in shallow[1]["error_message"] and "flatten it" in shallow[1]["error_message"]
