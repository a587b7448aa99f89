"""OpenAI's routes of files and batches, over a BatchStore. ``batch_runner`` runs the batches.

A decorator on each handler holds what the OpenAPI document says about it. A handler that is not a
coroutine function runs in a thread and returns JSON.

    routes = batch_routes(store, config.serving, owner_of)
"""

from __future__ import annotations

import asyncio
import inspect
import reprlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eagle_ray.config.serve import ServingConfig
from eagle_ray.requests.values import Json
from eagle_ray.serve.batches.batch_models import (
    BATCH,
    FILE,
    OVER,
    BatchBody,
    BatchList,
    BatchObject,
    BatchRecord,
    FileDeleted,
    FileList,
    FileObject,
    StoredFile,
    is_id,
)
from eagle_ray.serve.batches.batch_store import BATCHES_PATH_KEY, BatchStore
from eagle_ray.serve.batches.file_store import PURPOSE, FileStore, check_room, receive_upload
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.serve.http.request_body import parse, read_body

OwnerOf = Callable[[Request], str]
"""The owner that a request's API key names. Raises ApiError for an unknown key."""
# By list: the maximum of limit, and its default.
LIST_LIMITS = {
    FILE: (10_000, 10_000),
    BATCH: (100, 20),
}
ORDERS = ("asc", "desc")
MAX_BATCH_BODY_BYTES = 1 << 17  # its metadata has 16 pairs; the event loop parses it
FILES, BATCHES = "/v1/files", "/v1/batches"
UPLOAD: Json = {
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


@dataclass(frozen=True, slots=True)
class Client:
    """An authorized request for files or batches.

    Attributes:
        request: HTTP request.
        store: store of all clients' files and batches.
        owner: name of the client's directory.
        serving: settings of the endpoint.
    """

    request: Request
    store: BatchStore
    owner: str
    serving: ServingConfig

    @property
    def files(self) -> FileStore:
        return self.store.files(self.owner)

    @property
    def id(self) -> str:
        return str(self.request.path_params["id"])

    def file(self) -> StoredFile:
        """Return the file that the URL names: /v1/files/{id}. Raises ApiError if the client has none with this id."""
        return self.files.get(self.id)

    def shown(self, id: str) -> Json:
        """Return a batch as JSON. Raises ApiError if the client has none with this id."""
        record = self.store.get(self.owner, id)
        return record.as_json(self.store.cancelling_at(record))

    def page(self, ids: list[str], prefix: str) -> tuple[list[str], int]:
        """Return the ids that follow in the requested list, and the maximum number to show.

        Raises ApiError for a wrong query parameter.

        Args:
            ids: ids of all objects, oldest first.
            prefix: FILE or BATCH.
        """
        max_limit, usual = LIST_LIMITS[prefix]
        query = self.request.query_params
        limit = query.get("limit", str(usual))
        is_number = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(max_limit))
        if not (is_number and 1 <= int(limit) <= max_limit):
            raise ApiError(
                400,
                f"limit: must be 1 to {max_limit}, got {reprlib.repr(limit)}",
                "limit",
                "bad_value",
            )
        order = query.get("order", "desc")
        if order not in ORDERS:
            raise ApiError(400, f"order: must be asc or desc, got {order!r}", "order", "bad_value")
        after = query.get("after")
        if after is not None and not is_id(after, prefix):
            raise ApiError(
                400, f"after: must be an id of this list, got {after!r}", "after", "bad_value"
            )
        is_descending = order == "desc"
        ordered = sorted(ids, reverse=is_descending)
        return [
            id for id in ordered if after is None or (id < after if is_descending else id > after)
        ], int(limit)


Handler = Callable[[Client], Any]


@dataclass(slots=True)
class BatchOperation:
    """An operation of the OpenAPI document, used as the decorator of its handler.

    Attributes:
        method: HTTP method in lower case.
        path: path of the route.
        summary: description in the document.
        answer: class of the answer; None for bytes.
        statuses: statuses of errors, besides 401, 404, 500 and 503.
        body: class of the body, or the schema of a multipart form; None without a body.
        query: schemas of the query's parameters, by name. None of them is required.
    """

    method: str
    path: str
    summary: str
    answer: type | None
    statuses: tuple[str, ...] = ()
    body: type | Json | None = None
    query: Json = field(default_factory=dict)
    handler: Handler = field(init=False)

    def __call__(self, handler: Handler) -> Handler:
        self.handler = handler
        OPERATIONS.append(self)
        return handler


OPERATIONS: list[BatchOperation] = []


def _page_query(prefix: str) -> Json:
    """Return the schemas of a list's query parameters, which ``Client.page`` reads."""
    max_limit, default = LIST_LIMITS[prefix]
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": max_limit, "default": default},
        "after": {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{27}}$"},
        "order": {"enum": [*ORDERS], "default": "desc"},
    }


