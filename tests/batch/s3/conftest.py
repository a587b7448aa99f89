"""A real HTTP S3 server (moto's) on this machine, a bucket of its own for every test, and a proxy that fails."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from eagle_ray.runs import lease as lock
from eagle_ray.storage import s3
from tests.support.s3 import FaultProxy


@pytest.fixture(scope="session")
def one_proxy(s3_server) -> Iterator[FaultProxy]:
    """One for all tests: a new endpoint costs a new session with it, and that a second."""
    address = urlsplit(s3_server)
    with FaultProxy(address.hostname, address.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy, monkeypatch) -> Iterator[FaultProxy]:
    """Between this process and the server; tries follow each other at once."""
    monkeypatch.setattr(s3, "WAITS_S", (0.01,) * len(s3.WAITS_S))
    monkeypatch.setenv("AWS_ENDPOINT_URL", one_proxy.url)
    yield one_proxy
    one_proxy.reset()


@pytest.fixture(autouse=True)
def quick_lease(monkeypatch) -> Iterator[None]:
    """A second driver sees the first one alive sooner, and leases that a test leaves are given back.

    A killed driver's lease is left in its threads, which would go on to ask the next test's server.
    """
    made: list[lock.BucketLease] = []

    class KnownLease(lock.BucketLease):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(lock, "BucketLease", KnownLease)
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(lock, "LEASE_POLL_S", 0.2)
    yield
    for lease in made:
        lease.release()
