"""OpenAI's own library, its response validation strict, and schemathesis, both in this process over the real engine."""

import asyncio
import json

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import TypeAdapter

from eagle_ray.requests import answer_models
from eagle_ray.requests.openai_bodies import ChatRequest
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.serve.http.request_body import parse
from eagle_ray.serve.openapi import openapi
from tests.support.serving import get, post

httpx2, openai, schemathesis = map(
    pytest.importorskip, ("httpx2", "openai", "schemathesis")
)  # Python 3.11 or newer
HI = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "<|bos|><|user|>What do you think about singing?<|end|><|assistant|>"
MODEL = "embedded:tiny"


def strict(app):
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="x",
        max_retries=0,
        http_client=transport,
        _strict_response_validation=True,
    )


async def texts_of(stream):
    found = {}
    async for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            found[choice.index] = found.get(choice.index, "") + (piece or "")
    return [found[i] for i in sorted(found)]


def test_openais_strict_types_take_every_answer_and_every_chunk(app):
    async def main():
        async with strict(app) as client:
            [model] = (await client.models.list()).data
            assert model == await client.models.retrieve(MODEL) and model.id == MODEL
            many = {"model": MODEL, "n": 2, "seed": 3, "temperature": 0.9, "max_tokens": 9}
            chat = {"messages": HI, "logprobs": True, "top_logprobs": 2} | many
            text = {"prompt": PROMPT, "logprobs": 2, "echo": True} | many
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            whole = await client.chat.completions.create(**chat)
            pieces = await texts_of(await client.chat.completions.create(**chat, **usage))
            assert pieces == [choice.message.content for choice in whole.choices]
            whole = await client.completions.create(**text)
            pieces = await texts_of(await client.completions.create(**text, **usage))
            assert pieces == [choice.text for choice in whole.choices]
            return whole

    for choice in asyncio.run(main()).choices:
        assert choice.logprobs.token_logprobs[0] == 0 > choice.logprobs.token_logprobs[1]
        assert choice.logprobs.top_logprobs[0] == {} and choice.finish_reason in ("stop", "length")


def test_only_openai_clients_get_values_in_place_of_nulls(app):
    """Their types know none; everybody else gets what OpenAI's servers and vLLM send."""
    body = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 1, "echo": True}

    def ask(**headers):
        plain = asyncio.run(post(app, "/v1/completions", body, headers)).json["choices"][0][
            "logprobs"
        ]
        events = asyncio.run(post(app, "/v1/completions", body | {"stream": True}, headers)).events[
            :-1
        ]
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        return plain["token_logprobs"][0], plain["top_logprobs"][0], set(reasons[:-1]), reasons[-1]

    assert ask() == (None, None, {None}, "length")
    assert ask(**{"X-Stainless-Lang": "python"}) == (0.0, {}, {"length"}, "length")


def test_openais_errors_have_their_kinds(app):
    async def main():
        async with strict(app) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.models.retrieve("gpt")
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=MODEL, messages=HI, modalities=["audio"])
            return missing.value, refused.value

    missing, refused = asyncio.run(main())
    assert (missing.code, missing.param) == ("model_not_found", "model")
    assert (refused.code, refused.param) == ("unsupported_parameter", "modalities")


def test_answers_are_what_the_openapi_document_says(app):
    """Every route, and every chunk of both streams, has the shape that the document gives it."""
    for path, shape in [
        ("/v1/models", answer_models.Models),
        (f"/v1/models/{MODEL}", answer_models.Model),
        ("/tokenizer_info", answer_models.TokenizerInfo),
        ("/health", answer_models.Health),
        ("/version", answer_models.Version),
    ]:
        TypeAdapter(shape).validate_json(asyncio.run(get(app, path)).body, strict=True)
    chat, text = (
        {"messages": HI, "max_tokens": 5, "logprobs": True},
        {"prompt": "Once", "max_tokens": 5, "logprobs": 0},
    )
    more = {"return_token_ids": True}
    for path, body, shape, chunk in [
        (
            "/v1/chat/completions",
            chat | more,
            answer_models.ChatCompletion,
            answer_models.ChatChunk,
        ),
        ("/v1/completions", text | more, answer_models.Completion, answer_models.TextChunk),
    ]:
        TypeAdapter(shape).validate_json(asyncio.run(post(app, path, body)).body, strict=True)
        streamed = {
            "stream": True,
            "stream_options": {"include_usage": True, "include_steps": True},
        }
        for event in asyncio.run(post(app, path, body | streamed)).events[:-1]:
            TypeAdapter(chunk).validate_json(json.dumps(event), strict=True)
    routes = {route.path.replace(":path", "") for route in app.routes}
    the_page = {"/", "/favicon.ico"} | {path for path in routes if path.startswith("/page/")}
    only_refuses = {"/v1/responses/{rest}"}
    assert openapi(MODEL, 1024)["paths"].keys() == routes - the_page - only_refuses


def test_keys_are_in_the_openapi_document():
    paths = openapi(MODEL, 1024, has_keys=True)["paths"]
    guarded = {
        path
        for path, item in paths.items()
        for operation in item.values()
        if "security" in operation
    }
    assert guarded == {path for path in paths if path.startswith(("/v1", "/token", "/detoken"))}
    assert "security" not in json.dumps(openapi(MODEL, 1024)["paths"])


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "body",
    [
        {"json_schema": SCHEMA},
        {"json_schema": "true"},
        {"json_schema": 5},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"structured_outputs": {"json": 5}},
        {"structured_outputs": {"structural_tag": 0}},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {"x": 1}},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": 3},
        {"metadata": {"a": "b"}},
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [HI[0] | {"tool_calls": [CALL]}]},
    ],
)
def test_openapi_document_and_server_accept_the_same_bodies(body):
    body = {"messages": HI} | body
    document = {
        "$ref": "#/components/schemas/ChatRequest",
        "components": openapi(MODEL, 1024)["components"],
    }
    try:
        parse(ChatRequest, json.dumps(body).encode())
    except ApiError:
        is_read = False
    else:
        is_read = True
    assert jsonschema.Draft202012Validator(document).is_valid(body) == is_read


POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")


@pytest.mark.parametrize("num_examples", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", POSTS)
def test_openapi_violations_are_refused_in_openai_form(app, path, num_examples):
    """Schemathesis draws it from the document and checks status, type and shape of each answer."""
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def refuses(case):
        answer = case.call_and_validate()
        assert 400 <= answer.status_code < 500

    refuses()
