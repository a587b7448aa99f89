"""What Ray Serve's proxy itself answers, in OpenAI's form: no such route, a replica that died, none that can answer.

Serve asks the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, which must stand in the environment in
which Ray is started. Does not know replicas: it only sees answers that are not JSON.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=eagle_ray.serve.proxy.middlewares ray start --head
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_ray.serve.errors import ApiError
from eagle_ray.serve.events import error_event

HEALTH_ANSWERS_WITHIN_S = 5.0
RESET = 503
CODES = {404: "no_route", 408: "timeout", 500: "replica_died", 503: "no_replica"}


def middlewares() -> list[Middleware]:
    """For Ray Serve's proxy."""
    return [Middleware(ErrorForm)]


class ErrorForm:
    """A refusal of the proxy's own becomes one of ours; a stream that breaks off ends with an error event."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == "/health":
            await self._within(scope, receive, send)
        else:
            await self._app(scope, receive, _Rewritten(scope, receive, send))

    async def _within(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve lets a request wait until there is a replica; to wait is an answer too."""
        rewritten = _Rewritten(scope, receive, send)
        try:
            await asyncio.wait_for(self._app(scope, receive, rewritten), HEALTH_ANSWERS_WITHIN_S)
        except asyncio.TimeoutError:
            if not rewritten.has_begun:
                await _refuse(RESET, scope, receive, send)


class _Rewritten:
    """`send`, but for what the proxy says in plain text."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self.has_begun = False
        self._is_refused = self._is_stream = self._is_whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_refused = message["status"] >= 400 and not kind.startswith(b"application/json")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_refused:
                await _refuse(message["status"], self._scope, self._receive, self._send)
                return
        elif self._is_refused:
            return
        elif self._is_stream and not message.get("more_body") and not self._is_whole:
            message = message | {"body": message.get("body", b"") + error_event(_error(RESET)).encode()}
        self._is_whole = self._is_whole or message.get("body", b"").endswith(b"data: [DONE]\n\n")
        await self._send(message)


async def _refuse(status: int, scope: Scope, receive: Receive, send: Send) -> None:
    error = _error(status)
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)


def _error(status: int) -> ApiError:
    """Serve's 500 is a replica that died under its requests: another one, or the same, will answer."""
    said = {404: "there is no such route", 408: "not answered in time"}
    message = said.get(status, "no replica can answer now: try again")
    return ApiError(503 if status == 500 else status, message, code=CODES.get(status))
