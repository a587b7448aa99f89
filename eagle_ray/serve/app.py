"""The ASGI application: routes of OpenAI's protocol and the web page, over one Service.

Every error response has OpenAI's form. If a client disconnects, its request is aborted.

The web page at ``/`` consists of a few static files. It is an ordinary client, which requests
stream_options.include_steps and draws the result. Its content security policy allows only its own
scripts, and requests to this server.

    app = build_app(service)
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eagle_ray import __version__
from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.requests.answer_models import Health, Model, Models, Version
from eagle_ray.requests.embedding_bodies import EmbeddingsRequest
from eagle_ray.requests.openai_bodies import (
    BodyClass,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from eagle_ray.requests.score_bodies import RerankRequest, ScoreRequest
from eagle_ray.serve.access import AllowedHosts
from eagle_ray.serve.batches.batch_routes import batch_routes
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.endpoint_metrics import SharedScrape, Snapshot
from eagle_ray.serve.http.http_answers import ApiError, api_error, is_typed
from eagle_ray.serve.http.request_body import ClientDisconnected, read_body
from eagle_ray.serve.openapi import openapi_body
from eagle_ray.serve.proxy_errors import AcknowledgeBody
from eagle_ray.serve.score_routes import answer_scores
from eagle_ray.serve.service import GenerationClass, Service

Publish = Callable[[Snapshot], Awaitable[Snapshot]]
"""Tells the others this replica's snapshot; returns everybody's."""
Result = TypeVar("Result")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED = 499  # not read: the client closed the connection


async def alone(snapshot: Snapshot) -> Snapshot:
    """Return the metrics of a single replica unchanged, since there is nothing to merge."""
    return snapshot


def build_app(
    service: Service, publish: Publish = alone, store: BatchStore | None = None
) -> Starlette:
    """Return the ASGI application.

    Args:
        service: engine with its tokenizer.
        publish: function that merges this replica's metrics with those of all replicas.
        store: store of files and batches; None turns their routes off.
    """
    handle = Routes(service, publish)
    routes = [
        Route("/v1/chat/completions", handle.chat, methods=["POST"]),
        Route("/v1/completions", handle.completions, methods=["POST"]),
        Route("/v1/responses", handle.responses, methods=["POST"]),
        Route("/v1/responses/{rest:path}", handle.no_response, methods=["GET", "POST", "DELETE"]),
        Route("/v1/embeddings", handle.embeddings, methods=["POST"]),
        Route("/v1/score", handle.score, methods=["POST"]),
        Route("/v1/rerank", handle.rerank, methods=["POST"]),
        Route("/v1/models", handle.models),
        Route("/v1/models/{name:path}", handle.model),
        *batch_routes(store, service.config.serving, handle.owner),
        Route("/tokenize", handle.tokenize, methods=["POST"]),
        Route("/detokenize", handle.detokenize, methods=["POST"]),
        Route("/tokenizer_info", handle.tokenizer_info),
        Route("/health", handle.health),
        Route("/metrics", handle.metrics),
        Route("/version", handle.version),
        Route("/openapi.json", handle.openapi),
        *page_routes(),
    ]
    errors = (ApiError, RequestError, EngineError, HTTPException, Exception)
    handlers = {error: handle.refuse for error in errors} | {ClientDisconnected: handle.part}
    app = Starlette(
        routes=routes, exception_handlers=handlers, middleware=[Middleware(AcknowledgeBody)]
    )
    # Proxies may stand between, so only the client knows where to redirect to.
    app.router.redirect_slashes = False
    return app


class Routes:
    """The handlers of all routes."""

    def __init__(self, service: Service, publish: Publish):
        self._service = service
        self._scrapes = SharedScrape(lambda: publish(service.snapshot()))
        self._keys = service.keys
        self._hosts = AllowedHosts(
            service.config.serving.host, service.config.serving.allowed_hosts
        )

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def responses(self, request: Request) -> Response:
        return await self._answer(request, ResponsesRequest)

    async def _answer(self, request: Request, kind: GenerationClass) -> Response:
        client = self._client(request)
        body, size = await self._body(request, kind, client)
        read = self._service.read(body, size, is_typed(request.headers), client)
        generation = await _until_disconnect(request.receive, read)
        if not body.stream:
            return _json(await _until_disconnect(request.receive, self._service.answer(generation)))
        return await _event_stream(request, self._service.events(generation))

    async def no_response(self, request: Request) -> Response:
        self._client(request)
        message = f"{request.scope['path']}: this server keeps no responses. Send the whole conversation as input."
        raise ApiError(404, message, code="responses_not_kept")

    async def models(self, request: Request) -> Response:
        self._client(request)
        listed: Models = {"object": "list", "data": [self._model()]}
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        self._client(request)
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def embeddings(self, request: Request) -> Response:
        client = self._client(request)
        parsed, size = await self._body(request, EmbeddingsRequest, client)
        return _json(
            await _until_disconnect(request.receive, self._service.embeddings(parsed, size, client))
        )

    async def score(self, request: Request) -> Response:
        return await self._scores(request, ScoreRequest)

    async def rerank(self, request: Request) -> Response:
        return await self._scores(request, RerankRequest)

    async def _scores(
        self, request: Request, kind: type[ScoreRequest] | type[RerankRequest]
    ) -> Response:
        client = self._client(request)
        parsed, size = await self._body(request, kind, client)
        answer = answer_scores(self._service, parsed, size, client)
        return _json(await _until_disconnect(request.receive, answer))

    async def tokenize(self, request: Request) -> Response:
        client = self._client(request)
        parsed, size = await self._body(request, TokenizeRequest, client)
        return _json(
            await _until_disconnect(request.receive, self._service.tokenize(parsed, size, client))
        )

    async def detokenize(self, request: Request) -> Response:
        client = self._client(request)
        parsed, size = await self._body(request, DetokenizeRequest, client)
        return _json(
            await _until_disconnect(request.receive, self._service.detokenize(parsed, size, client))
        )

    async def tokenizer_info(self, request: Request) -> Response:
        self._client(request)
        return JSONResponse(self._service.text.info())

    async def health(self, request: Request) -> Response:
        if not self._service.is_alive:
            raise ApiError(503, "this replica's engine has ended", code="engine_dead")
        health: Health = {"status": "ok"}
        return JSONResponse(health)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self._scrapes.text(), media_type=PROMETHEUS)

    async def version(self, request: Request) -> Response:
        version: Version = {"version": __version__}
        return JSONResponse(version)

    async def openapi(self, request: Request) -> Response:
        service = self._service
        return _json(openapi_body(service.config.model_name, service.vocab_size, bool(self._keys)))

    async def refuse(self, request: Request, error: Exception) -> Response:
        headers: Mapping[str, str] = {}
        if isinstance(error, HTTPException):
            headers = error.headers or {}  # which methods a route has
            error = ApiError(
                error.status_code,
                f"{request.method} {request.scope['path']}: {error.detail}",
                code="no_route",
            )
        refusal = api_error(error)
        self._service.meter.refused(refusal.code)
        return JSONResponse(refusal.body(), refusal.status, {**refusal.headers, **headers})

    async def part(self, request: Request, _: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    def owner(self, request: Request) -> str:
        """Return the owner name of a request's files and batches. Raises ApiError for an unknown key."""
        return self._keys.owner(self._client(request))

    def _model(self) -> Model:
        service = self._service
        return {
            "id": service.config.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "eagle-ray",
            "root": service.config.model.target,
            "max_model_len": service.max_model_len,
            "num_spec_tokens": service.num_spec_tokens,
        }

    async def _body(
        self, request: Request, kind: type[BodyClass], client: int
    ) -> tuple[BodyClass, int]:
        """Return the parsed request, and the size of its body in bytes."""
        body = await read_body(request, self._service.config.serving.max_body_bytes)
        return await _until_disconnect(
            request.receive, self._service.parse(kind, body, client)
        ), len(body)

    def _client(self, request: Request) -> int:
        """Return the number of the client's key; 0 if there are no keys.

        Raises ApiError for an unknown key, and without keys for a Host that is not allowed.
        """
        if not self._keys:
            self._check_host(request.headers.get("host"))
            return 0
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip(" \t")  # not \xa0 and \x85, the last bytes of à and Å in UTF-8
        # Clients write ü in either way.
        client = self._keys.find(key.encode(), key.encode("latin-1"))
        if scheme.lower() != "bearer" or client is None:
            raise ApiError(
                401, "give a known API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return client

    def _check_host(self, host: str | None) -> None:
        """Raise ApiError for a host that may be a web page's. Browsers always send the header."""
        if host is not None and host not in self._hosts:
            fix = "Use this machine's own name, add this one to serving.allowed_hosts, or set API keys"
            raise ApiError(
                403, f"Host: {host!r} is not a name of this server. {fix}.", code="other_host"
            )


async def _event_stream(request: Request, events: AsyncGenerator[str, None]) -> Response:
    """Return a streaming response, once its first event is available."""
    try:
        return EventStream(await _until_disconnect(request.receive, anext(events)), events)
    except BaseException:
        # A stream cancelled after its first event would hold its place until it is collected.
        await events.aclose()
        raise


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class EventStream(Response):
    """A response of server-sent events, which ends if the client disconnects.

    Args:
        first: first event, which is available.
        rest: further events.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str, None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._send(send))
        except ClientDisconnected:
            return
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work. If the client disconnects, cancel the work and raise ClientDisconnected."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


CONTENT_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{what} {where}" for what, where in POLICY.items()),
    "Cache-Control": "no-cache",  # kept, but asked for again: a new version is seen at once
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """Return the routes of index.html, its icon, and every file under /page."""
    by_name = {
        file.name: _File(file.name, file.read_bytes())
        for file in files(__package__).joinpath("page").iterdir()
    }
    named = {f"/page/{name}": file for name, file in by_name.items()}
    named |= {"/": by_name["index.html"], "/favicon.ico": by_name["icon.svg"]}
    return [Route(path, file.send) for path, file in named.items()]


class _File:
    """A static file, read once."""

    def __init__(self, name: str, content: bytes):
        self._content, self._kind = content, CONTENT_TYPES[name.rpartition(".")[2]]
        self._headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(self, request: Request) -> Response:
        if self._headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._kind)
