"""What the proxy itself says, as clients see it."""

import asyncio

import pytest

from eagle_ray.serve import proxy_errors
from tests.serve.client import get, parsed

OK = b'data: {"choices":[]}\n\n'


def answering(status, kind, *parts, dies=None):
    """An application that begins an answer and perhaps dies of it: loudly, or it says no more."""

    async def app(scope, receive, send):
        if status:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if dies == "loudly":
            raise RuntimeError("the actor died")
        if dies == "quietly":
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return proxy_errors.OpenAIErrorMiddleware(app)


@pytest.mark.parametrize("status", [404, 500, 503])
def test_plain_words_of_the_proxy_become_a_refusal_in_our_form(status):
    answer = asyncio.run(get(answering(status, b"text/plain", b"Unavailable", b"!"), "/v1/models"))
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("dies", ["loudly", "quietly"])
def test_a_replica_that_dies_before_it_answers_is_a_refusal(dies):
    answer = asyncio.run(get(answering(0, b"", dies=dies), "/v1/completions"))
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"


@pytest.mark.parametrize("dies", ["loudly", "quietly"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(dies):
    answer = asyncio.run(get(answering(200, b"text/event-stream; charset=utf-8", OK, dies=dies), "/v1/completions"))
    first, last = answer.body.decode().strip().split("\n\n")
    assert parsed(first) == {"choices": []} and parsed(last)["error"]["code"] == "no_replica"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [(200, b"application/json", b"{}"), (400, b"application/json", b'{"error":{}}'), (200, b"text/plain", b"a 1\n")],
)
def test_what_replicas_say_passes_as_it_is(status, kind, body):
    answer = asyncio.run(get(answering(status, kind, body), "/metrics"))
    assert (answer.status, answer.body) == (status, body)


def test_health_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(proxy_errors, "HEALTH_ANSWERS_WITHIN_S", 0.01)

    async def waits(scope, receive, send):
        await asyncio.sleep(60)

    answer = asyncio.run(get(proxy_errors.OpenAIErrorMiddleware(waits), "/health"))
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"
