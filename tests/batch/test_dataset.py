"""Ray Datasets of prompts to Ray Datasets of completions, lazily and as a job, on a real local Ray."""

import json
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from pydantic import BaseModel, ConfigDict, Field

import eagle_ray
from eagle_ray import ConfigError, SamplingParams
from eagle_ray.api.python_arguments import job_config
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.dataset import (
    ColumnAdder,
    RequestMaker,
    RowFunction,
    name_settings,
    with_input_columns,
)
from eagle_ray.batch.driver.dataset_job import input_table
from eagle_ray.batch.driver.input_plan import plan_input, request_rows, requests_of
from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.parquet import arrow_rows
from eagle_ray.config import ColumnsConfig, InputConfig
from eagle_ray.requests.row_schema import REQUEST
from tests.support.documented import block
from tests.support.jobs import PAIR, token_rows

CONFIG = {
    "model": {"target": str(PAIR / "target"), "draft": str(PAIR / "draft")},
    "speculative": {"max_nodes": 8, "max_depth": 3, "top_k": 4},
    "sampling": {"max_tokens": 6},
    "execution": {"slots": 4, "actors": 1},
}


def table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def job_outputs(make_job, rows: list[dict]) -> dict[str, list[int]]:
    """What a job answers, by id."""
    from eagle_ray.batch.worker.worker import build_engine_bundle
    from eagle_ray.requests.sequences import sequences_of

    config = make_job(rows, **{"sampling.max_tokens": 6})
    engine = build_engine_bundle(config, WorkerPlan()).engine
    sequences = {
        asked.id: sequences_of(asked, config, None)[0] for asked in requests_of(plan_input(config))
    }
    for sequence in sequences.values():
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return {name: sequence.output_ids for name, sequence in sequences.items()}


def test_dataset_rows_keep_ids_or_get_one_from_their_content():
    maker = RequestMaker(request_columns(ColumnsConfig()), InputConfig(path="dataset"))
    rows = [
        {"id": "a", "prompt": "x", "n": 1},
        {"id": None, "prompt": "x", "n": 2},
        {"id": None, "prompt": "x", "n": 2},
    ]
    first, second, third = maker(table(rows)).to_pylist()
    assert first["request_id"] == "a" and len(second["request_id"]) == 16
    assert second["request_id"] == third["request_id"]


def test_a_column_that_asks_for_what_rows_cannot_set_is_refused():
    with pytest.raises(ConfigError, match="length_penalty"):
        RequestMaker(request_columns(ColumnsConfig()), InputConfig(path="dataset"))(
            table([{"prompt": "x", "length_penalty": 2.0}])
        )


def requests(rows: pa.Table, preprocess: RowFunction) -> list[dict]:
    """Return the requests of one block."""
    made = RequestMaker(request_columns(ColumnsConfig()), InputConfig(path="dataset"))(
        ColumnAdder(preprocess)(rows)
    )
    return made.drop_columns(["_input_row"]).to_pylist(maps_as_pydicts="strict")


