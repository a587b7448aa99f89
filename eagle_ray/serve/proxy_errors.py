"""What Ray Serve's proxy itself answers, in OpenAI's form: a replica that died, none there, none in time.

What no replica could read is refused here: Serve's proxy would fail on it, and its client would try again.

Serve calls the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, which must be set in the environment in
which Ray is started. The proxy has no API keys: before it lists Serve's applications under ``/-/routes``, it asks a
replica whether the client's key is good. ``/-/healthz`` needs no key: the probes of Kubernetes and of load balancers
have none, and its answer is `success` and nothing else.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=eagle_ray.serve.proxy_errors.middlewares ray start --head
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_ray.serve import http_protocol
from eagle_ray.serve.answer_json import error_event
from eagle_ray.serve.body_window import BodyWindow, counting
from eagle_ray.serve.http_errors import ApiError

log = logging.getLogger("eagle_ray")
HEALTH_ANSWERS_WITHIN_S = 5.0
UNAVAILABLE = 503
ROUTES = "/-/routes"  # Serve's list of applications
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARS)  # it is written to logs, and sent back
SERVES_HEADERS = (
    b"serve_multiplexed_model_id",
    b"x_request_disconnect_disabled",
    b"x_request_timeout_seconds",
    b"x_session_id",
)  # with which a client would change how Serve treats its request; - is written as _
GUARDED = "/v1/models"  # a route of a replica that wants a key and costs nothing


def middlewares() -> list[Middleware]:
    """Called by Ray Serve in its proxy's process, before the server starts."""
    http_protocol.install()
    return [Middleware(KeyForRoutes), Middleware(OpenAIErrorMiddleware)]


class KeyForRoutes:
    """Answer ``/-/routes`` only to a client whose key a replica takes."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope.get("path", "")[len(root) :] == ROUTES:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})
                return
            refusal = await self._refusal(scope, root + GUARDED)
            if refusal is not None:
                for message in refusal:
                    await send(message)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope, path: str) -> list[Message] | None:
        """Return what a replica says to a client whose key it does not take; None for a good key, or without keys."""
        messages: list[Message] = []
        body = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()

        async def collect(message: Message) -> None:
            messages.append(message)

        asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app({**scope, **asked}, receive, collect)
        return None if messages and messages[0].get("status") == 200 else messages


class OpenAIErrorMiddleware:
    """A refusal of the proxy's own becomes one of ours; a stream that breaks off ends with an error event."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send)
        if (error := _error_of_request(scope)) is not None:
            await answer.refuse(error)
            return
        headers = [pair for pair in scope["headers"] if _normalized(pair[0]) not in SERVES_HEADERS]
        scope = counting({**scope, "headers": headers})
        limit = HEALTH_ANSWERS_WITHIN_S if answer.is_health else None  # Serve waits for a replica as long as it takes
        try:
            await asyncio.wait_for(self._app(scope, answer.window.receive, answer.send), limit)
        except UnicodeDecodeError as error:
            log.info("no answer to %s: %s", scope["path"], error)
            await answer.refuse(ApiError(400, "a header is neither ASCII nor UTF-8. Send ASCII.", code="bad_http"))
        except Exception:  # whatever Serve raises for a replica that died, its client waits for an answer
            log.exception("no answer to %s", scope["path"])
        await answer.end()  # Serve also leaves it at nothing, or in the middle


class _Answer:
    """What is sent to one client, but for what the proxy says in plain text."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self.window = BodyWindow(receive)
        self.is_health = scope["path"] == "/health"
        self._has_begun = self._is_refused = self._is_stream = self._is_whole = False

    async def send(self, message: Message) -> None:
        if self.window.take(message):
            return
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            self._is_refused = message["status"] >= 400 and not kind.startswith(b"application/json")
            if self._is_refused:
                await self.refuse(_error(message["status"]))
        if not self._is_refused:
            self._has_begun = True
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            self._is_whole = self._is_whole or is_last
            await self._send(message)

    async def end(self) -> None:
        """Tell the client if the response ends before it is complete."""
        if not self._has_begun:
            await self.refuse(_error(UNAVAILABLE))
        elif self._is_stream and not self._is_whole:
            last = error_event(_error(UNAVAILABLE)).encode()
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Answer with the error, unless an answer has begun."""
        if self._has_begun:
            return
        self._has_begun = True
        await JSONResponse(error.body(), error.status, error.headers)(self._scope, self._receive, self._send)


def _error_of_request(scope: Scope) -> ApiError | None:
    """Return what is wrong with a request line or a header that Serve's proxy itself reads; None for a right one."""
    path = scope["path"]
    if not path.startswith("/"):
        return ApiError(400, f"the request target {reprlib.repr(path)} is no path. Begin it with /.", code="bad_http")
    for name, value in scope["headers"]:
        if name == b"x-request-id" and not REQUEST_ID.fullmatch(value):
            message = f"X-Request-Id: must be 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters without spaces"
            return ApiError(400, message, "X-Request-Id", "bad_request_id")
    return None


def _normalized(name: bytes) -> bytes:
    return name.lower().replace(b"-", b"_")


def _error(status: int) -> ApiError:
    """Return our error for the proxy's 404 (the application is not running) or 500 (a replica died)."""
    if status == 408:
        return ApiError(408, "not answered in time", code="timeout")
    return ApiError(UNAVAILABLE, "no replica can answer now: try again", code="no_replica")
