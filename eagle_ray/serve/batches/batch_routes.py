"""The routes of files and batches: OpenAI's, over a BatchStore. Batches are run elsewhere (``batch_runner``).

routes = BatchRoutes(store, config.serving, client_of, owner_of).routes()
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eagle_ray.config.serve import ServingConfig
from eagle_ray.serve.batches.batch_body import BatchBody
from eagle_ray.serve.batches.batch_models import (
    BATCH,
    FILE,
    OVER,
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
    StoredFile,
    is_id,
)
from eagle_ray.serve.batches.batch_store import KEY, BatchStore
from eagle_ray.serve.batches.file_store import FileStore
from eagle_ray.serve.batches.file_upload import PURPOSE, check_room, receive_upload
from eagle_ray.serve.http_errors import ApiError
from eagle_ray.serve.parse import parse, read_body

OwnerOf = Callable[[Request], str]
"""The owner that a request's API key names. Raises ApiError for an unknown key."""
Handler = Callable[[Request], Awaitable[Response]]
LIST_LIMITS = {FILE: (10_000, 10_000), BATCH: (100, 20)}  # of each list: the most that limit may be, and its default
ORDERS = ("asc", "desc")
MAX_BATCH_BODY_BYTES = 1 << 17  # its metadata has 16 pairs; the event loop parses it


@dataclass(frozen=True, slots=True)
class BatchOperation:
    """An operation of the OpenAPI document.

    Attributes:
        handler: a method of BatchRoutes.
        answer: None for bytes.
        body: a request model, or a schema of a multipart form.
        statuses: of its refusals, besides 401, 404, 500 and 503.
        query: the schemas of its query's parameters, by name; none is required.
    """

    handler: Callable[[BatchRoutes, Request], Awaitable[Response]]
    path: str
    method: str
    summary: str
    answer: type | None
    body: type | dict[str, Any] | None = None
    statuses: tuple[str, ...] = ()
    query: dict[str, dict[str, Any]] = field(default_factory=dict)


