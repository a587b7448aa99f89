"""The rows that the README shows are rows that a job accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from eagle_ray.batch.driver.input_plan import request_rows
from tests.support.inputs import plan

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_rows_are_read(tmp_path):
    [block] = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(block)
    rows = list(request_rows(plan(tmp_path / "rows.jsonl")))
    assert [row["error_message"] for row in rows] == [None] * 3
    assert json.loads(rows[0]["json_schema"])["type"] == "object" and rows[1]["choice"] == [
        "yes",
        "no",
    ]
    assert (
        rows[1]["repetition_penalty"] == 1.1
        and json.loads(rows[2]["tools"])[0]["function"]["name"] == "add"
    )
