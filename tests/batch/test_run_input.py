"""The answers of one run as the input of another."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows, requests_of
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.ray_jobs import with_absolute_paths
from eagle_ray.batch.reader.files import check_not_run_output
from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.layout import SUCCESS, output_of
from eagle_ray.runs.part_files import part_name
from eagle_ray.runs.partitions import Partitions
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.jobs import token_rows
from tests.support.tokenizers import write_tokenizer

CARRIED = [pa.field("category", pa.string()), pa.field("tries", pa.int16())]
COMMON = {
    "row_index": 0,
    "source_file": "a",
    "run_id": "r",
    "attempt": 1,
    "status": "ok",
    "temperature": 0.7,
}
JUDGE = {"input.template": "Question: {prompt}\nAnswer: {text}\nGrade:"}


def answer(id: str, sample: int = 0, **columns: Any) -> dict[str, Any]:
    return (
        COMMON
        | {"request_id": id, "sample_index": sample, "prompt": f"what is {id}?", "text": f"{id}!"}
        | columns
    )


def finished_run(
    config: JobConfig, rows: list[dict[str, Any]], by: tuple[str, ...] = ()
) -> JobConfig:
    """Write a run's record and rows as its driver would."""
    run = open_run(config, plan_input(config).fingerprints)
    table = pa.Table.from_pylist(rows, output_schema(CARRIED))
    for number, (directory, part) in enumerate(Partitions(by).split(table)):
        parent = run.data / directory if directory else run.data
        (parent / part_name(1, number)).create(parquet_bytes(part, "zstd"))
    (output_of(config) / SUCCESS).write_atomic(b"")
    return config


@pytest.fixture
def first_run(make_job) -> JobConfig:
    rows = [
        answer("a", category="x", tries=3),
        answer("a", 1, category="x"),
        answer("a", 2, turn_index=1),
    ]
    bad = answer(
        "b",
        status="error",
        text=None,
        error_code="prompt_too_long",
        error_message="in.jsonl, line 2: long",
    )
    return finished_run(make_job(token_rows(1)), [*rows, bad])


def judging_job(make_job, first: JobConfig, **settings: Any) -> JobConfig:
    return make_job(
        **JUDGE | {"input.path": f"run:{first.output.path}", "output.path": "judge"} | settings
    )


def test_rows_are_asked_about_with_ids_of_their_own(make_job, first_run):
    requests = list(request_rows(plan_input(judging_job(make_job, first_run))))
    assert [row["request_id"] for row in requests] == ["a", "a#1", "a@1#2", "b"]
    assert requests[0]["prompt"] == "Question: what is a?\nAnswer: a!\nGrade:"
    assert [row["error_code"] for row in requests] == [None, None, None, "earlier_run_failed"]
    assert (
        "it is an error row of the first run: prompt_too_long: in.jsonl, line 2"
        in requests[3]["error_message"]
    )
    assert {row["temperature"] for row in requests} == {
        None
    }  # how the first run sampled is no setting of this one


def test_columns_of_the_first_run_are_carried_by_the_name_rule(make_job, first_run):
    plan = plan_input(judging_job(make_job, first_run))
    types = plan.carried_types
    assert list(types)[:4] == [
        "input_request_id",
        "input_sample_index",
        "input_turn_index",
        "input_prompt",
    ]
    assert types["tries"] == pa.int16() and types["category"] == pa.string()
    row = list(request_rows(plan))[1]
    assert (row["input_request_id"], row["input_sample_index"], row["input_text"]) == ("a", 1, "a!")
    few = plan_input(
        judging_job(make_job, first_run, **{"input.passthrough": ["category", "request_id"]})
    )
    assert list(few.carried_types) == ["category", "input_request_id"]


def test_a_damaged_part_of_the_first_run_is_named(make_job, first_run):
    [part] = Path(first_run.output.path, "data").iterdir()
    plan = plan_input(judging_job(make_job, first_run))
    part.write_bytes(part.read_bytes()[:200] + bytes(60) + part.read_bytes()[260:])
    for read in (
        lambda: list(request_rows(plan)),
        lambda: plan_input(judging_job(make_job, first_run)),
    ):
        with pytest.raises(OutputDamaged, match=rf"^{part} is damaged \(.*delete it"):
            read()