class BatchRoutes:
    """Handlers. store: None if the endpoint keeps no files; then every route says so."""

    def __init__(self, store: BatchStore | None, serving: ServingConfig, owner_of: OwnerOf):
        self._store, self._serving, self._owner_of = store, serving, owner_of

    def routes(self) -> list[Route]:
        handlers: dict[str, dict[str, Handler]] = {}
        for each in OPERATIONS:
            handlers.setdefault(each.path, {})[each.method.upper()] = partial(each.handler, self)
        return [_route(path, **of_path) for path, of_path in handlers.items()]

    async def upload(self, request: Request) -> Response:
        _, owner = self._enter(request)
        _check_origin(request)
        file = await receive_upload(request, self._files(owner), self._serving.batches)
        return JSONResponse(file.as_json())

    async def files(self, request: Request) -> Response:
        _, owner = self._enter(request)
        store, purpose = self._files(owner), request.query_params.get("purpose")
        return JSONResponse(await asyncio.to_thread(_list_files, store, dict(request.query_params), purpose))

    async def file(self, request: Request) -> Response:
        return JSONResponse((await self._file(request)).as_json())

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        parts = _in_thread(self._files(self._owner_of(request)).read(file))
        headers = {"Content-Length": str(file.bytes)}
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        store, owner = self._enter(request)
        file = await self._file(request)
        if user := await asyncio.to_thread(_user_of, store, owner, file.id):
            message = f"{file.id} is the input of {user}, which is not over. Wait for it, or cancel it."
            raise ApiError(409, message, "file_id", "file_in_use")
        await asyncio.to_thread(self._files(owner).delete, file.id)
        return JSONResponse(FileDeleted(id=file.id).model_dump())

    async def create(self, request: Request) -> Response:
        store, owner = self._enter(request)
        body = parse(BatchBody, await read_body(request, min(MAX_BATCH_BODY_BYTES, self._serving.max_body_bytes)))
        await asyncio.to_thread(self._check_input, owner, body.input_file_id)
        limits = self._serving.batches
        await asyncio.to_thread(check_room, self._files(owner), limits)
        record = body.record(owner)
        await asyncio.to_thread(store.create, record, limits.max_open)
        return JSONResponse(record.as_json())

    async def batches(self, request: Request) -> Response:
        store, owner = self._enter(request)
        return JSONResponse(await asyncio.to_thread(_list_batches, store, owner, dict(request.query_params)))

    async def batch(self, request: Request) -> Response:
        store, owner = self._enter(request)
        return JSONResponse(await asyncio.to_thread(_shown, store, owner, request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        store, owner = self._enter(request)
        _check_origin(request)
        return JSONResponse(await asyncio.to_thread(_cancelled, store, owner, request.path_params["id"]))

    def _enter(self, request: Request) -> tuple[BatchStore, str]:
        """Check the API key; return the store and the key's owner. Raises ApiError."""
        owner = self._owner_of(request)
        if self._store is None:
            message = f"{request.scope['path']}: this endpoint keeps no files and runs no batches. Start it with {KEY}."
            raise ApiError(404, message, code="batches_off")
        return self._store, owner

    def _files(self, owner: str) -> FileStore:
        assert self._store is not None
        return self._store.files(owner)

    async def _file(self, request: Request) -> StoredFile:
        store, owner = self._enter(request)
        return await asyncio.to_thread(store.files(owner).get, request.path_params["id"])

    def _check_input(self, owner: str, id: str) -> None:
        """Raise ApiError if the file cannot be a batch's input."""
        try:
            file = self._files(owner).get(id)
        except ApiError:
            message = f"input_file_id: there is no file {id!r} of this API key. Upload it first."
            raise ApiError(400, message, "input_file_id", "file_not_found") from None
        if file.purpose != PURPOSE:
            message = f"input_file_id: {id} has the purpose {file.purpose!r}. Upload the file with purpose {PURPOSE!r}."
            raise ApiError(400, message, "input_file_id", "bad_value")


def _route(path: str, **handlers: Handler) -> Route:
    """Return one route with a handler for each method, so that a refusal names all of them (Allow)."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, handle, methods=[*handlers])


def _ids_of(ids: list[str], query: dict[str, str], prefix: str) -> tuple[list[str], int]:
    """Return the ids that a list may show, in its order, and how many it shows at most.

    ids: oldest first. Raises ApiError for a wrong parameter.
    """
    most, usual = LIST_LIMITS[prefix]
    limit = query.get("limit", str(usual))
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(most))
    if not (is_number and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit: must be 1 to {most}, got {reprlib.repr(limit)}", "limit", "bad_value")
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise ApiError(400, f"order: must be asc or desc, got {order!r}", "order", "bad_value")
    after = query.get("after")
    if after is not None and not is_id(after, prefix):
        raise ApiError(400, f"after: must be an id of this list, got {after!r}", "after", "bad_value")
    ordered = sorted(ids, reverse=order == "desc")
    if after is not None:
        ordered = [id for id in ordered if (id < after if order == "desc" else id > after)]
    return ordered, int(limit)


def _page(kind: type[FileList | BatchList], items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return kind(data=items, has_more=has_more, **ends).model_dump()


def _list_files(store: FileStore, query: dict[str, str], purpose: str | None) -> dict[str, Any]:
    ids, limit = _ids_of(store.ids(), query, FILE)
    found: list[dict[str, Any]] = []
    for id in ids:
        try:
            file = store.get(id)
        except ApiError:  # it has expired, or was deleted meanwhile
            continue
        if purpose is None or file.purpose == purpose:
            found.append(file.as_json())
        if len(found) > limit:
            break
    return _page(FileList, found[:limit], len(found) > limit)


def _list_batches(store: BatchStore, owner: str, query: dict[str, str]) -> dict[str, Any]:
    ids, limit = _ids_of(store.ids(owner), query, BATCH)
    return _page(BatchList, [_shown(store, owner, id) for id in ids[:limit]], len(ids) > limit)


def _shown(store: BatchStore, owner: str, id: str) -> dict[str, Any]:
    record = store.get(owner, id)
    return record.as_json(store.cancelling_at(record))


def _cancelled(store: BatchStore, owner: str, id: str) -> dict[str, Any]:
    record = store.get(owner, id)
    if record.is_over:
        raise ApiError(409, f"{id} is {record.status}: only a batch that is not over can be cancelled.", "batch_id")
    return record.as_json(store.cancel(record))


def _user_of(store: BatchStore, owner: str, file_id: str) -> str | None:
    """Return the id of a batch that reads the file, or None."""
    for _, id in store.open_ids(owner):
        record = store.find(owner, id)
        if record is not None and record.input_file_id == file_id:
            return id
    return None


def _check_origin(request: Request) -> None:
    """Raise ApiError for a web page of another server: browsers send it forms and empty posts without asking first."""
    origin = request.headers.get("origin")
    try:
        netloc = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        message = f"Origin: {reprlib.repr(origin)} is not an origin. Send scheme://host:port, or leave it out."
        raise ApiError(400, message, code="bad_origin") from None
    if origin is not None and netloc != request.headers.get("host"):
        raise ApiError(403, f"a page of {origin!r} cannot use this server", code="other_origin")


async def _in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what a blocking iterator yields, without blocking the event loop."""
    while part := await asyncio.to_thread(partial(next, parts, b"")):
        yield part


def _page_query(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of a list of ids with this prefix (``_ids_of`` reads them)."""
    most, default = LIST_LIMITS[prefix]
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        "after": {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{27}}$"},
        "order": {"enum": [*ORDERS], "default": "desc"},
    }


UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "additionalProperties": False,
}
ONE_FILE, ONE_BATCH = "/v1/files/{id}", "/v1/batches/{id}"
OPERATIONS = (
    BatchOperation(
        BatchRoutes.upload,
        "/v1/files",
        "post",
        "store a file for a batch",
        FileObject,
        UPLOAD,
        ("400", "403", "408", "413", "415"),
    ),
    BatchOperation(
        BatchRoutes.files,
        "/v1/files",
        "get",
        "the files, newest first",
        FileList,
        None,
        ("400",),
        _page_query(FILE) | {"purpose": {"type": "string"}},
    ),
    BatchOperation(BatchRoutes.file, ONE_FILE, "get", "a file's description", FileObject),
    BatchOperation(BatchRoutes.delete, ONE_FILE, "delete", "delete a file", FileDeleted, None, ("409",)),
    BatchOperation(BatchRoutes.content, f"{ONE_FILE}/content", "get", "a file's bytes", None),
    BatchOperation(
        BatchRoutes.create,
        "/v1/batches",
        "post",
        "answer every line of a file",
        BatchObject,
        BatchBody,
        ("400", "408", "413", "415", "429"),
    ),
    BatchOperation(
        BatchRoutes.batches,
        "/v1/batches",
        "get",
        "the batches, newest first",
        BatchList,
        None,
        ("400",),
        _page_query(BATCH),
    ),
    BatchOperation(BatchRoutes.batch, ONE_BATCH, "get", "a batch", BatchObject),
    BatchOperation(
        BatchRoutes.cancel,
        f"{ONE_BATCH}/cancel",
        "post",
        f"end a batch that is not {', '.join(OVER)}",
        BatchObject,
        None,
        ("403", "409"),
    ),
)
