"""Jobs with task embed: the column, errors of rows, resume and retries, and the keys that are refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.pooling_state import PoolingState
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.embeddings import embedding_columns
from eagle_ray.requests.parameters import SamplingParams
from tests.support.embedders import PROMPTS, TEXTS, embedding_job, reference, write_embedder
from tests.support.jobs import exit_code

BAD = [
    {"id": "empty", "prompt": ""},
    {"id": "name", "prompt": "a", "prompt_name": "x"},
    {"id": "long", "prompt_token_ids": [3] * 513},
    {"id": "sampled", "prompt": "a", "temperature": 0.5},
    {"id": "chat", "messages": [{"role": "user", "content": "a"}]},
]
CODES = {
    "empty": "prompt_empty",
    "name": "unknown_prompt_name",
    "long": "prompt_too_long",
    "sampled": "bad_sampling",
    "chat": "bad_type",
}


def rows() -> list[dict]:
    good = [
        {"id": f"t{i}", "prompt": text, "embedding": f"old {i}"} for i, text in enumerate(TEXTS)
    ]
    query = {"id": "query", "prompt": "hello", "prompt_name": "query"}
    return [*good, query, {"id": "ids", "prompt_token_ids": [5, 6, 7]}, *BAD]


def table_of_run(config: JobConfig) -> pa.Table:
    return ds.dataset(Path(config.output.path) / "data", format="parquet").to_table()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def done(ray_session: None, target: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    config = embedding_job(tmp_path_factory.mktemp("job"), target, rows())
    assert exit_code(config) == 0
    return config


def test_rows_have_the_embeddings_of_their_texts(done: JobConfig, target: Path) -> None:
    table = table_of_run(done)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 64)
    found = {row["request_id"]: row for row in table.to_pylist()}
    assert sorted(found) == sorted(row["id"] for row in rows())
    wanted = {f"t{i}": reference(target, text) for i, text in enumerate(TEXTS)}
    wanted["query"] = reference(target, "hello", PROMPTS["query"])
    wanted["ids"] = reference(target, [5, 6, 7])
    for id, vector in wanted.items():
        row = found[id]
        assert (row["status"], row["text"], row["completion_tokens"]) == ("ok", None, 0)
        torch.testing.assert_close(torch.tensor(row["embedding"]), vector, atol=1e-5, rtol=0)
    assert found["ids"]["prompt_tokens"] == 3 and found["t0"]["prompt"] == TEXTS[0]
    assert found["t1"]["input_embedding"] == "old 1"  # the input's own column of that name


def test_bad_rows_are_error_rows(done: JobConfig) -> None:
    errors = [row for row in table_of_run(done).to_pylist() if row["status"] == "error"]
    assert {row["request_id"]: row["error_code"] for row in errors} == CODES
    assert all(row["embedding"] is None for row in errors)
    message = next(row["error_message"] for row in errors if row["request_id"] == "name")
    assert "its prompts: document, query" in message.lower()


def test_a_resume_embeds_new_rows_alone_and_retries_errors(
    ray_session: None, target: Path, tmp_path: Path
) -> None:
    config = embedding_job(tmp_path, target, [{"id": "a", "prompt": "hello"}, BAD[1]])
    assert exit_code(config) == 0
    [first] = [row for row in table_of_run(config).to_pylist() if row["request_id"] == "a"]
    more = [{"id": "a", "prompt": "hello"}, BAD[1], {"id": "b", "prompt": "the cat"}]
    config = embedding_job(tmp_path, target, more)
    assert exit_code(config, retry_errors=True) == 0
    found = {row["request_id"]: row for row in table_of_run(config).to_pylist()}
    assert sorted(found) == ["a", "b", "name"]
    assert found["a"] == first and found["b"]["attempt"] == found["name"]["attempt"] == 2


def test_halves_of_fewer_dimensions(ray_session: None, target: Path, tmp_path: Path) -> None:
    keys = {
        "embedding.dtype": "float16",
        "embedding.dimensions": 16,
        "embedding.prompt_name": "query",
    }
    config = embedding_job(tmp_path, target, [{"id": "a", "prompt": "hello"}], **keys)
    assert exit_code(config) == 0
    table = table_of_run(config)
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), 16)
    want = reference(target, "hello", PROMPTS["query"], dimensions=16).numpy()
    np.testing.assert_array_equal(
        np.array(table["embedding"][0].as_py(), np.float16), want.astype(np.float16)
    )


def test_numbers_too_large_for_halves_are_an_error() -> None:
    state = PoolingState(2)
    sequence = Sequence("a", [5], SamplingParams(), pooling=state)
    state.vector = torch.tensor([65504.0, 1.0])
    assert embedding_columns(sequence, "float16")["embedding"].tolist() == [65504.0, 1.0]
    state.vector = torch.tensor([7e4, 1.0])
    with pytest.raises(RequestError, match=r"embedding\.dtype: .*Set it to float32"):
        embedding_columns(sequence, "float16")
    assert embedding_columns(sequence, "float32")["embedding"].tolist() == [7e4, 1.0]


def test_lines_of_a_batch_file(ray_session: None, target: Path, tmp_path: Path) -> None:
    bodies = {
        "text": {"input": "hello", "model": "m"},
        "query": {"input": "hello", "prompt_name": "query", "encoding_format": "float"},
        "ids": {"input": [5, 6, 7]},
        "many": {"input": ["a", "b"]},
        "wide": {"input": "a", "dimensions": 8},
        "unknown": {"input": "a", "temperature": 1.0},
    }
    lines = [
        {"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": body}
        for id, body in bodies.items()
    ]
    config = embedding_job(tmp_path, target, lines)
    assert exit_code(config) == 0
    found = {row["request_id"]: row for row in table_of_run(config).to_pylist()}
    wanted = {
        "text": reference(target, "hello"),
        "query": reference(target, "hello", PROMPTS["query"]),
        "ids": reference(target, [5, 6, 7]),
    }
    for id, vector in wanted.items():
        got = torch.tensor(found[id]["embedding"])
        torch.testing.assert_close(got, vector, atol=1e-5, rtol=0)
    assert "body.input is not supported: give one text" in found["many"]["error_message"]
    assert "set embedding.dimensions" in found["wide"]["error_message"]
    assert "body.temperature is not supported" in found["unknown"]["error_message"]


REFUSED = {
    "sampling.temperature: it is for generated text, and task is embed": {
        "sampling.temperature": 0.5
    },
    "speculative.method: it is for generated text": {"speculative.method": "suffix"},
    "model.draft: it is for generated text": {"model.draft": "embedded:tiny"},
    "chat.tool_choice: it is for generated text": {"chat.tool_choice": "none"},
    "report.verify_rows: it is for generated text": {"report.verify_rows": 3},
    "embedding.dimensions: it is for embeddings, and task is generate": {
        "task": "generate",
        "embedding.dimensions": 3,
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_keys_of_the_other_task_are_refused(target: Path, tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        embedding_job(tmp_path, target, rows(), **REFUSED[words])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"embedding.dimensions": 65}, "embedding.dimensions: must be at most 64"),
        ({"embedding.prompt_name": "x"}, "embedding.prompt_name: the target has no prompt 'x'"),
        ({"input.passthrough": "none"}, "input.passthrough: must be all or name 'prompt_name'"),
    ],
)
def test_what_the_target_lacks_is_refused_before_the_start(
    target: Path, tmp_path: Path, settings: dict, words: str
) -> None:
    from eagle_ray.batch.driver.job_plan import plan_for_validation

    with pytest.raises(ConfigError, match=words):
        plan_for_validation(embedding_job(tmp_path, target, rows(), **settings))
