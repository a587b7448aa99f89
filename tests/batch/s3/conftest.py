"""A real HTTP S3 server (moto's) on this machine, a bucket of its own for every test, and a proxy that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow.fs
import pytest

from eagle_ray.runs import lease as lock
from eagle_ray.storage import s3
from eagle_ray.storage.path import StoragePath
from tests.support.s3 import FaultProxy

STARTED: set[str] = set()  # URLs of servers: each folder that imports the fixture has one of its own


@pytest.fixture(scope="session")
def s3_server(s3_endpoint) -> Iterator[str]:
    """Its URL, the one in the environment. Folders that import this fixture share the server of the first one."""
    if s3_endpoint in STARTED:
        yield s3_endpoint
        return
    from moto.server import ThreadedMotoServer

    address = urlsplit(s3_endpoint)
    server = ThreadedMotoServer(address.hostname, address.port, verbose=False)
    server.start()
    STARTED.add(s3_endpoint)
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


@pytest.fixture(scope="session")
def one_proxy(s3_server) -> Iterator[FaultProxy]:
    """One for all tests: a new endpoint costs a new session with it, and that a second."""
    address = urlsplit(s3_server)
    with FaultProxy(address.hostname, address.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy, monkeypatch) -> Iterator[FaultProxy]:
    """Between this process and the server; tries follow each other at once, and an answer is late after a second."""
    monkeypatch.setattr(s3, "WAITS_S", (0.01,) * len(s3.WAITS_S))
    monkeypatch.setattr(s3, "READ_S", 1.0)
    monkeypatch.setattr(s3, "CONNECT_S", 1.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", one_proxy.url)
    yield one_proxy
    one_proxy.reset()


@pytest.fixture(autouse=True)
def quick_lease(monkeypatch) -> None:
    """A second driver sees the first one alive sooner."""
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(lock, "POLL_S", 0.2)
