"""Give errors of Ray Serve's proxy OpenAI's form, and refuse requests on which the proxy would fail.

The proxy's own errors are a dead replica, no available replica, and a timeout. A request that no
replica could read is refused here. Otherwise the proxy would fail on it and its client would try
again.

Serve calls the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names. The variable must be
set in the environment in which Ray is started:

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=eagle_ray.serve.proxy_errors.middlewares ray start --head

The proxy has no API keys. Before it lists Serve's applications under ``/-/routes``, it asks a
replica whether the client's key is valid. ``/-/healthz`` needs no key, since the probes of
Kubernetes and of load balancers have none. Its answer is `success` and nothing else.

A request that is not HTTP reaches no application, because the parser refuses it. If the first line
and the headers of a request do not arrive in time, its connection is closed. Serve's proxy lets
uvicorn choose its protocol class by the name "auto". `install` puts our class there, in the proxy's
process, before the server starts.

Serve's queues between proxy and replica have no limit, so a fast upload to a slow disk would fill
the memory of both. Therefore the proxy reads at most MAX_AHEAD_BYTES more of a body than its
replica has consumed. The proxy announces this in the ASGI scope. The application reports what it
has consumed by a message that the proxy does not pass on to the client. While the window is full,
the proxy does not read, and TCP slows the client down.

    proxy:    window = BodyWindow(receive)                  replica:  Middleware(AcknowledgeBody)
              await app(counting(scope), window.receive, send)
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
import time
from contextlib import suppress
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from eagle_ray.core.json_text import dump_json
from eagle_ray.serve.http.http_answers import ApiError, event

log = logging.getLogger("eagle_ray")
# A busy machine takes tenths of a second to answer; Kubernetes waits for one second by default.
HEALTH_ANSWERS_WITHIN_S = 0.5
# Seconds that a replica has to answer a probe, before a GET request other than /health is given up.
REPLICA_ANSWERS_WITHIN_S = 2.0
# A replica that answered so recently is there, although it is too busy to say so again.
HEALTH_IS_KNOWN_S = 3.0
PROBE_ENDS_AFTER_S = 5.0
REPLICA_POLL_S = 1.0  # seconds between two looks for a replica that has not answered a GET request
UNAVAILABLE = 503
HEALTH = "/health"
ROUTES = "/-/routes"  # Serve's list of applications
MAX_REQUEST_ID_CHARS = 128
# Pattern of an id that is written to logs and sent back.
REQUEST_ID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARS)
# Headers with which a client would change how Serve treats its request; - is written as _.
SERVES_HEADERS = (
    b"serve_multiplexed_model_id",
    b"x_request_disconnect_disabled",
    b"x_request_timeout_seconds",
    b"x_session_id",
)
GUARDED = "/v1/models"  # a route of a replica that wants a key and costs nothing


def middlewares() -> list[Middleware]:
    """Return the middlewares for Ray Serve's proxy, which calls this in its process before the server starts."""
    install()
    return [Middleware(KeyForRoutes), Middleware(OpenAIErrorMiddleware)]


class KeyForRoutes:
    """Middleware that shows ``/-/routes`` only to clients whose key a replica accepts."""

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
        """Return a replica's answer to a client with a wrong key; None for a valid key or without keys."""
        messages: list[Message] = []
        body = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()

        async def collect(message: Message) -> None:
            messages.append(message)

        probe = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app({**scope, **probe}, receive, collect)
        return None if messages and messages[0].get("status") == 200 else messages