def chat(name: str, key: str, value: object) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": {key: value}}}
    parameters = {"type": "object", "properties": {key: {"type": "string"}}}
    return {
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
    }


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
ADDED = [
    {"messages": "Hi", "id": 1},
    {"messages": [{"role": "system", "content": "Be brief."}, *PARTS], "id": "a"},
    chat("now", "tz", 1),
    chat("now", "tz", "UTC"),
    chat("rain", "city", "Rome"),
    {"prompt": "x", "stop": "a", "chat_template_kwargs": {"a": 1}, "tag": 1},
    {"prompt": "x", "stop": ["a", "b"], "chat_template_kwargs": {"a": ["b"]}, "tag": [1]},
    {"prompt": "x", "logit_bias": {5: 1.0}, "seed": 2**63, "tag": {"b": 1}},
    {"prompt": "x", "logit_bias": {"7": -1}, "seed": 3},
    {"prompt_token_ids": np.array([1, 2])},
    {"prompt_token_ids": [3]},
    {"prompt": "x", "json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"prompt": "x", "json_schema": {"type": "array"}, "top_k": np.int64(3)},
    {"prompt": "x", "sampling_params": {"max_tokens": 3}},
    {
        "prompt": "x",
        "sampling_params": {"max_tokens": 5, "temperature": 0.9, "stop": ["z"], "n": 2},
    },
    {"prompt": "x", "sampling_params": SamplingParams(top_k=4)},
    {"prompt": "x", "sampling_params": [1]},
    {"prompt": 5},
    {"prompt": "cut \ud83d"},
    {"prompt": "x", "tag": "cut \ud83d"},
    {},
]
WRONG = {16: "bad_type", 17: "bad_type", 18: "bad_encoding", 19: "bad_encoding"}


def test_what_a_row_asks_does_not_depend_on_the_rows_beside_it(tmp_path):
    rows = pa.table({"i": list(range(len(ADDED))), "prompt": [None] * (len(ADDED) - 1) + ["own"]})
    together = requests(rows, lambda row: ADDED[row["i"]])
    alone = [requests(rows.slice(i, 1), lambda row: ADDED[row["i"]]) for i in range(len(ADDED))]
    assert [[request] for request in together] == alone
    assert {
        i: request["error_code"] for i, request in enumerate(together) if request["error_code"]
    } == WRONG
    assert json.loads(together[4]["tools"]) == ADDED[4]["tools"] and together[-1]["prompt"] == "own"

    columns = request_columns(ColumnsConfig())
    pq.write_table(
        input_table(ColumnAdder(lambda row: ADDED[row["i"]])(rows), columns), tmp_path / "a.parquet"
    )
    job = list(
        request_rows(plan_input(job_config({"input.path": str(tmp_path), "output.path": "unused"})))
    )
    names = set(REQUEST.names) - {
        "request_id",
        "row_index",
        "source_file",
        "source_line",
        "error_message",
    }
    assert [{n: row[n] for n in names} for row in job] == [
        {n: row[n] for n in names} for row in together
    ]
    assert (
        [row["request_id"] for row in job[:2]] == ["1", "a"]
        and job[6]["tag"] == "[1]"
        and job[0]["i"] == 0
    )


def test_mixed_values_of_a_dataset_are_those_of_its_rows(ray_session, tmp_path):
    """Ray Data holds them as objects of Python."""
    rows = [{"messages": "Hi"}, {"messages": PARTS}, {"messages": "cut \ud83d"}]
    [block] = ray.data.from_items(rows, override_num_blocks=1).iter_batches(batch_format="pyarrow")
    columns = request_columns(ColumnsConfig())
    pq.write_table(input_table(block, columns), tmp_path / "a.parquet")
    job = list(
        request_rows(plan_input(job_config({"input.path": str(tmp_path), "output.path": "unused"})))
    )
    for found in (job, RequestMaker(columns, InputConfig(path="dataset"))(block).to_pylist()):
        assert [row["error_code"] for row in found] == [None, None, "bad_encoding"]
        assert json.loads(found[1]["messages"]) == PARTS


def test_input_columns_keep_their_types_next_to_sampling_params():
    types = {
        "a": pa.int8(),
        "b": pa.float32(),
        "c": pa.decimal128(12, 2),
        "d": pa.timestamp("ns"),
        "e": pa.date64(),
    }
    types |= {
        "f": pa.map_(pa.string(), pa.int32()),
        "g": pa.dictionary(pa.int32(), pa.string()),
        "n": pa.int16(),
    }
    rows = pa.table({name: pa.nulls(2, type_) for name, type_ in types.items()})
    rows = rows.append_column("sampling_params", pa.array([{"n": 2}, {"n": None}]))
    found = input_table(rows, request_columns(ColumnsConfig()))
    assert {field.name: field.type for field in found.schema} == types | {"n": pa.string()}
    assert arrow_rows(found.select(["n"])) == [{"n": 2}, {"n": None}]


def test_an_empty_block_has_no_rows(make_job):
    from eagle_ray.batch.driver.dataset import INPUT_ROW
    from eagle_ray.batch.worker.sink import nest
    from eagle_ray.requests.row_schema import output_schema

    assert len(with_input_columns(nest(output_schema([INPUT_ROW]).empty_table()))) == 0


def test_a_dataset_is_answered_lazily_with_its_columns_and_types(ray_session, make_job):
    rows = [*token_rows(9), {"id": "bad", "prompt_token_ids": [10**6]}]
    rows = [row | {"level": i, "tags": {"of": [i]}, "text": "given"} for i, row in enumerate(rows)]
    types = pa.schema(
        [("id", pa.string()), ("prompt_token_ids", pa.list_(pa.int64())), ("level", pa.int8())]
    )
    given = pa.Table.from_pylist(rows).set_column(2, "level", pa.array(range(10), pa.int8()))
    asked = ray.data.from_arrow([given.slice(0, 4), given.slice(4)])

    def preprocess(row: dict) -> dict:
        return {"sampling_params": SamplingParams(max_tokens=3) if row["level"] == 0 else None}

    answered = eagle_ray.generate(asked, CONFIG, preprocess=preprocess)
    found = {row["id"]: row for row in answered.take_all()}
    expected = job_outputs(make_job, token_rows(9))
    assert len(found) == 10 and all(row["tags"] == {"of": [row["level"]]} for row in found.values())
    assert found["q0"]["output_token_ids"] == expected["q0"][:3] and found["q0"]["max_tokens"] == 3
    assert {f"q{i}": found[f"q{i}"]["output_token_ids"] for i in range(1, 9)} == {
        f"q{i}": expected[f"q{i}"] for i in range(1, 9)
    }
    assert found["bad"]["error_code"] == "bad_token_id" and found["bad"][
        "error_message"
    ].startswith("the prompt: token id 1000000")
    assert found["q1"]["mean_acceptance_length"] >= 1 and found["q1"]["input_text"] == "given"
    assert answered.schema().base_schema.field("level").type == types.field("level").type


def test_the_keys_of_a_dataset_hold(ray_session, caplog):
    """In the Dataset's order, its first rows, with the columns that are asked for; one line names parameters."""
    asked = ray.data.from_items(
        [row | {"n": 1, "a": 1, "b": 2} for row in token_rows(40)], override_num_blocks=10
    )
    name_settings.cache_clear()
    caplog.set_level("INFO", "eagle_ray")
    settings = {
        "execution.preserve_order": True,
        "input.limit": 30,
        "input.passthrough": ["a"],
        "sampling.max_tokens": 2,
        "logging.level": "info",
    }
    answered = eagle_ray.generate(asked, CONFIG | settings)
    rows = [
        row
        for batch in answered.iter_batches(batch_size=7, batch_format="pyarrow")
        for row in batch.to_pylist()
    ]
    assert [row["request_id"] for row in rows] == [f"q{i}" for i in range(30)]
    assert rows[0]["a"] == 1 and not {"b", "id"} & rows[0].keys()
    assert (
        caplog.messages.count(
            "columns that set parameters of their rows: n. Rename a column that is data."
        )
        == 1
    )


@pytest.mark.parametrize(
    "key",
    [
        "output.partition_by=[a]",
        "execution.rows_per_file=7",
        "execution.restarts.limit=1",
        "report.baseline_rows=2",
    ],
)
def test_a_key_of_stored_outputs_is_refused_by_name(ray_session, key):
    name, _, value = key.partition("=")
    asked = ray.data.from_items([{"prompt_token_ids": [1]}])
    with pytest.raises(ConfigError, match=rf"^{name}: of no meaning"):
        eagle_ray.generate(asked, CONFIG | {name: json.loads(value.replace("a", '"a"'))})
    eagle_ray.generate(asked, CONFIG | {"report.html": False})  # asks for nothing


def test_parameter_columns_first_seen_in_a_task_are_logged_once(caplog):
    maker = RequestMaker(
        request_columns(ColumnsConfig()), InputConfig(path="dataset"), names_settings=True
    )
    name_settings.cache_clear()
    caplog.set_level("INFO", "eagle_ray")
    for _ in range(2):
        maker(table([{"prompt": "x", "n": 1, "seed": 2}]))
    assert caplog.messages == [
        "columns that set parameters of their rows: n, seed. Rename a column that is data."
    ]


def test_bad_and_unknown_columns_are_treated_as_the_keys_say():
    maker = partial(RequestMaker, request_columns(ColumnsConfig()))
    carry = maker(InputConfig(path="dataset", on_unknown="carry"))
    [row] = carry(table([{"prompt": "x", "length_penalty": 2.0}])).to_pylist()
    assert row["error_code"] is None
    with pytest.raises(
        ConfigError, match=r"dataset: column 'prompt' must be a text.*input.on_bad_row is fail"
    ):
        maker(InputConfig(path="dataset", on_bad_row="fail"))(table([{"prompt": 5}]))


def test_postprocess_makes_the_rows_and_n_samples_are_rows(ray_session):
    asked = ray.data.from_items([{"ids": row["prompt_token_ids"]} for row in token_rows(3)])
    config = CONFIG | {
        "sampling": {"max_tokens": 4, "n": 2, "temperature": 1.0},
        "input": {"columns": {"prompt_token_ids": "ids"}},
    }
    answered = eagle_ray.generate(
        asked, config, postprocess=lambda row: {"j": row["sample_index"], "ids": row["ids"]}
    )
    assert sorted(row["j"] for row in answered.take_all()) == [0, 0, 0, 1, 1, 1]


def test_a_missing_model_is_refused_before_anything_starts(ray_session, tmp_path):
    (tmp_path / "empty").mkdir()
    config = CONFIG | {"model": {"target": str(tmp_path / "empty"), "draft": str(PAIR / "draft")}}
    with pytest.raises(ConfigError):
        eagle_ray.generate(ray.data.from_items([{"prompt_token_ids": [1]}]), config)


def test_with_an_output_path_it_is_a_job_that_resumes(ray_session, tmp_path):
    output = tmp_path / "out"
    asked = ray.data.from_items(token_rows(12), override_num_blocks=3)

    def call() -> list[dict]:
        return eagle_ray.generate(asked, CONFIG, output_path=str(output)).take_all()

    first = {row["request_id"]: row for row in call()}
    assert len(first) == 12 and (output / "_SUCCESS").exists()
    [victim, *_] = sorted((output / "data").glob("*.parquet"))
    victim.unlink()
    second = {row["request_id"]: row for row in call()}
    assert {name: row["output_token_ids"] for name, row in second.items()} == {
        name: row["output_token_ids"] for name, row in first.items()
    }
    attempts = {row["attempt"] for row in second.values()}
    assert attempts == {1, 2}, "only what was missing is made again"
    usage = json.loads((output / "_progress.json").read_text())["usage"]
    assert usage["worker_s"] == usage["elapsed_s"] and usage["gpus_per_worker"] == 0


@pytest.mark.slow
def test_the_pages_lines_about_datasets_run(ray_session, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = block("eagle_ray/api/README.md", "python", "## Ray Datasets and jobs")
    exec(compile(code, "README.md", "exec"), {})
    assert "Rome" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "_SUCCESS").exists()


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["fox", "dog"]
    age: int = Field(ge=0, le=20)


def test_a_pydantic_model_reaches_the_rows_as_text():
    """From preprocess, alone and in SamplingParams, and as the configuration's."""
    schema = Pet.model_json_schema()
    for made in ({"json_schema": Pet}, {"sampling_params": SamplingParams(json_schema=Pet)}):
        [request] = requests(pa.table({"prompt": ["x"]}), lambda row, made=made: made)
        assert json.loads(request["json_schema"]) == schema
    config = job_config({"sampling.json_schema": Pet, "input.path": "a", "output.path": "b"})
    assert json.loads(config.sampling.json_schema) == schema


@pytest.mark.slow
def test_generate_takes_a_pydantic_model(ray_session):
    config = {"sampling.json_schema": Pet, "sampling.max_tokens": 60, "execution.slots": 4}
    asked = ray.data.from_items([{"prompt": f"A story of {name}."} for name in ("Ann", "Bob")])
    for row in eagle_ray.generate(asked, config | {"speculative.budget": "uniform"}).take_all():
        assert row["structured_outcome"] == "complete"
        assert Pet.model_validate_json(row["text"]).kind in ("fox", "dog")
