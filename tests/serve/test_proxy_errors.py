"""What the proxy itself says, as clients see it."""

import asyncio
import json

import pytest
from starlette.responses import JSONResponse

from eagle_ray.serve import proxy_errors
from tests.support.serving import get, parse_event

OK = b'data: {"choices":[]}\n\n'


def answering_app(status, kind, *parts, dies=None):
    """An application that begins an answer and perhaps dies of it: loudly, or it says no more."""

    async def app(scope, receive, send):
        if status:
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [(b"content-type", kind)],
                }
            )
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
    answer = asyncio.run(
        get(answering_app(status, b"text/plain", b"Unavailable", b"!"), "/v1/models")
    )
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("dies", ["loudly", "quietly"])
def test_a_replica_that_dies_before_it_answers_is_a_refusal(dies):
    answer = asyncio.run(get(answering_app(0, b"", dies=dies), "/v1/completions"))
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"


@pytest.mark.parametrize("dies", ["loudly", "quietly"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(dies):
    answer = asyncio.run(
        get(
            answering_app(200, b"text/event-stream; charset=utf-8", OK, dies=dies),
            "/v1/completions",
        )
    )
    first, last = answer.body.decode().strip().split("\n\n")
    assert (
        parse_event(first) == {"choices": []} and parse_event(last)["error"]["code"] == "no_replica"
    )


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, b"application/json", b"{}"),
        (400, b"application/json", b'{"error":{}}'),
        (200, b"text/plain", b"a 1\n"),
    ],
)
def test_what_replicas_say_passes_as_it_is(status, kind, body):
    answer = asyncio.run(get(answering_app(status, kind, body), "/metrics"))
    assert (answer.status, answer.body) == (status, body)


async def ask_app(app, **changes):
    """Ask with a changed scope; return the status and the error."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "headers": [],
        "query_string": b"",
    }
    await app(scope | changes, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]).get("error")


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "*"},
        {"path": ""},
        {"path": "v1/models"},
        {"headers": [(b"x-request-id", b"\xe9")]},
        {"headers": [(b"x-request-id", b"a b")]},
        {"headers": [(b"x-request-id", b"")]},
        {"headers": [(b"x-request-id", b"a" * 129)]},
        {"headers": [(b"x-request-id", b"a"), (b"x-request-id", "é".encode())]},
    ],
)
def test_what_no_replica_could_read_is_the_clients_mistake(changes):
    status, error = asyncio.run(ask_app(answering_app(200, b"application/json", b"{}"), **changes))
    assert (
        status == 400
        and error["type"] == "invalid_request_error"
        and error["code"] in ("bad_http", "bad_request_id")
    )


def test_bytes_that_serve_cannot_decode_are_the_clients_mistake():
    async def app(scope, receive, send):
        dict(scope["headers"])[b"traceparent"].decode()

    middleware = proxy_errors.OpenAIErrorMiddleware(app)
    assert asyncio.run(ask_app(middleware, headers=[(b"traceparent", b"\xe9")]))[0] == 400


def test_a_client_cannot_change_how_serve_treats_its_request():
    seen = []

    async def app(scope, receive, send):
        seen.extend(scope["headers"])
        await JSONResponse({})(scope, receive, send)

    kept = [(b"x-request-id", b"a-1"), (b"user-agent", b"\xe9")]
    own = [
        (name, b"?1")
        for name in (
            b"X-Request-Disconnect-Disabled",
            b"x-request-timeout-seconds",
            b"serve-multiplexed-model-id",
        )
    ]
    assert (
        asyncio.run(ask_app(proxy_errors.OpenAIErrorMiddleware(app), headers=[*own, *kept]))[0]
        == 200
    )
    assert seen == kept


class GreedyProxy:
    """Reads all that it may of a body before the application asks for it, as Serve's proxy does."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        queue = asyncio.Queue()

        async def read():
            while True:
                await queue.put(await receive())

        reading = asyncio.ensure_future(read())
        try:
            await self._app(scope, queue.get, send)
        finally:
            reading.cancel()


