"""CSV: what RFC 4180 allows comes back as it was, what it does not is one bad row, and every shard stands alone."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.batch.reader import csv_files, scan
from eagle_ray.batch.reader.carried_columns import CSV_TEXT
from eagle_ray.batch.reader.csv_files import rows_in_csv, type_of_csv_value
from eagle_ray.batch.reader.file_slices import chunks_in
from eagle_ray.batch.reader.files import find_files
from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.scan import FilePart, FileScan, rows_in_part
from eagle_ray.config import ColumnsConfig
from eagle_ray.core.errors import ConfigError, RequestError
from tests.support.inputs import errors, ids, plan

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
HOSTILE = st.lists(
    st.sampled_from([b'"', b",", b"\n", b"\r\n", b"\r", b"a", b"\xff", b"\xef\xbb\xbf", b" ", b"1"])
)


def read(content: bytes) -> list:
    return [
        row if isinstance(row, dict) else row.code
        for _, _, row in rows_in_csv(io.BytesIO(content), "a.csv")
    ]


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def test_a_file_as_rfc_4180_has_it():
    content = b'\xef\xbb\xbfid,"a ""b"""\r\n1,"x,\r\n""y"""\r\n\r\n2,\r\n"3","caf\xc3\xa9"'
    name = 'a "b"'
    assert read(content) == [
        {"id": "1", name: 'x,\r\n"y"'},
        {"id": "2", name: None},
        {"id": "3", name: "café"},
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=8), st.sampled_from(["\r\n", "\n"]))
def test_what_a_csv_writer_wrote_is_read_back(table, newline):
    stream = io.StringIO()
    csv.writer(stream, lineterminator=newline, quoting=csv.QUOTE_ALL).writerows(
        [("a", "b", "c"), *table]
    )
    wanted = [dict(zip("abc", (text or None for text in row), strict=True)) for row in table]
    assert read(stream.getvalue().encode()) == wanted


@settings(deadline=None, max_examples=300)
@given(HOSTILE)
def test_csv_bytes_are_rows_or_bad_rows_readable_from_any_row_on(parts):
    stream = io.BytesIO(b"a,b\n" + b"".join(parts))
    rows = list(rows_in_csv(stream, "a.csv"))
    assert all(isinstance(row, RequestError) or row.keys() == {"a", "b"} for _, _, row in rows)
    for i, (offset, index, _) in enumerate(rows):
        again = list(rows_in_csv(stream, "a.csv", offset, index))
        assert [str(row) for row in again] == [str(row) for row in rows[i:]]


def test_a_ragged_row_is_one_bad_row():
    assert read(b"a,b\n1,2\n1\n1,2,3\n3,4\n") == [
        {"a": "1", "b": "2"},
        "bad_csv",
        "bad_csv",
        {"a": "3", "b": "4"},
    ]


def test_a_quote_that_nobody_closes_costs_one_row():
    rows = read(b'a,b\n1,"open\n2,x\n3,"shut"\n4,y\n')
    assert rows == ["bad_csv", {"a": "2", "b": "x"}, {"a": "3", "b": "shut"}, {"a": "4", "b": "y"}]
    assert read(b'a,b\n1,"open\n2,x\n') == ["bad_csv", {"a": "2", "b": "x"}]


def test_open_quote_is_one_bad_row_within_the_record_limit(monkeypatch):
    monkeypatch.setattr(csv_files, "MAX_RECORD_BYTES", 100)
    rows = read(b'a,b\n1,"open\n' + b"2,x\n" * 200)
    assert rows == ["bad_csv", *[{"a": "2", "b": "x"}] * 200]


def test_a_long_text_is_no_error():
    assert read(b'a\n"' + b"x\n" * 200_000 + b'"\n') == [{"a": "x\n" * 200_000}]


