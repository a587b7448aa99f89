"""A real HTTP S3 server (moto's) on this machine, a bucket of its own for every test, and a proxy that fails on demand.

The proxy forwards what it gets and notes every request; a fault takes the place of the next
answers.

    with FaultProxy("127.0.0.1", 5000) as proxy:
        proxy.fail("PUT", RefusedRequest(503, "SlowDown"), times=2)
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow.fs
import pytest

from eagle_ray.storage.path import StoragePath

CHUNK = 16 << 10


@dataclass(frozen=True)
class RefusedRequest:
    """Answer with this status and S3 error code; the server never hears of the request."""

    status: int
    code: str

    def __call__(self, handler: Handler, body: bytes) -> None:
        text = f"<Error><Code>{self.code}</Code><Message>injected</Message></Error>".encode()
        handler.answer(self.status, [("Content-Type", "application/xml")], text)


class UnansweredRequest:
    def __call__(self, handler: Handler, body: bytes) -> None:
        handler.server.closing.wait()
        handler.drop()


class LostAnswer:
    """The server does what was asked; the client never hears of it."""

    def __call__(self, handler: Handler, body: bytes) -> None:
        handler.forward(body)
        handler.drop()


class IgnoredConditions:
    """As servers do that do not know them."""

    def __call__(self, handler: Handler, body: bytes) -> None:
        del handler.headers["If-None-Match"]
        handler.answer(*handler.forward(body))


class DroppedConnection:
    """Half of the body reaches the server, then both connections are gone."""

    def __call__(self, handler: Handler, body: bytes) -> None:
        with socket.create_connection(handler.server.upstream) as upstream:
            head = "".join(f"{name}: {value}\r\n" for name, value in handler.headers.items())
            upstream.sendall(f"{handler.command} {handler.path} HTTP/1.1\r\n{head}\r\n".encode())
            upstream.sendall(body[: len(body) // 2])
        handler.drop()


@dataclass(frozen=True)
class SlowAnswer:
    """The server's answer, slowly. chunk_s: seconds for each CHUNK bytes of the body."""

    chunk_s: float

    def __call__(self, handler: Handler, body: bytes) -> None:
        status, headers, answer = handler.forward(body)
        handler.answer(status, headers, answer, self.chunk_s)


class TruncatedAnswer:
    """Half of the server's answer."""

    def __call__(self, handler: Handler, body: bytes) -> None:
        status, headers, answer = handler.forward(body)
        handler.answer(status, headers, answer, stop=len(answer) // 2)
        handler.drop()


@dataclass
class PlannedFault:
    method: str
    path: re.Pattern
    fault: object
    times: int


@dataclass
class SeenRequest:
    """One request as it came in. sent: bytes of body that were answered."""

    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0


class FaultProxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.closing = (host, port), threading.Event()
        self.seen: list[SeenRequest] = []
        self._planned: list[PlannedFault] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reset(self) -> None:
        """Forget what was seen and planned, and let go of whom nobody answered."""
        self.closing.set()
        with self._lock:
            self.closing, self.seen, self._planned = threading.Event(), [], []

    def fail(self, method: str, fault: object, times: int = 1, path: str = "") -> None:
        """The next requests with this method, and a path in which this pattern is found, meet the fault."""
        with self._lock:
            self._planned.append(PlannedFault(method, re.compile(path), fault, times))

    def fault_for(self, method: str, path: str) -> object | None:
        with self._lock:
            for planned in self._planned:
                if planned.times and planned.method == method and planned.path.search(path):
                    planned.times -= 1
                    return planned.fault
        return None

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client: object) -> None:
        """Connections break here on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def do_any(self) -> None:
        self.seen = SeenRequest(self.command, self.path, dict(self.headers.items()))
        self.server.seen.append(self.seen)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault_for(self.command, self.path)
        if fault is not None:
            fault(self, body)
        else:
            self.answer(*self.forward(body))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_any

    def forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        chunk_s: float = 0.0,
        stop: int | None = None,
    ) -> None:
        given = dict((name.lower(), value) for name, value in headers)
        length = (
            given.get("content-length", str(len(body)))
            if self.command == "HEAD"
            else str(len(body))
        )
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        for start in range(0, len(body[:stop]), CHUNK):
            self.wfile.write(body[:stop][start : start + CHUNK])
            self.wfile.flush()
            self.seen.sent += CHUNK
            time.sleep(chunk_s)

    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def check_creates_and_replaces(directory: StoragePath) -> StoragePath:
    """The law of both halves; returns the file, which holds b"second"."""
    file = directory / "deep" / "a"
    first = file.create(b"first")
    assert first == file.stat() and file.create(b"second") is None and file.read_bytes() == b"first"
    second = file.replace(b"second", first.version)
    assert second == file.stat() and file.replace(b"third", first.version) is None
    assert file.read_bytes() == b"second" and file.read_with_version() == (b"second", second)
    assert (directory / "none").replace(b"x", second.version) is None
    return file


STARTED: set[str] = (
    set()
)  # URLs of servers: each folder that imports the fixture has one of its own


@pytest.fixture(scope="session")
def s3_server(s3_endpoint) -> Iterator[str]:
    """Its URL, the one in the environment. Folders that import this fixture share the server of the first one."""
    if s3_endpoint in STARTED:
        yield s3_endpoint
        return
    from botocore import loaders
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Dispatcher
    from moto.server import ThreadedMotoServer

    address = urlsplit(s3_endpoint)
    server = ThreadedMotoServer(address.hostname, address.port, verbose=False)
    server.start()
    STARTED.add(s3_endpoint)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a new client costs 20 ms, not 150: it parses no description of S3
        patch.setattr(loaders, "create_loader", cache(loaders.create_loader))
        patch.setattr(
            Dispatcher, "get_backend_for_host", cache(Dispatcher.get_backend_for_host)
        )  # looks into folders
        yield s3_endpoint
    server.stop()


@pytest.fixture(scope="session")
def outside(s3_server) -> pyarrow.fs.S3FileSystem:
    """Another library's view of the server."""
    return pyarrow.fs.S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        endpoint_override=s3_server.removeprefix("http://"),
        scheme="http",
        allow_bucket_creation=True,
    )


@pytest.fixture
def bucket(outside) -> StoragePath:
    name = f"test-{uuid4().hex[:12]}"
    outside.create_dir(name)
    found = StoragePath.of(f"s3://{name}")
    assert not found.is_directory()  # and the session is made, before a test counts seconds
    return found
