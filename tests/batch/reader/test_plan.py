"""The plan: both formats through one parser; bad lines, limits, carried columns, ids that occur twice."""

from __future__ import annotations

import csv
import gzip
import json
import re
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import request_rows, request_tables, row_settings_line
from eagle_ray.batch.reader import scan
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.row_index import digests
from tests.support.inputs import errors, ids, plan, write_jsonl, write_parquet

ROWS = [{"id": i, "prompt": f"p{i}", "category": "ab"[i % 2], "score": i / 2} for i in range(10)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_another_encoding_is_named(tmp_path, encoding, name):
    text = "id,prompt\n1,Hi\n" if name == "a.csv" else '{"id": 1, "prompt": "Hi"}\n'
    content = text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(
        ConfigError, match=rf"{name}.*it is {encoding[:6].upper()} text\. Write it as UTF-8"
    ):
        plan(tmp_path / name)


def write_any(path: Path, rows: list[dict]) -> Path:
    """Write the rows in the format of the extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        return write_parquet(path, rows)
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_directories_of_hive_partitions_are_columns(tmp_path, suffix, caplog):
    """Texts, percent-encoded, or null; a directory that only some files have is null for the others."""
    root = tmp_path / "in"
    for i, directory in enumerate(
        ["lang=de/y=2024", "lang=a%2Fb%20%C3%BC/y=007", "lang=__HIVE_DEFAULT_PARTITION__", "."]
    ):
        write_any(root / directory / f"part.{suffix}", [{"id": i, "prompt": f"p{i}"}])
    caplog.set_level("INFO", "eagle_ray")
    for path in (root, root / f"**/*.{suffix}"):
        found = plan(path)
        assert "input.path: directories are read as columns: lang, y" in caplog.messages
        assert {
            column.name: column.field.type
            for column in found.reader.carried_columns
            if column.name in "lang y"
        } == {
            "lang": pa.string(),
            "y": pa.string(),
        }
        rows = {row["request_id"]: (row["lang"], row["y"]) for row in request_rows(found)}
        assert rows == {
            "0": ("de", "2024"),
            "1": ("a/b ü", "007"),
            "2": (None, None),
            "3": (None, None),
        }
    rows = {
        row["request_id"]: row
        for row in request_rows(plan(root, "input.template='{lang}: {prompt}'"))
    }
    assert (rows["0"]["prompt"], rows["3"]["error_code"]) == ("de: p0", "field_missing")


def test_a_partition_column_may_begin_with_an_underscore(tmp_path):
    write_any(tmp_path / "in" / "_lang=de" / "a.jsonl", [{"id": 0, "prompt": "p"}])
    write_any(tmp_path / "in" / "_temporary" / "lang=de" / "b.jsonl", [{"id": 1, "prompt": "p"}])
    [row] = request_rows(plan(tmp_path / "in"))
    assert (row["request_id"], row["_lang"]) == ("0", "de")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_file_column_takes_precedence_over_partition_directory(tmp_path, suffix):
    write_any(
        tmp_path / "in" / "year=2024" / f"a.{suffix}", [{"id": 0, "prompt": "p", "year": 1999}]
    )
    write_any(tmp_path / "in" / "year=2025" / f"b.{suffix}", [{"id": 1, "prompt": "p"}])
    assert [row["year"] for row in request_rows(plan(tmp_path / "in"))] == ["1999", "2025"]
    only = plan(tmp_path / "in" / "*" / f"a.{suffix}")
    assert [row["year"] for row in request_rows(only)] == [1999]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_a_directory_of_a_parameter_sets_it_for_its_rows(tmp_path, suffix):
    write_any(tmp_path / "in" / "temperature=0.5" / f"a.{suffix}", [{"id": 0, "prompt": "p"}])
    [row] = request_rows(plan(tmp_path / "in"))
    assert (row["temperature"], row["error_code"]) == (0.5, None)


def test_partition_directories_in_input_path_are_no_columns(tmp_path, caplog):
    write_any(tmp_path / "in" / "lang=de" / "a.jsonl", [{"id": 0, "prompt": "p"}])
    [row] = request_rows(plan(tmp_path / "in" / "lang=de"))
    assert (
        "lang" not in row
        and "lang=de is in the path that is given, so it is no column" in caplog.text
    )


def test_columns_that_set_parameters_are_named(tmp_path):
    rows = write_jsonl(
        tmp_path / "a.jsonl", [{"id": "a", "prompt": "x", "n": 3, "seed": None, "top_k": 2}]
    )
    line = "columns that set parameters of their rows: n, top_k. Rename a column that is data."
    assert row_settings_line(plan(rows)) == line
    body = {"prompt": "x", "n": 3}
    batch = write_jsonl(
        tmp_path / "b.jsonl", [{"custom_id": "a", "url": "/v1/completions", "body": body}]
    )
    assert row_settings_line(plan(batch)) is None


def test_both_formats_give_the_same_requests(tmp_path):
    jsonl = list(request_rows(plan(write_jsonl(tmp_path / "a.jsonl", ROWS))))
    parquet = list(
        request_rows(plan(write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=3)))
    )
    place = {"source_file": "", "source_line": None}
    assert [row | place for row in jsonl] == [row | place for row in parquet]
    assert jsonl[3]["request_id"] == "3"
    assert (jsonl[3]["prompt"], jsonl[3]["category"], jsonl[3]["score"], jsonl[3]["row_index"]) == (
        "p3",
        "b",
        1.5,
        3,
    )


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize("limit", [1, 7, 10, 99])
def test_shards_and_limit_keep_order_and_count(tmp_path, monkeypatch, write, limit):
    monkeypatch.setattr(scan, "SCANNED_SLICE_ROWS", 4)
    path = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), ROWS)
    the_plan = plan(path, f"input.limit={limit}")
    assert ids(the_plan) == [str(i) for i in range(min(limit, 10))]
    assert the_plan.num_rows == min(limit, 10)


def test_files_are_in_order_and_rows_without_id_get_their_place(tmp_path):
    for name in ("b", "a"):
        write_jsonl(
            tmp_path / f"{name}.jsonl",
            [{"prompt": "x"}, {"prompt": "y", "id": None}, {"prompt": "z", "id": name}],
        )
    assert ids(plan(tmp_path)) == ["a.jsonl:0", "a.jsonl:1", "a", "b.jsonl:0", "b.jsonl:1", "b"]


def test_a_malformed_line_is_one_bad_row(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"prompt": "bom"}',
        b"",
        b'{"prompt": "cut',
        b'{"prompt": "\xff"}',
        b"[1]",
        b'{"prompt": "half \\ud83d a pair"}',
        b'{"prompt": "\\ud83d\\ude00"}',
        b"[" * 100_000,
        b"   ",
        b'{"prompt": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    found = list(request_rows(plan(tmp_path / "a.jsonl")))
    assert [row["row_index"] for row in found] == [0, 2, 3, 4, 5, 6, 7, 9]
    assert [row["prompt"] for row in found] == ["bom", None, None, None, None, "😀", None, "last"]
    codes = [None, "bad_json", "bad_encoding", "bad_json", "bad_encoding", None, "bad_json", None]
    assert [row["error_code"] for row in found] == codes
    assert found[1]["error_message"].startswith(f"{tmp_path}/a.jsonl, line 3: the line is not JSON")
    assert found[1]["request_id"] == "a.jsonl:2"


HALF = r"\ud83d"  # an escape in JSON text
USER_HALF = f'[{{"role": "user", "content": "{HALF}"}}]'
CALL_HALF = {"function": {"name": "f", "arguments": f'{{"a": "{HALF}"}}'}}
HALF_ROWS = [
    (
        "messages",
        USER_HALF,
        "column 'messages': [0].content: half a surrogate: \\ud83d without its second half",
    ),
    (
        "tools",
        f'[{{"type": "function", "function": {{"name": "f", "description": "{HALF}"}}}}]',
        "'tools': [0].function",
    ),
    ("json_schema", f'{{"title": "{HALF}"}}', "column 'json_schema': title: half a surrogate"),
    ("response_format", f'{{"type": "text", "x": "{HALF}"}}', "'response_format': x: half"),
    ("chat_template_kwargs", f'{{"a": "{HALF}"}}', "'chat_template_kwargs': a: half"),
    ("choice", f'["a", "{HALF}"]', "'choice': [1]: half"),
    ("stop", f'["{HALF}"]', "'stop': [0]: half"),
    (
        "messages",
        json.dumps([{"role": "assistant", "tool_calls": [CALL_HALF]}]),
        "tool_calls[0].function.arguments: a: ",
    ),
]


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "csv"])
def test_lone_surrogate_in_json_text_is_one_bad_row_with_its_id(tmp_path, format_):
    names = list(dict.fromkeys(["id", "messages", *(name for name, _, _ in HALF_ROWS)]))
    good = {"id": "good", "messages": "Hi", "stop": '["a"]'}
    bad = [
        {"id": f"{i}", "messages": "Hi"} | {name: text}
        for i, (name, text, _) in enumerate(HALF_ROWS)
    ]
    rows = [dict.fromkeys(names) | row for row in [good, *bad]]
    if format_ == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", rows)
    elif format_ == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        with open(tmp_path / "a.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    first, *found = request_rows(plan(tmp_path))
    assert first["error_code"] is None and first["stop"] == ["a"]
    assert [(row["request_id"], row["error_code"]) for row in found] == [
        (row["id"], "bad_encoding") for row in bad
    ]
    for row, (_, _, says) in zip(found, HALF_ROWS, strict=True):
        assert says in row["error_message"]


def test_half_a_surrogate_in_a_line_is_one_bad_row_with_its_id(tmp_path):
    lines = [
        rf'{{"id": "a", "prompt": "Hi", "x": "{HALF}"}}',
        rf'{{"id": "{HALF}", "prompt": "Hi"}}',
    ]
    lines += [
        rf'{{"id": "c", "prompt": "Hi", "{HALF}": 1}}',
        '{"id": "d", "prompt": "Hi", "x": NaN}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = list(request_rows(plan(tmp_path / "a.jsonl")))
    assert [row["request_id"] for row in found] == ["a", "a.jsonl:1", "c", "d"]
    assert [row["error_code"] for row in found] == [
        *["bad_encoding"] * 3,
        None,
    ]  # Python writes NaN
    assert (
        "column 'x': half a surrogate: \\ud83d without its second half" in found[0]["error_message"]
    )


def test_it_is_said_where_a_line_is_cut(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"\n{"prompt": "y"}\n')
    cut, whole = request_rows(plan(tmp_path / "a.jsonl"))
    assert (
        "line 1: the line is not JSON (Expecting ',' delimiter: character 15)"
        in cut["error_message"]
    )
    assert whole["prompt"] == "y"


def test_a_text_in_parquet_that_is_not_utf8_is_one_bad_row(tmp_path):
    bad = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "a.parquet")
    assert errors(plan(tmp_path / "a.parquet")) == [None, "bad_encoding", None]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_rows_is_fine(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert plan(tmp_path / "a.jsonl").num_rows == 0
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    assert plan(tmp_path).num_rows == 10


def test_a_parquet_file_without_rows_is_fine(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert plan(tmp_path / "a.parquet").num_rows == 0


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet as parquet"):
        plan(tmp_path / "a.parquet")


def test_carried_types_are_fixed_over_all_files(tmp_path):
    rows = [
        {"prompt": "x", "number": 1, "mixed": 1, "nested": {"a": 1}, "nothing": None, "flag": True}
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "y", "number": 0.5, "mixed": "one", "late": "z"}])
    the_plan = plan(tmp_path)
    types = {field.name: str(field.type) for field in the_plan.carried_fields}
    texts = dict.fromkeys(["mixed", "nested", "nothing", "late"], "string")
    assert types == texts | {"number": "double", "flag": "bool"}
    first, second = request_rows(the_plan)
    assert (first["number"], first["mixed"], first["nested"], first["late"]) == (
        1.0,
        "1",
        '{"a": 1}',
        None,
    )
    assert (second["number"], second["mixed"], second["late"], second["flag"]) == (
        0.5,
        '"one"',
        "z",
        None,
    )


def test_parquet_and_jsonl_join_their_types(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "score": 1, "tags": ["u"]}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "y", "score": 2.5, "tags": None}])
    assert [(row["score"], row["tags"]) for row in request_rows(plan(tmp_path))] == [
        (1.0, ["u"]),
        (2.5, None),
    ]
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "z", "tags": ["v"]}])
    assert [row["tags"] for row in request_rows(plan(tmp_path))] == ['["u"]', None, '["v"]']


def test_parquet_types_of_every_input_column(tmp_path):
    message = pa.struct(
        [("role", pa.string()), ("content", pa.large_string()), ("name", pa.string())]
    )
    columns = {
        "id": pa.array([1.0, None, 3.0]),
        "messages": pa.array(
            [[{"role": "user", "content": "Hi", "name": None}], None, None], pa.list_(message)
        ),
        "prompt_token_ids": pa.array([None, [1, 2], None], pa.list_(pa.uint16())),
        "prompt": pa.array([None, None, "Hi"]).dictionary_encode(),
        "max_tokens": pa.array([5.0, None, 7.0]),
        "stop": pa.array([["a"], None, []]),
        "when": pa.array([0, 1, None], pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    the_plan = plan(tmp_path / "a.parquet")
    assert the_plan.carried_fields == [pa.field("when", pa.timestamp("ns"))]
    first, second, third = request_rows(the_plan)
    assert json.loads(first["messages"]) == [{"role": "user", "content": "Hi"}]
    assert (second["prompt_token_ids"], third["prompt"]) == ([1, 2], "Hi")
    assert [row["request_id"] for row in (first, second, third)] == ["1", "a.parquet:1", "3"]
    assert [row["max_tokens"] for row in (first, second, third)] == [5, None, 7]
    assert [row["stop"] for row in (first, second, third)] == [["a"], None, []]
    assert [row["error_code"] for row in (first, second, third)] == [None] * 3


def test_consumed_columns_are_not_carried_but_path_columns_are(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"qid": 1, "turns": ["Hi", "So"], "temperature": 0.5, "category": "c"}],
    )
    the_plan = plan(path, "input.columns.messages=turns[0]", "input.columns.id=qid")
    assert [field.name for field in the_plan.carried_fields] == ["turns", "category"]
    [row] = request_rows(the_plan)
    assert (row["request_id"], row["turns"], row["temperature"]) == ("1", '["Hi", "So"]', 0.5)
    assert json.loads(row["messages"]) == [{"role": "user", "content": "Hi"}]


def test_nothing_and_a_list_of_columns_are_carried(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert plan(path, "input.passthrough=none").carried_fields == []
    assert plan(path, "input.passthrough=[score]").carried_fields == [
        pa.field("score", pa.float64())
    ]
    with pytest.raises(ConfigError, match=r"no file has a column 'scor'; did you mean score\?"):
        plan(path, "input.passthrough=[scor]")


def test_a_column_named_like_one_of_the_jobs_is_renamed(tmp_path):
    row = {
        "prompt": "x",
        "text": "y",
        "input_text": "z",
        "score": 1,
        "status": "new",
        "messages": None,
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    [found] = request_rows(the_plan := plan(path, "input.columns.prompt=prompt"))
    assert list(the_plan.carried_types) == [
        "input_text_2",
        "input_text",
        "score",
        "input_status",
        "input_messages",
    ]
    assert (found["input_text_2"], found["input_text"], found["input_status"]) == ("y", "z", "new")
    assert list(plan(path, "input.passthrough=[text]").carried_types) == ["input_text"]
    assert list(plan(path, "input.passthrough=[prompt]").carried_types) == ["input_prompt"]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize(
    ("column", "setting"),
    [
        ("question", "input.columns.prompt=question"),
        ("my question", "'input.columns.prompt=my question'"),
        ("$(ls)", "'input.columns.prompt=$(ls)'"),
    ],
)
def test_input_without_prompts_is_refused_and_columns_are_listed(tmp_path, ending, column, setting):
    path = str(tmp_path / f"a.{ending}")
    if ending == "csv":
        Path(path).write_text(f"id,{column}\na,Hi\n")
    else:
        write_jsonl(Path(path), [{"id": "a", column: "Hi"}])
    example = re.escape(f"columns: id, {column}. For example: --set {setting}")
    with pytest.raises(
        ConfigError, match=rf"^input\.columns: no file has a column prompt, .*; {example}$"
    ):
        plan(path)


def test_a_csv_whose_first_line_is_a_row_is_told_apart(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1,hello\n2,world\n")
    with pytest.raises(
        ConfigError, match=r"columns: 1, hello\. If these are values, the file lacks a header"
    ):
        plan(str(path))


def test_numeric_column_name_in_jsonl_is_no_missing_header(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"1": "Hi"}])
    with pytest.raises(
        ConfigError, match=r"columns: 1\. For example: --set input\.columns\.prompt=1$"
    ):
        plan(path)


def test_a_configured_column_must_exist_somewhere(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question_id": 1, "turns": ["a"]}])
    with pytest.raises(
        ConfigError,
        match=r"input.columns.messages: no file has a column 'turn\[0\]'; did you mean turns",
    ):
        plan(path, "input.columns.messages=turn[0]")
    with pytest.raises(
        ConfigError,
        match=r"input.columns.id: no file has a column 'questionid'; did you mean question_id",
    ):
        plan(path, "input.columns.messages=turns[0]", "input.columns.id=questionid")
    with pytest.raises(ConfigError, match=r"input\.columns\.id: 'a\.\.b' is not a column"):
        plan(path, "input.columns.id=a..b")


def test_row_without_the_configured_path_names_the_setting(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"turns": []}, {"turns": ["Hi"]}])
    bad, good = request_rows(plan(path, "input.columns.messages=turns[0]"))
    assert "column 'turns[0]' (input.columns.messages) is absent or null" in bad["error_message"]
    assert good["error_message"] is None


def test_empty_ids_are_error_rows_with_ids_of_their_places(tmp_path):
    rows = [{"id": "", "prompt": "x"}, {"id": "", "prompt": "y"}, {"id": "c", "prompt": "z"}]
    the_plan = plan(write_jsonl(tmp_path / "a.jsonl", rows))
    assert ids(the_plan) == ["a.jsonl:0", "a.jsonl:1", "c"]
    assert errors(the_plan) == ["empty_id", "empty_id", None]


def test_without_any_prompt_column_the_job_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "x"}])
    with pytest.raises(
        ConfigError, match=r"column prompt, messages or prompt_token_ids.*columns: question"
    ):
        plan(path)


def test_rows_may_use_different_prompt_columns(tmp_path):
    rows = [
        {"prompt": "x"},
        {"messages": "y"},
        {"prompt_token_ids": [1]},
        {"prompt": "x", "messages": "y"},
        {"other": 1},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert errors(plan(path)) == [None, None, None, "prompt_ambiguous", "prompt_missing"]


def test_where_one_prompt_column_is_configured_only_it_is_read(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "prompt_token_ids": [1]}])
    the_plan = plan(path, "input.columns.prompt=question", "input.passthrough=none")
    assert [row["prompt"] for row in request_rows(the_plan)] == ["q"]


def test_an_id_that_occurs_twice_names_both_places(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "b.parquet", [{"id": "7", "prompt": "again"}])
    with pytest.raises(
        ConfigError,
        match=r"id '7' occurs twice: .*a\.jsonl, line 8 and .*b\.parquet, row 0 \(counted",
    ):
        plan(tmp_path)
    assert ids(plan(tmp_path, "input.limit=10")) == [str(i) for i in range(10)]


def test_ids_made_from_places_can_clash_and_are_found(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", [{"prompt": "x"}])
    assert ids(plan(tmp_path)) == ["x/a.jsonl:0", "y/a.jsonl:0"]
    with pytest.raises(
        ConfigError,
        match=r"id 'a.jsonl:0' occurs twice: .*x/a.jsonl, line 1 and .*y/a.jsonl, line 1",
    ):
        plan([tmp_path / "x", tmp_path / "y"])
    with pytest.raises(
        ConfigError, match=r"the same name below their roots: use one glob or a parent directory"
    ):
        plan([tmp_path / "x", tmp_path / "y"])


def test_on_bad_row_fail_refuses_the_job(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": 5}])
    assert errors(plan(path)) == [None, "bad_type"]
    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 2: column 'prompt' must be a text.*on_bad_row is fail"
    ):
        plan(path, "input.on_bad_row=fail")


UNHOLDABLE = [
    pa.array([2**62], pa.timestamp("ms")),
    pa.array([2**30], pa.date32()),
    pa.array([2**60], pa.duration("s")),
    pa.array([1], pa.timestamp("us", "Mars/Base")),
    pa.array([[2**30]], pa.list_(pa.date32())),
]


@pytest.mark.parametrize("values", UNHOLDABLE, ids=lambda values: str(values.type))
def test_column_that_python_cannot_hold_is_carried_but_is_no_id(tmp_path, values):
    pq.write_table(pa.table({"prompt": ["x"], "when": values}), tmp_path / "a.parquet")
    the_plan = plan(tmp_path / "a.parquet")
    [table] = request_tables(the_plan)
    assert table["when"].combine_chunks().equals(values) and ids(the_plan) == ["a.parquet:0"]
    with pytest.raises(
        ConfigError,
        match=r"a\.parquet: column 'when' .*cast it.*leave it out with input\.passthrough",
    ):
        ids(plan(tmp_path / "a.parquet", "input.columns.id=when"))


def test_maps_with_keys_that_are_no_texts_become_json(tmp_path):
    days = pa.array([[(date(2026, 1, 1), 1)]], pa.map_(pa.date32(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["x"], "days": days}), tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [{"prompt": "x", "days": 1}])
    assert [row["days"] for row in request_rows(plan(tmp_path))] == ['{"2026-01-01": 1}', "1"]


def test_parquet_types_are_carried_and_invalid_utf8_is_a_bad_row(tmp_path):
    columns = {
        "at": pa.array([1, None], pa.time64("ns")),
        "tags": pa.array([["a"], None], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "price": pa.array([1, None], pa.decimal128(12, 3)),
        "blob": pa.array([b"\xff", None]),
        "kind": pa.array(["k", None]).dictionary_encode(),
        "note": pa.array([{"a": b"ok"}, {"a": b"\xff"}]).cast(pa.struct([("a", pa.binary())])),
    }
    bad = pa.StructArray.from_arrays([columns["note"].field("a").view(pa.string())], ["a"])
    pq.write_table(
        pa.table({"prompt": ["x", "y"]} | columns | {"note": bad}), tmp_path / "a.parquet"
    )
    the_plan = plan(tmp_path / "a.parquet")
    stored = pq.read_schema(tmp_path / "a.parquet")
    assert the_plan.carried_fields == [stored.field(name) for name in columns]
    assert errors(the_plan) == [None, "bad_encoding"]
    [table] = request_tables(the_plan)
    assert table["note"].to_pylist() == [{"a": "ok"}, None] and table["blob"].to_pylist() == [
        b"\xff",
        None,
    ]
    assert table["at"].type == pa.time64("ns")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays(
        [pa.array(["x"]), pa.array([1]), pa.array([2])], names=["prompt", "tag", "tag"]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet has more than one column 'tag': rename"):
        plan(tmp_path / "a.parquet")


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", [{"prompt": "x" * 99, "id": str(i)} for i in range(99)]
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet as parquet"):
        ids(plan(path))


def test_a_parquet_file_of_no_bytes_is_named_with_the_fix(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot read .*b\.parquet as parquet \(.*\): delete it"):
        plan(tmp_path)


def test_parquet_file_of_another_schema_becomes_error_rows(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"id": "a", "prompt": "x", "tag": 1}])
    write_parquet(tmp_path / "b.parquet", [{"question": "x", "tag": "u"}])
    write_parquet(tmp_path / "c.parquet", [{"id": 7, "prompt": 5, "tag": 1.5}])
    write_parquet(tmp_path / "d.parquet", [{"id": {"x": 1}, "prompt": "p", "tag": [1]}])
    rows = list(request_rows(plan(tmp_path)))
    assert [row["request_id"] for row in rows] == ["a", "b.parquet:0", "7", "d.parquet:0"]
    assert [row["error_code"] for row in rows] == [None, "prompt_missing", "bad_type", "bad_type"]
    assert [row["tag"] for row in rows] == ["1", '"u"', "1.5", "[1]"]
    place = f"{tmp_path}/c.parquet, row 0 (counted from 0)"
    assert rows[2]["error_message"].startswith(f"{place}: column 'prompt' must be a text, got 5")


@pytest.mark.parametrize(
    "prompt", [{"prompt": ""}, {"messages": ""}, {"messages": []}, {"prompt_token_ids": []}]
)
def test_a_prompt_of_nothing_is_an_error_row(tmp_path, prompt):
    assert errors(plan(write_jsonl(tmp_path / "a.jsonl", [prompt]))) == ["prompt_empty"]


def test_what_is_wrong_is_said_shortly(tmp_path):
    [row] = request_rows(
        plan(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "temperature": "hot" * 10_000}]))
    )
    assert row["error_code"] == "bad_sampling" and len(row["error_message"]) < 200 + len(
        str(tmp_path)
    )


LAST_LINES = {
    "a.jsonl": '{"id": 1, "prompt": "Grüße an dich"}',
    "b.jsonl": json.dumps(
        {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    ),
    "a.csv": '1,"Hi, you",x',
}


@pytest.mark.parametrize(("name", "line"), LAST_LINES.items())
def test_a_part_of_a_last_line_is_no_row_until_it_is_whole(tmp_path, caplog, name, line):
    first = "id,prompt,c\n" if name == "a.csv" else ""
    first += line.replace("1", "0", 1) + "\n"
    content = line.encode()
    for length in range(1, len(content) - 2 * (name == "a.csv")):
        caplog.clear()
        (tmp_path / name).write_bytes(first.encode() + content[:length])
        assert ids(plan(tmp_path / name)) == ["0"], content[:length]
        [message] = [message for message in caplog.messages if "not whole" in message]
        number = first.count("\n") + 1
        assert message.endswith(
            f"{name}, line {number}: the last line is not whole. It is read once it is."
        )
    (tmp_path / name).write_bytes(first.encode() + content)
    assert ids(plan(tmp_path / name)) == ["0", "1"]
    (tmp_path / name).write_bytes(first.encode() + content[:10] + b"\n")
    assert len(ids(plan(tmp_path / name))) == 2


def test_value_that_cannot_be_carried_makes_an_error_row(tmp_path):
    """With its own id and samples. The others are carried in the joined type."""
    near, far = pa.array([{"t": 0}, {"t": 5}]), pa.array([{"t": 2**50}, {"t": 6}])
    fine, coarse = (pa.struct([("t", pa.timestamp(unit))]) for unit in ("ns", "ms"))
    for name, column in (("a", near.cast(fine)), ("b", far.cast(coarse))):
        given = {
            "id": [f"{name}{i}" for i in range(2)],
            "prompt": ["p", "p"],
            "n": [3, 3],
            "v": column,
        }
        pq.write_table(pa.table(given), tmp_path / f"{name}.parquet")
    found = plan(tmp_path)
    rows = {row["request_id"]: row for row in request_rows(found)}
    assert {name for name, row in rows.items() if row["error_code"]} == {"b0"}
    assert (
        "column 'v' cannot be carried through" in rows["b0"]["error_message"]
        and rows["b0"]["n"] == 3
    )
    assert [row["n"] for row in rows.values()] == [3] * 4 and found.rows.contains(
        digests(["b0"])
    ).all()


def test_a_carried_text_that_is_not_utf_8_leaves_the_row_its_id(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    pq.write_table(pa.table({"id": ["x"], "prompt": ["p"], "note": bad}), tmp_path / "a.parquet")
    [row] = request_rows(plan(tmp_path / "a.parquet"))
    assert (row["request_id"], row["error_code"]) == ("x", "bad_encoding")


def test_a_null_of_a_struct_is_an_absent_key_at_every_depth(tmp_path):
    def row(name: str, key: str) -> dict:
        call = {"function": {"name": name, "arguments": {key: 1}}}
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}},
        }
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        return {
            "id": name,
            "messages": [{"role": "user", "content": "Go"}, said],
            "tools": [tool],
            "json_schema": schema,
        }

    rows = [row("now", "tz"), row("rain", "city")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    lines, structs = (
        list(request_rows(plan(tmp_path / "a.jsonl"))),
        list(request_rows(plan(tmp_path / "b.parquet"))),
    )
    for name in ("error_code", "messages", "tools", "json_schema"):
        assert [request[name] for request in structs] == [request[name] for request in lines]
    written = [
        {key: json.dumps(value) for key, value in rows[0].items()}
        | {"json_schema": '{"const": null}'}
    ]
    pq.write_table(pa.Table.from_pylist(written), tmp_path / "c.parquet")
    [request] = request_rows(plan(tmp_path / "c.parquet"))
    assert request["json_schema"] == '{"const": null}', "a JSON text keeps its nulls"