def test_messages_are_read_as_a_list(make_job):
    message = '[{"role": "user", "content": "why?"}]'
    first = finished_run(make_job(token_rows(1)), [answer("a", messages=message)])
    config = judging_job(make_job, first, **{"input.template": "{messages[0].content} {text}"})
    [row] = request_rows(plan_input(config))
    assert row["prompt"] == "why? a!" and row["input_messages"] == message


def test_partition_columns_come_back_from_the_directories(make_job):
    rows = [answer("a", category="x"), answer("b", category=None)]
    first = finished_run(make_job(token_rows(1)), rows, by=("category",))
    config = judging_job(make_job, first, **{"input.template": "{category}: {text}"})
    requests = {row["request_id"]: row for row in request_rows(plan_input(config))}
    assert requests["a"]["prompt"] == "x: a!" and requests["a"]["category"] == "x"
    assert requests["b"]["error_code"] == "field_missing"


def test_an_unfinished_run_is_refused_unless_it_is_allowed(make_job, first_run):
    Path(first_run.output.path, "_SUCCESS").unlink()
    with pytest.raises(
        ConfigError, match=r"input\.path: 'run:.*': the run in .* is not finished \(no _SUCCESS\)"
    ):
        plan_input(judging_job(make_job, first_run))
    assert (
        plan_input(judging_job(make_job, first_run, **{"input.allow_unfinished": True})).num_rows
        == 4
    )


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"input.path": "run:nowhere"}, "holds no run (no _run.json)"),
        (
            {"input.path": ["run:nowhere", "a.jsonl"]},
            "runs (run:DIR) and files cannot be read together",
        ),
        (
            {"input.format": "jsonl"},
            "input.format: must be auto with input.path run:DIR, got 'jsonl'",
        ),
        (
            {"input.template": "{answer}"},
            "input.template: no file has a column 'answer'; columns: request_id,",
        ),
        ({"input.template": None}, "input.template: missing. The rows of a run"),
    ],
)
def test_what_cannot_work_is_refused(make_job, first_run, settings, said):
    with pytest.raises(ConfigError) as error:
        plan_input(judging_job(make_job, first_run, **settings))
    assert said in str(error.value)


def test_a_column_of_the_first_run_can_be_the_prompt(make_job, first_run):
    config = judging_job(
        make_job, first_run, **{"input.template": None, "input.columns.prompt": "text"}
    )
    assert [row["prompt"] for row in request_rows(plan_input(config))][:2] == ["a!", "a!"]


def test_the_judges_configuration_reads_a_run(first_run):
    path = Path(__file__).parent.parent.parent / "configs" / "judge.yaml"
    plan = plan_input(
        load_config(path, env={}, overrides={"input.path": f"run:{first_run.output.path}"})
    )
    messages = json.loads(next(request_rows(plan))["messages"])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"] == "Question: what is a?\nAnswer: a!\nIs the answer right?"
    assert list(plan.carried_types) == ["category", "input_request_id", "input_sample_index"]


def test_a_run_cannot_read_itself(make_job, first_run):
    files = plan_input(judging_job(make_job, first_run)).files
    with pytest.raises(ConfigError, match=r"is a file of output\.path"):
        check_not_run_output(files, StoragePath.of(first_run.output.path))


def test_paths_of_runs_become_absolute_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {"input.path": ["run:first", "run:s3://bucket/second"], "output.path": "judge"}
    config = with_absolute_paths(load_config(None, env={}, overrides=JUDGE | paths))
    assert config.input.path == [f"run:{tmp_path}/first", "run:s3://bucket/second"]


@pytest.mark.parametrize("template", [None, "{prompt}", "{prompt}."])
def test_a_stored_prompt_asked_again_has_the_tokens_read(make_job, tmp_path, template):
    """Even if the tokenizer adds a BOS token that the chat template does not write."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t", "{{ messages[0].content }}<|end|>"))
    message = [{"role": "user", "content": "Hi"}]
    stored = answer("a", messages=json.dumps(message), prompt=tokenizer.render_chat(message))
    first = finished_run(make_job(token_rows(1)), [stored, answer("b", prompt="Hi")])
    columns = {} if template else {"input.columns.prompt": "prompt"}
    config = judging_job(make_job, first, **{"input.template": template} | columns)
    chat, raw = (
        sequences_of(request, config, tokenizer)[0] for request in requests_of(plan_input(config))
    )
    is_alone = template != "{prompt}."
    assert (chat.prompt_ids == tokenizer.encode_chat(message)) is is_alone
    assert raw.prompt_ids == tokenizer.encode("Hi" if is_alone else "Hi.")
