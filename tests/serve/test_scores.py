"""POST /v1/score and /v1/rerank: probabilities of next tokens, as the target's own log-softmax has them."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starlette.applications import Starlette

from eagle_ray.assembly.hub import download
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.serve.app import build_app
from eagle_ray.serve.service import Service
from tests.support.serving import SETTINGS, Answer, post

QUERY, ITEMS = "The capital of France is", [" Paris", " the city of Rome", "."]
DOCUMENTS = ["Paris is a city.", "Cats sleep.", "The capital of France is Paris."]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    config = load_serve_config(None, env={}, overrides=SETTINGS | {"serving.slots": 2})
    service = Service.start(config, WorkerPlan())
    yield service
    service.close()


@pytest.fixture(scope="module")
def app(service: Service) -> Starlette:
    return build_app(service)


def sent(app: Starlette, path: str, body: dict[str, Any]) -> Answer:
    return asyncio.run(post(app, path, body, {"content-type": "application/json"}))


def own_probabilities(service: Service, ids: list[int], labels: list[int]) -> list[float]:
    """What transformers' forward of the target says."""
    model = load_causal_lm(download("embedded:tiny", "target"), torch.float32, "cpu")
    logits = model(torch.tensor([ids])).logits[0, -1].float()
    return logits.softmax(-1)[labels].tolist()


def test_scores_are_the_targets_probabilities(app, service):
    labels = [5, 300, 41]
    answer = sent(app, "/v1/score", {"query": QUERY, "items": ITEMS, "label_token_ids": labels})
    assert answer.status == 200, answer.json
    assert answer.json["object"] == "scoring"
    for item, scores in zip(ITEMS, answer.json["scores"], strict=True):
        wanted = own_probabilities(service, service.text.encode(QUERY + item), labels)
        assert scores == pytest.approx(wanted, rel=1e-3, abs=1e-7)
    num_tokens = sum(len(service.text.encode(QUERY + item)) for item in ITEMS)
    assert answer.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_shares_of_labels_add_up_to_one_and_items_may_come_first(app, service):
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": [5, 300]}
    plain = sent(app, "/v1/score", body).json["scores"]
    shares = sent(app, "/v1/score", body | {"apply_softmax": True}).json["scores"]
    for (a, b), own in zip(plain, shares, strict=True):
        assert own == pytest.approx([a / (a + b), b / (a + b)], rel=1e-5)
    first = sent(app, "/v1/score", body | {"item_first": True, "items": ITEMS[:1]}).json["scores"]
    wanted = own_probabilities(service, service.text.encode(ITEMS[0] + QUERY), [5, 300])
    assert first[0] == pytest.approx(wanted, rel=1e-3, abs=1e-7)


def test_documents_are_ordered_by_the_share_of_yes(app, service, monkeypatch):
    tokens = {"yes": 7, "no": 9}
    encode = type(service.text).encode

    def with_words(self, prompt, add_special_tokens=True):
        if prompt in tokens:
            return [tokens[prompt]]
        return encode(self, prompt, add_special_tokens)

    monkeypatch.setattr(type(service.text), "encode", with_words)
    answer = sent(app, "/v1/rerank", {"query": "Where is Paris?", "documents": DOCUMENTS})
    assert answer.status == 200, answer.json
    results = answer.json["results"]
    values = [result["relevance_score"] for result in results]
    assert values == sorted(values, reverse=True) and all(0 < value < 1 for value in values)
    assert [result["document"]["text"] for result in results] == [
        DOCUMENTS[result["index"]] for result in results
    ]
    body = {"query": "Where is Paris?", "documents": DOCUMENTS, "top_n": 1}
    best = sent(app, "/v1/rerank", body | {"return_documents": False}).json["results"]
    assert best == [{"index": results[0]["index"], "relevance_score": values[0]}]
    assert math.isfinite(values[0])


def test_a_target_without_tokens_for_both_answers_is_no_reranker(app):
    answer = sent(app, "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert answer.status == 400 and answer.json["error"]["code"] == "no_reranker"
    assert "Use /v1/score" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": ["a"], "label_token_ids": [5]}, "query"),
        ({"query": "a", "items": [], "label_token_ids": [5]}, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "items"),
        ({"query": "a", "items": ["b", "c " * 9999], "label_token_ids": [5]}, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": [5], "temperature": 1}, "temperature"),
        ({"query": "a", "items": ["b"], "label_token_ids": [5], "model": "other"}, "model"),
    ],
)
def test_a_wrong_body_is_refused_by_its_parameter(app, body, param):
    answer = sent(app, "/v1/score", body)
    assert answer.status in (400, 404) and answer.json["error"]["param"] == param, answer.json


CHOICES = [" Paris", " Rome", " the city of Paris"]
ASKED = {"choice": CHOICES, "max_tokens": 12, "temperature": 0}
BODIES = {
    "/v1/completions": {"prompt": QUERY, "logprobs": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUERY}], "logprobs": True},
    "/v1/responses": {"input": QUERY, "include": ["message.output_text.logprobs"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_a_choice_has_the_scores_of_all(app, service, path):
    """As many as there are choices, equal to the target's log-probabilities, in streams as in whole answers."""
    body = ASKED | BODIES[path]
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = sent(app, path, body)
    assert answer.status == 200, answer.json
    found = answer.json if path == "/v1/responses" else answer.json["choices"][0]
    messages = [{"role": "user", "content": QUERY}]
    prompt = QUERY if path == "/v1/completions" else service.text.render_chat(messages)
    model = load_causal_lm(download("embedded:tiny", "target"), torch.float32, "cpu")
    for choice, score in zip(CHOICES, found["scores"], strict=True):
        special = path == "/v1/completions"
        before = service.text.encode(prompt, add_special_tokens=special)
        ids = service.text.encode(prompt + choice, add_special_tokens=special)
        log_probs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        wanted = sum(float(log_probs[i - 1, ids[i]]) for i in range(len(before), len(ids)))
        assert score == pytest.approx(wanted, abs=1e-3)
    assert found["best"] == max(range(3), key=found["scores"].__getitem__)
    assert 0 < found["label_mass"] <= 1 and found["score_bytes"] == [len(c) for c in CHOICES]

    lines = sent(app, path, body | {"stream": True}).body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    events = [json.loads(event) for event in data]
    if path == "/v1/responses":
        last = events[-1]["response"]
    else:
        [last] = [c for event in events for c in event["choices"] if c["finish_reason"]]
    assert last["scores"] == pytest.approx(found["scores"], abs=1e-3)


def test_without_log_probabilities_choices_have_no_scores(app):
    body = ASKED | {"prompt": QUERY}
    assert "scores" not in sent(app, "/v1/completions", body).json["choices"][0]