def test_a_text_that_is_not_utf8_is_a_bad_row_that_keeps_its_id(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,prompt,note\n7,caf\xe9,n\n8,ok,\xe9\n9,ok,n\n")
    rows = list(request_rows(plan(tmp_path / "a.csv")))
    assert [(row["request_id"], row["error_code"], row["note"]) for row in rows] == [
        ("7", "bad_encoding", "n"),
        ("8", "bad_encoding", None),
        ("9", None, "n"),
    ]
    assert f"{tmp_path}/a.csv, line 3: column 'note' is not UTF-8" in rows[1]["error_message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"prompt,tag,tag\nx,1,2\n", "more than one column 'tag'"),
        (b",prompt\n0,x\n", "column 1 has no name"),
        (b"\xff\xfep\x00\n\x00", "it is UTF-16 text"),
        (b'"prompt\n', "its first line is not CSV"),
        (
            b"prompt\rx\ry\r",
            "it is text whose lines end in carriage returns alone. End them in line feeds: mv",
        ),
    ],
)
def test_a_header_that_cannot_be_one_is_a_configuration_error(tmp_path, content, says):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        plan(tmp_path / "a.csv")
    assert f"{tmp_path}/a.csv" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"id,prompt\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_fine(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    assert plan(tmp_path / "a.csv").num_rows == 0


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        (None, pa.null()), ("0", pa.int64()), ("-12", pa.int64()), ("9223372036854775807", pa.int64()),
        ("9223372036854775808", CSV_TEXT), ("007", CSV_TEXT), ("+1", CSV_TEXT),
        ("1_0", CSV_TEXT), ("٣", CSV_TEXT), (" 1", CSV_TEXT),
        ("0.5", pa.float64()), (".5", pa.float64()), ("-1.", pa.float64()), ("1e-3", pa.float64()),
        ("00.5", CSV_TEXT), ("nan", CSV_TEXT), ("1e", CSV_TEXT), (".", CSV_TEXT), ("-", CSV_TEXT),
        ("true", pa.bool_()), ("False", pa.bool_()), ("yes", CSV_TEXT), ("2026-01-01", CSV_TEXT),
    ],
)  # fmt: skip
def test_types_of_values(text, type_):
    assert type_of_csv_value(text) == type_


def test_types_of_carried_columns_are_those_of_the_whole_file(tmp_path):
    content = "prompt,i,f,b,mixed,late,none,zip\n5,1,1,true,1,1,,01234\n6,2,0.5,False,true,2,,\n7,,,,,x,,99999\n"
    the_plan = plan(write(tmp_path / "a.csv", content))
    types = {field.name: str(field.type) for field in the_plan.carried_fields}
    texts = dict.fromkeys(["mixed", "late", "none", "zip"], "string")
    assert types == {"i": "int64", "f": "double", "b": "bool"} | texts
    first, second, third = ([row[name] for name in types] for row in request_rows(the_plan))
    assert first == [1, 1.0, True, "1", "1", None, "01234"]
    assert second == [2, 0.5, False, "true", "2", None, None]
    assert third == [None, None, None, None, "x", None, "99999"]
    assert [row["prompt"] for row in request_rows(the_plan)] == ["5", "6", "7"]


def test_a_column_that_is_text_in_one_file_is_text_in_all(tmp_path):
    write(tmp_path / "a.csv", "prompt,tag\nx,1\n")
    write(tmp_path / "b.csv", "prompt,tag\ny,two\n")
    write(tmp_path / "c.jsonl", '{"prompt": "z", "tag": ["u"]}\n{"prompt": "z", "tag": "v"}\n')
    assert [row["tag"] for row in request_rows(plan(tmp_path))] == ["1", "two", '["u"]', "v"]


