"""Embeddings, scores and reranking by `eagle-ray serve` over a real socket, next to the same targets in Python."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_ray import LLM
from eagle_ray.requests.score_bodies import INSTRUCTION, JUDGE
from tests.support.embedders import PROMPTS, TEXTS, reference, write_embedder
from tests.support.serving import Server
from tests.support.tokenizers import TEMPLATE

QUERY, ITEMS = "hello there", [", how are you?", " the end", "é∑"]
DOCUMENTS = ["the cat sat on the mat", "STOP", "hello there, how are you?"]


def write_reranker(directory: Path) -> Path:
    """Write a random target whose tokenizer has a token for each of yes and no."""
    write_embedder(directory, pooling=None, is_base=False, ends_with_eos=False)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken("yes"), AddedToken("no")])
    tokenizer.save(file)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "config_sentence_transformers.json").unlink()
    return directory


@contextmanager
def endpoint(directory: Path, target: Path, **keys: Any) -> Iterator[Server]:
    """Serve a target until the block ends."""
    model = {"target": str(target), "device": "cpu", "dtype": "float32"}
    config = directory / "serve.yaml"
    config.write_text(yaml.safe_dump({"model": model, **keys}))
    server = Server(directory, config=config, slots=4)
    try:
        server.until_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=90)


def answer(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, text = server.ask("POST", path, body, {"content-type": "application/json"})
    assert status == 200, text
    return json.loads(text)


def refusal(server: Server, path: str, body: dict[str, Any]) -> str:
    status, text = server.ask("POST", path, body, {"content-type": "application/json"})
    assert status == 400, text
    message = json.loads(text)["error"]["message"]
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_embeddings_are_those_of_python(tmp_path: Path) -> None:
    target = write_embedder(tmp_path / "target")
    with LLM(target, task="embed", dtype="float32") as llm:
        outputs = llm.embed(TEXTS, raise_errors=True)
        queries = llm.embed(TEXTS, prompt_name="query", dimensions=16, raise_errors=True)
    wanted = torch.tensor([output.outputs.embedding for output in outputs])
    short = torch.tensor([output.outputs.embedding for output in queries])

    with endpoint(tmp_path, target, task="embed") as server:
        body = answer(server, "/v1/embeddings", {"input": TEXTS})
        found = torch.tensor([one["embedding"] for one in body["data"]])
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
        expected = torch.stack([reference(target, text) for text in TEXTS])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert body["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in outputs)

        options = {"prompt_name": "query", "dimensions": 16, "encoding_format": "base64"}
        body = answer(server, "/v1/embeddings", {"input": TEXTS, **options})
        decoded = [np.frombuffer(base64.b64decode(x["embedding"]), "<f4") for x in body["data"]]
        found = torch.from_numpy(np.stack(decoded))
        torch.testing.assert_close(found, short, atol=1e-6, rtol=0)
        expected = reference(target, TEXTS[1], PROMPTS["query"], 16)
        torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=0)

        assert "input: missing" in refusal(server, "/v1/embeddings", {})
        assert "input" in refusal(server, "/v1/embeddings", {"input": ["a", 3]})
        assert "dimensions" in refusal(server, "/v1/embeddings", {"input": "a", "dimensions": 65})
        assert refusal(server, "/v1/completions", {"prompt": "a"})
        assert refusal(server, "/v1/score", {"query": "a", "items": "b", "label_token_ids": [5]})


@pytest.mark.slow
def test_scores_and_reranking_are_the_targets_probabilities(tmp_path: Path) -> None:
    target = write_reranker(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])

    @torch.no_grad()
    def probabilities(ids: list[int], labels: list[int]) -> list[float]:
        return model(torch.tensor([ids])).logits[0, -1].softmax(-1)[labels].tolist()

    with endpoint(tmp_path, target, speculative={"method": "none"}) as server:
        labels = [5, 300, 41]
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": labels}
        found = answer(server, "/v1/score", body)["scores"]
        for item, scores in zip(ITEMS, found, strict=True):
            wanted = probabilities(tokenizer(QUERY + item)["input_ids"], labels)
            assert scores == pytest.approx(wanted, rel=1e-4, abs=1e-7)
        shares = answer(server, "/v1/score", body | {"apply_softmax": True})["scores"]
        assert [sum(each) for each in shares] == pytest.approx([1.0] * len(ITEMS))

        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        results = answer(server, "/v1/rerank", body)["results"]
        relevance = []
        for document in DOCUMENTS:
            content = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
            messages = [
                {"role": "system", "content": JUDGE},
                {"role": "user", "content": content},
            ]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            both = probabilities(ids, [yes, no])
            relevance.append(both[0] / math.fsum(both))
        order = sorted(range(len(DOCUMENTS)), key=lambda i: -relevance[i])[:2]
        assert [result["index"] for result in results] == order
        for result in results:
            wanted_share = relevance[result["index"]]
            assert result["relevance_score"] == pytest.approx(wanted_share, rel=1e-4)
            assert result["document"] == {"text": DOCUMENTS[result["index"]]}

        score = {"query": "a", "items": ["b"], "label_token_ids": [5]}
        assert "items" in refusal(server, "/v1/score", score | {"items": ["b", 3]})
        labels_refused = refusal(server, "/v1/score", score | {"label_token_ids": [330]})
        assert "token id 330" in labels_refused
        assert "documents" in refusal(server, "/v1/rerank", {"query": "a", "documents": [1]})
        assert refusal(server, "/v1/embeddings", {"input": "a"})
