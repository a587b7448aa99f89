"""What Ray Serve's proxy itself answers, in OpenAI's form: a replica that died, none there, none in time.

Serve calls the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, which must be set in the environment in
which Ray is started. The proxy has no API keys: before it lists Serve's applications under ``/-/routes``, it asks a
replica whether the client's key is good. ``/-/healthz`` needs no key: the probes of Kubernetes and of load balancers
have none, and its answer is `success` and nothing else.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=eagle_ray.serve.proxy_errors.middlewares ray start --head
"""

from __future__ import annotations

import asyncio
import logging

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_ray.serve import http_protocol
from eagle_ray.serve.http_errors import ApiError
from eagle_ray.serve.sse import error_event

log = logging.getLogger("eagle_ray")
HEALTH_ANSWERS_WITHIN_S = 5.0
UNAVAILABLE = 503
ROUTES = "/-/routes"  # Serve's list of applications
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
        limit = HEALTH_ANSWERS_WITHIN_S if answer.is_health else None  # Serve waits for a replica as long as it takes
        try:
            await asyncio.wait_for(self._app(scope, receive, answer.send), limit)
        except Exception:  # whatever Serve raises for a replica that died, its client waits for an answer
            log.exception("no answer to %s", scope["path"])
        await answer.end()  # Serve also leaves it at nothing, or in the middle


class _Answer:
    """What is sent to one client, but for what the proxy says in plain text."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self.is_health = scope["path"] == "/health"
        self._has_begun = self._is_refused = self._is_stream = self._is_whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            self._is_refused = message["status"] >= 400 and not kind.startswith(b"application/json")
            if self._is_refused:
                await self._refuse(message["status"])
        if not self._is_refused:
            self._has_begun = True
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            self._is_whole = self._is_whole or is_last
            await self._send(message)

    async def end(self) -> None:
        """Tell the client if the response ends before it is complete."""
        if not self._has_begun:
            await self._refuse(UNAVAILABLE)
        elif self._is_stream and not self._is_whole:
            last = error_event(_error(UNAVAILABLE)).encode()
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _refuse(self, status: int) -> None:
        self._has_begun, error = True, _error(status)
        await JSONResponse(error.body(), error.status, error.headers)(self._scope, self._receive, self._send)


def _error(status: int) -> ApiError:
    """Return our error for the proxy's 404 (the application is not running) or 500 (a replica died)."""
    if status == 408:
        return ApiError(408, "not answered in time", code="timeout")
    return ApiError(UNAVAILABLE, "no replica can answer now: try again", code="no_replica")