class OpenAIErrorMiddleware:
    """Middleware that gives the proxy's errors OpenAI's form. A stream that breaks off ends with an error event."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._health = ReplicaHealth(app)

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
        try:
            if answer.is_health:
                await self._answer_health(scope, answer)
            elif scope.get("method") == "GET":
                await self._answer_if_there(scope, answer)
            else:  # Serve waits for a replica as long as it takes
                await self._app(scope, answer.window.receive, answer.send)
        except UnicodeDecodeError as error:
            log.info("no answer to %s: %s", scope["path"], error)
            await answer.refuse(
                ApiError(400, "a header is neither ASCII nor UTF-8. Send ASCII.", code="bad_http")
            )
        except Exception:
            # Serve may raise anything for a replica that died, and its client waits for an answer.
            log.exception("no answer to %s", scope["path"])
        await answer.end()  # Serve also leaves it at nothing, or in the middle

    async def _answer_health(self, scope: Scope, answer: _Answer) -> None:
        for message in await self._health.messages(scope):
            await answer.send(message)

    async def _answer_if_there(self, scope: Scope, answer: _Answer) -> None:
        """Pass a request on to the application, and stop waiting if no replica is available."""
        work = asyncio.ensure_future(self._app(scope, answer.window.receive, answer.send))
        try:
            wait_s = HEALTH_ANSWERS_WITHIN_S
            while not (await asyncio.wait([work], timeout=wait_s))[0]:
                if answer.has_begun:
                    break
                is_there = await self._health.messages(scope, REPLICA_ANSWERS_WITHIN_S)
                if not is_there and not answer.has_begun:
                    return
                wait_s = REPLICA_POLL_S
            await work
        finally:
            work.cancel()


class ReplicaHealth:
    """Probes ``/health`` for an available replica. Concurrent requests share one probe.

    Serve holds a request until there is a replica. So a request without an answer does not yet mean
    that no replica is available.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._probe: asyncio.Task[list[Message]] | None = None
        self._last: list[Message] = []  # the last answer
        self._last_at = -PROBE_ENDS_AFTER_S

    async def messages(self, scope: Scope, within_s: float | None = None) -> list[Message]:
        """Return a replica's recent answer to the probe; an empty list if no replica is available.

        Args:
            scope: ASGI scope of any request to the application.
            within_s: seconds that the replica has to answer; None is HEALTH_ANSWERS_WITHIN_S.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._answered(scope))
        await asyncio.wait([self._probe], timeout=within_s or HEALTH_ANSWERS_WITHIN_S)
        is_known = time.monotonic() - self._last_at < HEALTH_IS_KNOWN_S
        return self._last if is_known else []

    async def _answered(self, scope: Scope) -> list[Message]:
        """Probe a replica, and store its answer."""
        messages: list[Message] = []
        body = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()

        async def collect(message: Message) -> None:
            messages.append(message)

        path = scope.get("root_path", "") + HEALTH
        probe = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        with suppress(Exception):  # Serve's exceptions for a dead replica
            await asyncio.wait_for(
                self._app({**scope, **probe}, receive, collect), PROBE_ENDS_AFTER_S
            )
            answer = [message for message in messages if message["type"] != TAKEN]
            if answer and answer[0].get("status") in (200, UNAVAILABLE):
                self._last = answer
                self._last_at = time.monotonic()
        return messages


class _Answer:
    """The messages to one client, with OpenAI's errors in place of the proxy's plain texts."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self.window = BodyWindow(receive)
        self.is_health = (
            scope["path"] == scope.get("root_path", "") + HEALTH and scope.get("method") == "GET"
        )
        self._has_begun = self._is_refused = self._is_stream = self._is_whole = False

    @property
    def has_begun(self) -> bool:
        return self._has_begun

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
        """Send the client an error if the response is not complete."""
        if not self._has_begun:
            await self.refuse(_error(UNAVAILABLE))
        elif self._is_stream and not self._is_whole:
            last = event(_error(UNAVAILABLE).body()).encode()
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Answer with the error, unless an answer has begun."""
        if self._has_begun:
            return
        self._has_begun = True
        await JSONResponse(error.body(), error.status, error.headers)(
            self._scope, self._receive, self._send
        )


def _error_of_request(scope: Scope) -> ApiError | None:
    """Return the error of a request line or header that Serve's proxy cannot read; None if it can."""
    path = scope["path"]
    if not path.startswith("/"):
        return ApiError(
            400,
            f"the request target {reprlib.repr(path)} is no path. Begin it with /.",
            code="bad_http",
        )
    for name, value in scope["headers"]:
        if name == b"x-request-id" and not REQUEST_ID.fullmatch(value):
            message = f"X-Request-Id: must be 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters without spaces"
            return ApiError(400, message, "X-Request-Id", "bad_request_id")
    return None


def _normalized(name: bytes) -> bytes:
    return name.lower().replace(b"-", b"_")


def _error(status: int) -> ApiError:
    """Return the error that replaces the proxy's own, by its status: 408 for a timeout, else 503."""
    if status == 408:
        return ApiError(408, "not answered in time", code="timeout")
    return ApiError(UNAVAILABLE, "no replica can answer now: try again", code="no_replica")


