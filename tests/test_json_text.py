"""JSON that this package writes is read by every reader of JSON: NaN and infinities are null."""

import json
import re
from pathlib import Path

import pytest

import eagle_ray
from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.messages import parse_messages, template_messages
from eagle_ray.storage.path import json_bytes
from tests.support.inputs import plan

NAN, INFINITY = float("nan"), float("inf")
WRITES_OTHERWISE = {
    "core/json_text.py",
    "batch/driver/dataset.py",  # values for a reader of our own, which refuses NaN where it is wrong
    "batch/worker/start_cache.py",  # a digest
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    "value", [NAN, [NAN, 1], {"a": (INFINITY, {"b": -INFINITY})}, {NAN: 1}, {"a": 1.5}]
)
def test_every_value_is_written_as_json(value):
    for text in (dump_json(value), json_bytes(value).decode()):
        json.loads(text, parse_constant=refuse)


def test_carried_objects_and_messages_have_null_for_nan(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Hi", "score": NaN}], "meta": {"a": [Infinity, 1]}, "n": 1}\n'
    )
    [row] = request_rows(plan(tmp_path / "a.jsonl"))
    assert row["meta"] == '{"a": [null, 1]}'
    assert row["messages"] == '[{"role": "user", "content": "Hi", "score": null}]'


def test_a_template_reads_the_messages_that_are_stored():
    [message] = template_messages(
        parse_messages([{"role": "user", "content": "Hi", "score": NAN}], "messages")
    )
    assert message["score"] is None


def test_json_is_written_in_one_place():
    root = Path(eagle_ray.__file__).parent
    writers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"(?<!`)json\.dumps?\(", path.read_text())
    }
    assert writers == WRITES_OTHERWISE