def test_a_slow_replica_slows_the_client(monkeypatch):
    """The proxy is never further ahead of it than the window and one part of the body."""
    monkeypatch.setattr(proxy_errors, "MAX_AHEAD_BYTES", 4000)
    monkeypatch.setattr(proxy_errors, "ACKNOWLEDGE_BYTES", 1000)
    num_sent, num_taken, ahead = 0, 0, []

    async def slow(scope, receive, send):
        nonlocal num_taken
        while (message := await receive())["more_body"]:
            num_taken += len(message["body"])
            await asyncio.sleep(0.001)
        await JSONResponse({"bytes": num_taken + len(message["body"])})(scope, receive, send)

    async def main():
        nonlocal num_sent
        sent = []

        async def receive():
            nonlocal num_sent
            if num_sent == 100_000:
                return await asyncio.Future()
            num_sent += 500
            ahead.append(num_sent - num_taken)
            return {"type": "http.request", "body": b"x" * 500, "more_body": num_sent < 100_000}

        async def send(message):
            sent.append(message)

        app = proxy_errors.OpenAIErrorMiddleware(GreedyProxy(proxy_errors.AcknowledgeBody(slow)))
        await app(
            {"type": "http", "method": "POST", "path": "/v1/files", "headers": []}, receive, send
        )
        return sent

    start, body = asyncio.run(main())
    assert start["status"] == 200 and json.loads(body["body"]) == {"bytes": 100_000}
    assert 4000 <= max(ahead) <= 4000 + 1000 + 2 * 500


def test_health_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(proxy_errors, "HEALTH_ANSWERS_WITHIN_S", 0.01)

    async def waits(scope, receive, send):
        await asyncio.sleep(60)

    answer = asyncio.run(get(proxy_errors.OpenAIErrorMiddleware(waits), "/health"))
    assert answer.status == 503 and answer.json["error"]["code"] == "no_replica"


def test_a_slow_machine_is_no_missing_replica(monkeypatch):
    monkeypatch.setattr(proxy_errors, "HEALTH_ANSWERS_WITHIN_S", 0.01)

    async def replica(scope, receive, send):
        await asyncio.sleep(0.3)
        await JSONResponse({"path": scope["path"]})(scope, receive, send)

    models = asyncio.run(get(proxy_errors.OpenAIErrorMiddleware(replica), "/v1/models"))
    assert models.json == {"path": "/v1/models"}


def test_files_are_not_waited_for_without_a_replica(monkeypatch):
    monkeypatch.setattr(proxy_errors, "HEALTH_ANSWERS_WITHIN_S", 0.01)
    monkeypatch.setattr(proxy_errors, "REPLICA_ANSWERS_WITHIN_S", 0.01)
    is_there = False

    async def replica(scope, receive, send):
        if not is_there:
            await asyncio.sleep(60)
        if scope["path"] != "/health":
            await asyncio.sleep(0.1)  # a slow store, of a replica that is there
        await JSONResponse({"path": scope["path"]})(scope, receive, send)

    async def main():
        nonlocal is_there
        app = proxy_errors.OpenAIErrorMiddleware(replica)
        refused = await get(app, "/v1/files")
        is_there = True
        app = proxy_errors.OpenAIErrorMiddleware(replica)
        return refused, await get(app, "/v1/files"), await get(app, "/health")

    refused, files, health = asyncio.run(main())
    assert refused.status == 503 and refused.json["error"]["code"] == "no_replica"
    assert files.json == {"path": "/v1/files"} and health.json == {"path": "/health"}


def test_replica_that_is_busy_is_not_called_gone(monkeypatch):
    """It has answered a moment ago."""
    monkeypatch.setattr(proxy_errors, "HEALTH_ANSWERS_WITHIN_S", 0.01)
    is_busy = False

    async def replica(scope, receive, send):
        if is_busy:
            await asyncio.sleep(60)
        await JSONResponse({"status": "ok"})(scope, receive, send)

    async def main():
        nonlocal is_busy
        app = proxy_errors.OpenAIErrorMiddleware(replica)
        first = await get(app, "/health")
        is_busy = True
        second = await get(app, "/health")
        monkeypatch.setattr(proxy_errors, "HEALTH_IS_KNOWN_S", 0.0)
        return first, second, await get(app, "/health")

    assert [answer.status for answer in asyncio.run(main())] == [200, 200, 503]