# Bytes of a request line and its headers; uvicorn's other parser (h11) has this limit.
MAX_HEADER_BYTES = 64 << 10
HEAD_WITHIN_S = 30.0  # seconds from a new connection, or from the first byte of a further request
VERSIONS = ("1.0", "1.1")
H2C_OFFER = re.compile(rb"(\r\n)upgrade(:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
TOO_LARGE = f"the headers have more than {MAX_HEADER_BYTES} bytes"
# Uvicorn chooses the class when it is imported, so it has no type.
_Protocol: Any = AutoHTTPProtocol


def install() -> None:
    """Let servers that start later in this process use ErrorFormProtocol."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{ErrorFormProtocol.__name__}"


class ErrorFormProtocol(_Protocol):
    """uvicorn's protocol class with errors in OpenAI's form, and limits on the size and time of headers.

    uvicorn closes a connection that is idle after a response, but not if further bytes have
    arrived. This class closes it in both cases.
    """

    _num_parsed = 0  # bytes of the request line, headers and trailers, as the parser reports them
    _num_pending = 0  # bytes of a header or trailer section that has not ended: the parser reports whole headers only
    _num_new = 0  # the part of the current chunk that belongs to such a section
    _fault = ""  # why the parser was stopped
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._num_parsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header, or a trailer after a chunked body."""
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_pending = self._num_new = 0
        self._stop_head_timer()
        if (problem := self._problem_of_head(self.parser.get_http_version())) is not None:
            self._stop(problem)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = self._num_new = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = self._num_new = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests:
            data = _without_h2c(data)
        self._num_new = len(data)
        super().data_received(data)
        self._num_pending += self._num_new
        if self._num_pending > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)
        if self._is_between_requests and self._head_timer is None:
            self._start_head_timer()

    @property
    def _is_between_requests(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._end_of_head_time)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_of_head_time(self) -> None:
        """Close a connection whose request head took too long. If the head has begun, answer it first."""
        self._head_timer = None
        if self.transport.is_closing() or not self._is_between_requests:
            return
        if self._num_pending:
            message = f"the headers were not here after {HEAD_WITHIN_S:g} s. Send them at once."
            self._refuse(ApiError(408, message, code="headers_too_slow"), "408 Request Timeout")
        else:
            self.transport.close()

    def _problem_of_head(self, version: str) -> str | None:
        """Return what is wrong in a request head that the parser accepts although it is not
        HTTP/1; None if nothing is.
        """
        if version not in VERSIONS:
            return f"HTTP/{version} is not spoken here"
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (version == "1.1" and num_hosts == 0):
            return f"Host: the request has {num_hosts} of these headers, and needs one"
        codings = [
            value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"
        ]
        if any(coding != b"chunked" for coding in codings):
            return "Transfer-Encoding: only chunked is read, and no packed body"
        return None

    def _count(self, num_bytes: int) -> None:
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEADER_BYTES:
            self._stop(TOO_LARGE)

    def _stop(self, fault: str) -> None:
        """Raise ValueError. The parser passes it on to data_received, which answers with 400."""
        self._fault = fault
        raise ValueError(fault)

    def send_400_response(self, msg: str) -> None:
        """Answer with uvicorn's message, or with the reason that stopped the parser, and close the connection."""
        message = f"{(self._fault or msg).rstrip('.')}. Send an HTTP/1.1 request."
        self._refuse(ApiError(400, message, code="bad_http"), "400 Bad Request")

    def _refuse(self, error: ApiError, status: str) -> None:
        """Answer with an error, and close the connection."""
        body = dump_json(error.body()).encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _without_h2c(data: bytes) -> bytes:
    """Rename the headers that offer HTTP/2 in a request head, so that the parser ignores the offer."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return H2C_OFFER.sub(b"\\1Offered\\2", head + end) + rest


TAKEN = "eagle_ray.body_taken"  # the key of the scope's extensions, and the type of the message
MAX_AHEAD_BYTES = 4 << 20
ACKNOWLEDGE_BYTES = 1 << 19  # bytes of the body for each message


def counting(scope: Scope) -> Scope:
    """Return a scope that makes the application send messages of type TAKEN."""
    return {**scope, "extensions": {**(scope.get("extensions") or {}), TAKEN: {}}}


class BodyWindow:
    """Limits how far the proxy reads ahead of the replica in one request's body."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._num_ahead = 0  # bytes
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def receive(self) -> Message:
        """Return the client's next message, once the window has room."""
        await self._has_room.wait()
        message = await self._receive()
        self._move(len(message.get("body", b"")))
        return message

    def take(self, message: Message) -> bool:
        """Widen the window by a message of type TAKEN. Return whether the message is one."""
        if message["type"] != TAKEN:
            return False
        self._move(-message["num_bytes"])
        return True

    def _move(self, num_bytes: int) -> None:
        self._num_ahead += num_bytes
        if self._num_ahead < MAX_AHEAD_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()


class AcknowledgeBody:
    """The application's middleware, which reports the bytes of a body that the application has consumed."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if TAKEN not in (scope.get("extensions") or {}):
            await self._app(scope, receive, send)
            return
        num_new = 0

        async def acknowledging() -> Message:
            nonlocal num_new
            if num_new >= ACKNOWLEDGE_BYTES:
                await send({"type": TAKEN, "num_bytes": num_new})
                num_new = 0
            message = await receive()
            num_new += len(message.get("body", b""))
            return message

        await self._app(scope, acknowledging, send)
