"""Columns that are request parameters which rows cannot set: refused, logged or carried, and never dropped silently."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.parameters import ROW_PARAMETERS, Api, match_unsupported
from eagle_ray.requests.refused import REFUSED, has_effect, refused_at
from tests.support.inputs import plan, write_jsonl, write_parquet

ASKED = {
    "typical_p": 0.5,
    "diversity_penalty": -1,
    "encoder_repetition_penalty": 1.1,
    "min_new_tokens": 3,
    "suppress_tokens": [2],
    "guided_json": {"type": "object"},
    "structured_outputs": {"regex": "a+"},
    "sequence_bias": {"5": -100},
    "best_of": 2,
    "no_repeat_ngram_size": 5,
    "logits_processors": 1,
    "bad_words_ids": ["no"],
    "max_new_tokens": 7,
    "do_sample": True,
    "sampling_params": {"temperature": 0.5},
    "chat_template": "{{ messages }}",
}
NOTHING = [None, "", " ", [], {}]


def write_csv(path: Path, rows: list[dict]) -> Path:
    table = pa.table({name: [_cell(row.get(name)) for row in rows] for name in rows[0]})
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in table.to_pylist())]
    quoted = (",".join('"' + text.replace('"', '""') + '"' for text in line) for line in lines)
    path.write_text("\n".join(quoted))
    return path


def _cell(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet, "csv": write_csv}


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("name", ASKED)
def test_a_parameter_that_rows_cannot_set_is_refused_by_name(tmp_path, format_, name):
    rows = [{"prompt": "x", name: None}, {"prompt": "y", name: ASKED[name]}]
    path = WRITERS[format_](tmp_path / f"a.{format_}", rows)
    place = {"jsonl": "line 2", "csv": "line 3", "parquet": r"row 1 \(counted from 0\)"}[format_]
    with pytest.raises(
        ConfigError, match=rf"a\.{format_}, {place}: column '{name}' .*input\.on_unknown=carry"
    ):
        plan(path)
    for passthrough in ("none", "[other]", f"[{name}]"):
        with pytest.raises(ConfigError, match=f"column '{name}'"):
            plan(
                write_jsonl(tmp_path / "b.jsonl", [*rows, {"other": 1}]),
                f"input.passthrough={passthrough}",
            )


def test_every_such_column_is_named_with_what_to_do(tmp_path):
    rows = [{"prompt": "x"}] * 700 + [
        {"prompt": "x", "max_new_tokens": 3},
        {"prompt": "y", "topP": 0.5, "top_a": 1},
    ]
    with pytest.raises(ConfigError) as error:
        plan(write_jsonl(tmp_path / "a.jsonl", rows))
    lines = str(error.value).split("\n")
    assert len(lines) == 3
    assert f"{tmp_path}/a.jsonl, line 701: column 'max_new_tokens' (3)" in lines[0]
    assert "Rename it to 'max_tokens'" in lines[0] and "Rename it to 'top_p'" in lines[1]
    assert "line 702: column 'top_a' (1)" in lines[2] and "Leave it out of the input" in lines[2]


@pytest.mark.parametrize("format_", WRITERS)
def test_values_that_ask_for_nothing_are_data(tmp_path, format_):
    names = [
        "diversity_penalty",
        "length_penalty",
        "function_call",
        "use_beam_search",
        "suppress_tokens",
    ]
    off = [REFUSED[name].no_op[0] for name in names[:-1]] + [[]]
    rows = [
        {"prompt": "x"} | dict(zip(names, off, strict=True)),
        {"prompt": "y"} | dict.fromkeys(names),
    ]
    the_plan = plan(WRITERS[format_](tmp_path / f"a.{format_}", rows))
    assert [field.name for field in the_plan.carried_fields] == names
    assert [row["error_code"] for row in request_rows(the_plan)] == [None, None]


def test_nan_values_and_null_struct_fields_set_no_parameter(tmp_path):
    kind = pa.struct([("type", pa.string()), ("json_schema", pa.string())])
    columns = {
        "prompt": ["x", "y"],
        "diversity_penalty": pa.array([float("nan"), 0.0]),
        "response_format": pa.array([{"type": "text"}, None], kind),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert plan(tmp_path / "a.parquet").num_rows == 2


@pytest.mark.parametrize("on_unknown", ["warn", "carry"])
def test_a_parameter_can_be_carried_as_data(tmp_path, caplog, monkeypatch, on_unknown):
    monkeypatch.setattr(logging.getLogger("eagle_ray"), "propagate", True)
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "x", "top_a": 3}, {"prompt": "y", "top_a": 4}]
    )
    the_plan = plan(path, f"input.on_unknown={on_unknown}")
    assert [row["top_a"] for row in request_rows(the_plan)] == [3, 4]
    said = [record.getMessage() for record in caplog.records]
    expected = f"{path}, line 1: column 'top_a' (3) is a request parameter"
    assert len(said) == (on_unknown == "warn") and all(line.startswith(expected) for line in said)


def test_rows_past_the_limit_and_prompt_columns_set_no_parameter(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y", "top_a": 4}])
    assert plan(path, "input.limit=1").num_rows == 1
    path = write_jsonl(tmp_path / "b.jsonl", [{"functions": ["x"]}])
    assert plan(path, "input.columns.prompt=functions[0]").num_rows == 1


@pytest.mark.parametrize("command", ["run", "validate"])
def test_both_commands_refuse_before_anything_starts(tmp_path, capsys, command):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "sequence_bias": {"1": 5}}])
    assert cli.main([command, "-i", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "column 'sequence_bias'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_column_is_both_read_and_refused_and_data_is_neither():
    refused = refused_at(Api.JOB).keys() - ROW_PARAMETERS
    assert not any(match_unsupported(name) for name in ROW_PARAMETERS)
    assert not any(
        match_unsupported(name) for name in ("priority", "suffix", "documents", "store", "echo")
    )
    assert all(has_effect(name, 7.5) for name in refused)
    asking = {
        (name, str(value)) for name in refused for value in NOTHING if has_effect(name, value)
    }
    assert asking == {("guided_json", "{}")}  # a schema that every value fits
    assert not has_effect("guided_json", {"type": None}), "as Parquet has a struct of other rows"
    assert not any(has_effect(name, value) for name in refused for value in REFUSED[name].no_op)


@pytest.mark.parametrize(
    ("column", "name"),
    [("minTokens", "min_tokens"), ("topP", "top_p"), ("maxTokens", "max_tokens"), ("ignoreEos", "ignore_eos"),
     (" temperature", "temperature"), ("TOP_P", "top_p"), ("max-tokens", "max_tokens"), ("FREQUENCY_PENALTY",
      "frequency_penalty"), ("top_p", None), ("Temperature", None), ("user", None),
     ("metadata", None), ("stopWords", None)],
)  # fmt: skip
def test_other_spellings_stand_for_those_in_snake_case(column, name):
    assert match_unsupported(column) == name


@pytest.mark.parametrize("key", ["temperature", "frequency_penalty", "top_a"])
def test_parameters_beside_a_mapped_value_are_refused(tmp_path, key):
    rows = [{"body": {"messages": "Hi"}}, {"body": {"messages": "Hi", key: 0.7, "note": 1}}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    mapping = "input.columns.messages=body.messages"
    with pytest.raises(
        ConfigError, match=rf"line 2: column 'body\.{key}' \(0\.7\) is a request parameter"
    ):
        plan(path, mapping)
    assert plan(path, mapping, "input.on_unknown=carry").num_rows == 2


def test_a_prompt_in_the_column_of_a_setting_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"stop": "Hi"}])
    with pytest.raises(
        ConfigError, match=r"input\.columns\.prompt: column 'stop' is a setting of its row"
    ):
        plan(path, "input.columns.prompt=stop")