def test_prompts_and_sampling_of_every_kind(tmp_path):
    head = "id,prompt,messages,prompt_token_ids,temperature,max_tokens,seed,stop,logprobs\n"
    rows = [
        "007,5,,,0.5,3,-1,END,True",
        'm,,"[{""role"": ""user"", ""content"": ""Hi""}]",,,,,"[""a"", ""b""]",',
        'k,,,"[1, 2]",,,,5,',
        "t,,,1 2,,,,,",
        "e,,,,,,,,",
        "s,x,,,hot,,,,",
        "f,x,,,,2.5,,,",
    ]
    found = list(request_rows(plan(write(tmp_path / "a.csv", head + "\n".join(rows)))))
    assert [row["request_id"] for row in found] == ["007", "m", "k", "t", "e", "s", "f"]
    codes = [None, None, None, "bad_type", "prompt_missing", "bad_sampling", "bad_sampling"]
    assert [row["error_code"] for row in found] == codes
    text, messages, tokens = found[:3]
    names = ("prompt", "temperature", "max_tokens", "seed", "stop", "logprobs")
    assert [text[name] for name in names] == ["5", 0.5, 3, -1, ["END"], True]
    assert (messages["messages"], messages["stop"]) == (
        '[{"role": "user", "content": "Hi"}]',
        ["a", "b"],
    )
    assert (tokens["prompt_token_ids"], tokens["stop"]) == ([1, 2], ["5"])
    assert (
        "column 'temperature' must be a number between 0 (greedy) and 100, got 'hot'"
        in found[5]["error_message"]
    )


@pytest.mark.parametrize("limit", [1, 7, 10, 99])
def test_shards_and_limit_keep_order_and_count(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(scan, "SCANNED_SLICE_ROWS", 3)
    rows = "".join(
        f'{i},"line one of {i}\nline ""two"""\n' if i % 4 else f'{i},"open\n' for i in range(10)
    )
    the_plan = plan(write(tmp_path / "a.csv", "id,prompt\n" + rows), f"input.limit={limit}")
    whole = plan(tmp_path / "a.csv")
    assert list(request_rows(the_plan)) == list(request_rows(whole))[:limit]
    assert the_plan.num_rows == min(limit, whole.num_rows) and len(whole.slices) > 3


def test_each_shard_is_read_on_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "SCANNED_SLICE_ROWS", 2)
    content = "\ufeffid,prompt\r\n" + "".join(f'{i},"a\r\nb, {i}"\r\n\r\n' for i in range(7))
    [file] = find_files(str(write(tmp_path / "a.csv", content)), "auto")
    found = FileScan()
    list(rows_in_part(FilePart(file), request_columns(ColumnsConfig()), found))
    for shard in reversed(found.slices):
        rows = [row for chunk in chunks_in(shard, [], {}) for row in chunk.rows]
        assert [at.row for at, _ in rows] == [shard.first.row, shard.first.row + 2][
            : shard.num_rows
        ]
        assert [row["prompt"] for _, row in rows] == [f"a\r\nb, {at.row // 2}" for at, _ in rows]
        assert [at.line for at, _ in rows] == [2 + 3 * (at.row // 2) for at, _ in rows]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    content = b'\n"id","pro\nmpt"\n\n1,"a\nb"\n2,"open\n3,x,y\n4,"c\r\n\r\nd"\n5\n'
    found = [(at, row) for _, at, row in rows_in_csv(io.BytesIO(content), "a.csv")]
    lines = content.decode().replace("\r", "").split("\n")
    assert [lines[at.line - 1] for at, _ in found] == ['1,"a', '2,"open', "3,x,y", '4,"c', "5"]


def test_empty_id_is_the_row_place_and_duplicate_id_is_refused(tmp_path):
    assert ids(plan(write(tmp_path / "a.csv", "id,prompt\n,x\nb,y\n"))) == ["a.csv:0", "b"]
    with pytest.raises(
        ConfigError, match=r"id 'b' occurs twice: .*a\.csv, line 2 and .*a\.csv, line 4"
    ):
        plan(write(tmp_path / "a.csv", "id,prompt\nb,x\nc,y\nb,z\n"))


def test_a_single_column_of_prompts(tmp_path):
    assert errors(plan(write(tmp_path / "a.csv", "prompt\nx\n\n1\n"))) == [None, None]