def _page(kind: type[FileList | BatchList], items: list[Json], has_more: bool) -> Json:
    page = {
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
    return kind.model_validate(page).model_dump()


@BatchOperation(
    "post",
    FILES,
    "store a file for a batch",
    FileObject,
    ("400", "403", "408", "413", "415"),
    UPLOAD,
)
async def _upload(client: Client) -> Response:
    _check_origin(client.request)
    file = await receive_upload(client.request, client.files, client.serving.batches)
    return JSONResponse(file.as_json())


@BatchOperation(
    "get",
    FILES,
    "the files, newest first",
    FileList,
    ("400",),
    query=_page_query(FILE) | {"purpose": {"type": "string"}},
)
def _files(client: Client) -> Json:
    ids, limit = client.page(client.files.ids(), FILE)
    purpose = client.request.query_params.get("purpose")
    shown: list[Json] = []
    for id in ids:
        try:
            file = client.files.get(id)
        except ApiError:  # it has expired, or was deleted meanwhile
            continue
        if purpose is None or file.purpose == purpose:
            shown.append(file.as_json())
        if len(shown) > limit:
            break
    return _page(FileList, shown[:limit], len(shown) > limit)


@BatchOperation("get", FILES + "/{id}", "a file's description", FileObject)
def _file(client: Client) -> Json:
    return client.file().as_json()


@BatchOperation("delete", FILES + "/{id}", "delete a file", FileDeleted, ("409",))
def _delete(client: Client) -> Json:
    file = client.file()
    for _, id in client.store.open_ids(client.owner):
        user = client.store.find(client.owner, id)
        if user is not None and user.input_file_id == file.id:
            message = (
                f"{file.id} is the input of {id}, which is not over. Wait for it, or cancel it."
            )
            raise ApiError(409, message, "file_id", "file_in_use")
    client.files.delete(file.id)
    return FileDeleted(id=file.id).model_dump()


@BatchOperation("get", FILES + "/{id}/content", "a file's bytes", None)
async def _content(client: Client) -> Response:
    file = await asyncio.to_thread(client.file)
    parts = _in_thread(client.files.read(file))
    headers = {"Content-Length": str(file.bytes)}
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


@BatchOperation(
    "post",
    BATCHES,
    "answer every line of a file",
    BatchObject,
    ("400", "408", "413", "415", "429"),
    BatchBody,
)
async def _create(client: Client) -> Response:
    max_limit = min(MAX_BATCH_BODY_BYTES, client.serving.max_body_bytes)
    body = parse(BatchBody, await read_body(client.request, max_limit))
    record = await asyncio.to_thread(_created, client, body)
    return JSONResponse(record.as_json())


def _created(client: Client, body: BatchBody) -> BatchRecord:
    """Return a new batch. Raises ApiError if the file cannot be its input, or if the client is at a limit."""
    id, limits = body.input_file_id, client.serving.batches
    try:
        file = client.files.get(id)
    except ApiError:
        message = f"input_file_id: there is no file {id!r} of this API key. Upload it first."
        raise ApiError(400, message, "input_file_id", "file_not_found") from None
    if file.purpose != PURPOSE:
        message = f"input_file_id: {id} has the purpose {file.purpose!r}. Upload the file with purpose {PURPOSE!r}."
        raise ApiError(400, message, "input_file_id", "bad_value")
    check_room(client.files, limits)
    record = body.record(client.owner)
    client.store.create(record, limits.max_open)
    return record


@BatchOperation(
    "get", BATCHES, "the batches, newest first", BatchList, ("400",), query=_page_query(BATCH)
)
def _batches(client: Client) -> Json:
    ids, limit = client.page(client.store.ids(client.owner), BATCH)
    return _page(BatchList, [client.shown(id) for id in ids[:limit]], len(ids) > limit)


@BatchOperation("get", BATCHES + "/{id}", "a batch", BatchObject)
def _batch(client: Client) -> Json:
    return client.shown(client.id)


@BatchOperation(
    "post",
    BATCHES + "/{id}/cancel",
    f"end a batch that is not {', '.join(OVER)}",
    BatchObject,
    ("403", "409"),
)
def _cancel(client: Client) -> Json:
    _check_origin(client.request)
    record = client.store.get(client.owner, client.id)
    if record.is_over:
        message = f"{record.id} is {record.status}: only a batch that is not over can be cancelled."
        raise ApiError(409, message, "batch_id")
    return record.as_json(client.store.cancel(record))


def batch_routes(
    store: BatchStore | None, serving: ServingConfig, owner_of: OwnerOf
) -> list[Route]:
    """Return the routes.

    Args:
        store: store of files and batches. If it is None, every route answers that none are kept.
        serving: settings of the endpoint.
        owner_of: function that returns the owner of a request.
    """

    def client_of(request: Request) -> Client:
        """Return the client of a request. Raises ApiError for an unknown key."""
        owner = owner_of(request)
        if store is None:
            path = request.scope["path"]
            message = f"{path}: this endpoint keeps no files and runs no batches. Start it with {BATCHES_PATH_KEY}."
            raise ApiError(404, message, code="batches_off")
        return Client(request, store, owner, serving)

    async def handle(handlers: dict[str, Handler], request: Request) -> Response:
        handler, client = (
            handlers["GET" if request.method == "HEAD" else request.method],
            client_of(request),
        )
        if inspect.iscoroutinefunction(handler):
            return await handler(client)
        return JSONResponse(await asyncio.to_thread(handler, client))

    by_path: dict[str, dict[str, Handler]] = {}
    for each in OPERATIONS:
        by_path.setdefault(each.path, {})[each.method.upper()] = each.handler
    # one route with a handler for each method, so that a refusal names all of them (Allow)
    return [
        Route(path, partial(handle, handlers), methods=[*handlers])
        for path, handlers in by_path.items()
    ]


def _check_origin(request: Request) -> None:
    """Raise ApiError for a web page of another server.

    Browsers send forms and empty posts to other servers without asking first.
    """
    origin = request.headers.get("origin")
    try:
        netloc = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        message = f"Origin: {reprlib.repr(origin)} is not an origin. Send scheme://host:port, or leave it out."
        raise ApiError(400, message, code="bad_origin") from None
    if origin is not None and netloc != request.headers.get("host"):
        raise ApiError(403, f"a page of {origin!r} cannot use this server", code="other_origin")


async def _in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the items of a blocking iterator without blocking the event loop."""
    while part := await asyncio.to_thread(partial(next, parts, b"")):
        yield part
