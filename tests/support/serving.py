"""A client that talks to an ASGI application in this process, as a server would: it may read slowly, or leave.

answer = await post(app, "/v1/completions", {"prompt": "Hi"})
answer.status, answer.json["choices"]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return [parsed(part) for part in self.body.decode().split("\n\n") if part]


@dataclass
class Exchange:
    """One request: what has been sent and what came back so far."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    parts: asyncio.Queue = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


def parsed(event: str) -> Any:
    assert event.startswith("data: ")
    data = event.removeprefix("data: ").strip()
    return data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def exchange(
    app: Any, method: str, path: str, body: bytes | list[bytes] = b"", headers: dict[str, str] | None = None
) -> AsyncIterator[Exchange]:
    """Leaves when the block ends. body: in one part or in several."""
    talk, bodies = Exchange(), list(body) if isinstance(body, list) else [body]
    path, _, query = path.partition("?")
    talk.reads.set()

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(0), "more_body": bool(bodies)}
        await talk.left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            talk.status = message["status"]
            talk.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            talk.started.set()
            return
        await talk.reads.wait()
        talk.parts.put_nowait(message["body"])
        if not message.get("more_body"):
            talk.parts.put_nowait(None)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        yield talk
    finally:
        talk.left.set()
        talk.reads.set()
        await task


async def request(app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    async with exchange(app, method, path, body, headers) as talk:
        parts = []
        while (part := await talk.parts.get()) is not None:
            parts.append(part)
    return Answer(talk.status, talk.headers, b"".join(parts))


async def post(app: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    return await request(app, "POST", path, json.dumps(body).encode(), headers)


async def get(app: Any, path: str, headers: dict[str, str] | None = None) -> Answer:
    return await request(app, "GET", path, headers=headers)
