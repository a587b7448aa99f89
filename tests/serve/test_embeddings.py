"""POST /v1/embeddings: OpenAI's forms of input and output, what is refused, and lines of batches."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.serve.app import build_app
from eagle_ray.serve.embedding_service import EmbeddingService, start_service
from eagle_ray.serve.openapi import openapi
from tests.support.embedders import PROMPTS, TEXTS, reference, write_embedder
from tests.support.serving import Answer, post

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def embedding_service(target: Path) -> Iterator[EmbeddingService]:
    settings = {
        "task": "embed",
        "model.target": str(target),
        "model.dtype": "float32",
        "serving.model_name": "embedder",
        "serving.slots": 2,
        "serving.max_queued": 2,
    }
    service = start_service(load_serve_config(None, env={}, overrides=settings), WorkerPlan())
    assert isinstance(service, EmbeddingService)
    yield service
    service.close()


@pytest.fixture(scope="module")
def embedder(embedding_service: EmbeddingService) -> Starlette:
    return build_app(embedding_service)


def sent(app: Starlette, body: dict[str, Any], path: str = PATH) -> Answer:
    return asyncio.run(post(app, path, body, {"content-type": "application/json"}))


def vectors(answer: Answer) -> torch.Tensor:
    assert answer.status == 200, answer.json
    return torch.tensor([one["embedding"] for one in answer.json["data"]])


def test_every_form_of_input(embedder: Starlette, target: Path) -> None:
    ids = [[5, 6, 7], [8, 9]]
    forms = {
        "text": ("hello", ["hello"]),
        "texts": (TEXTS, TEXTS),
        "ids": (ids[0], ids[:1]),
        "lists of ids": (ids, ids),
    }
    for given, each in forms.values():
        answer = sent(embedder, {"input": given, "model": "embedder"})
        want = torch.stack([reference(target, one) for one in each])
        torch.testing.assert_close(vectors(answer), want, atol=1e-5, rtol=0)
        body = answer.json
        assert (body["object"], body["model"]) == ("list", "embedder")
        assert [one["index"] for one in body["data"]] == list(range(len(each)))
        assert {one["object"] for one in body["data"]} == {"embedding"}
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_base64_has_the_same_numbers_as_floats(embedder: Starlette) -> None:
    floats = vectors(sent(embedder, {"input": TEXTS}))
    answer = sent(embedder, {"input": TEXTS, "encoding_format": "base64"})
    decoded = [
        np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer.json["data"]
    ]
    np.testing.assert_array_equal(np.stack(decoded), floats.numpy())


def test_dimensions_and_prompts(embedder: Starlette, target: Path) -> None:
    answer = sent(embedder, {"input": "hello", "dimensions": 16, "prompt_name": "query"})
    want = reference(target, "hello", PROMPTS["query"], 16)
    torch.testing.assert_close(vectors(answer)[0], want, atol=1e-5, rtol=0)


def test_more_inputs_than_slots(embedder: Starlette) -> None:
    answer = sent(embedder, {"input": [f"text {i}" for i in range(60)]})
    assert vectors(answer).shape == (60, 64)


REFUSED: dict[str, dict[str, Any]] = {
    "input: missing": {},
    "input: holds an empty text": {"input": ["a", ""]},
    "input: must be a text": {"input": ["a", 3]},
    "dimensions: must be at most 64": {"input": "a", "dimensions": 65},
    "dimensions: must be an integer": {"input": "a", "dimensions": 0},
    "encoding_format: must be float or base64": {"input": "a", "encoding_format": "int8"},
    "prompt_name: the target has no prompt 'x'. Its prompts: document, query": {
        "input": "a",
        "prompt_name": "x",
    },
    "input[1]: the prompt has 513 tokens": {"input": [[1], [3] * 513]},
    "token id 330 is not in": {"input": [330]},
    "temperature is not supported": {"input": "a", "temperature": 0.5},
    "at most 2048 texts, got 2049": {"input": ["a"] * 2049},
    "there is no model 'other' here": {"input": "a", "model": "other"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refuses_with_the_parameter(embedder: Starlette, words: str) -> None:
    answer = sent(embedder, REFUSED[words])
    assert answer.status in (400, 404), answer.json
    assert words in answer.json["error"]["message"], answer.json


def test_an_embedder_generates_no_text(embedder: Starlette) -> None:
    answer = sent(embedder, {"prompt": "a"}, "/v1/completions")
    assert (answer.status, answer.json["error"]["code"]) == (400, "no_generation")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert sent(embedder, chat, "/v1/chat/completions").status == 400


def test_a_generating_server_embeds_nothing(app: Starlette) -> None:
    answer = sent(app, {"input": "a"})
    assert (answer.status, answer.json["error"]["code"]) == (400, "no_embeddings")


def test_lines_of_batches(embedding_service: EmbeddingService) -> None:
    def line(endpoint: str, body: dict[str, Any]) -> tuple[int, Any]:
        answered = embedding_service.answer_line(0, endpoint, json.dumps(body).encode())
        status, answer = asyncio.run(answered)
        return status, json.loads(answer)

    status, body = line(PATH, {"input": ["hello", "a"]})
    assert status == 200 and len(body["data"]) == 2
    status, body = line("/v1/completions", {"prompt": "a"})
    assert (status, body["error"]["code"]) == (400, "no_generation")
    status, body = line(PATH, {"input": "a", "dimensions": 99})
    assert (status, body["error"]["param"]) == (400, "dimensions")


def test_the_document_has_the_route() -> None:
    document = openapi("embedder", vocab_size=330)
    schema = document["components"]["schemas"]["EmbeddingsRequest"]
    assert schema["required"] == ["input"] and "dimensions" in schema["properties"]
    assert PATH in document["paths"]
