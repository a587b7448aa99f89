"""Parquet columns of bytes, as Spark and Hive write texts: read as texts, and what to do about other bytes."""

from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import request_rows
from tests.support.inputs import ids, plan

KINDS = [pa.binary(), pa.large_binary(), pa.binary(2), pa.dictionary(pa.int32(), pa.binary())]


@pytest.mark.parametrize("type_", KINDS, ids=str)
def test_bytes_that_are_utf_8_are_ids_prompts_and_settings(tmp_path, type_):
    columns = {
        name: pa.array([b"q1", "é".encode()]).cast(type_)
        for name in ("id", "prompt", "stop", "note")
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = list(request_rows(plan(tmp_path / "a.parquet")))
    assert [(row["request_id"], row["prompt"], row["stop"]) for row in rows] == [
        ("q1", "q1", ["q1"]),
        ("é", "é", ["é"]),
    ]
    assert rows[1]["note"] == "é".encode()  # a carried column keeps its type


def test_bytes_within_messages_are_texts(tmp_path):
    message = pa.struct([("role", pa.binary()), ("content", pa.binary())])
    rows = pa.array([[{"role": b"user", "content": b"Hi"}]], pa.list_(message))
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet")
    [row] = request_rows(plan(tmp_path / "a.parquet"))
    assert row["messages"] == '[{"role": "user", "content": "Hi"}]'


def test_bytes_that_are_no_text_have_a_remedy(tmp_path):
    pq.write_table(pa.table({"id": [b"\xff\x00"], "prompt": ["Hi"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": ["b"], "prompt": [b"\xff"]}), tmp_path / "b.parquet")
    for row in request_rows(plan([tmp_path / "a.parquet", tmp_path / "b.parquet"])):
        assert (
            "They are not UTF-8 text: cast the column to a text, such as hex(id) in SQL"
            in row["error_message"]
        )


def test_uuids_are_ids_as_they_are_written(tmp_path):
    value = UUID("12345678-1234-5678-1234-567812345678")
    column = (
        pa.array([value.bytes], pa.uuid())
        if hasattr(pa, "uuid")
        else pytest.skip("this pyarrow has no uuid")
    )
    pq.write_table(pa.table({"id": column, "prompt": ["Hi"]}), tmp_path / "a.parquet")
    assert ids(plan(tmp_path / "a.parquet")) == [str(value)]
