"""The lock in a bucket: one driver at a time, taken over from the dead and never from the living."""

import json
import logging
import threading
import time

import pytest

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs import lease as lock
from eagle_ray.runs.job_errors import (
    FencedError,
    OutputDamaged,
    OutputLocked,
    StorageUnavailable,
    outcome_of,
)
from eagle_ray.runs.lease import LOCK, Lease
from eagle_ray.storage import s3
from tests.support.s3 import IgnoredConditions, RefusedRequest


@pytest.fixture(autouse=True)
def short_lease_times(monkeypatch, quick_lease):
    for name, seconds in {
        "LEASE_S": 3.5,
        "HEARTBEAT_S": 0.5,
        "SELF_FENCE_S": 3.0,
        "LEASE_POLL_S": 0.2,
    }.items():
        monkeypatch.setattr(lock, name, seconds)
    with (
        interruptible()
    ):  # as a driver is, also where these tests run in the background, which ignores SIGINT
        yield


DEAD = b'{"holder": "process 1 on gone", "token": "x", "beat": 7}'  # and never beats again


def holder(output):
    return json.loads((output / LOCK).read_bytes())["holder"]


def test_second_driver_is_refused_until_the_first_releases_lease(bucket):
    with hold_output(bucket):
        name = holder(bucket)
        with (
            pytest.raises(OutputLocked, match=f"{bucket} is being written by {name}"),
            hold_output(bucket),
        ):
            pass
    assert holder(bucket) is None
    with hold_output(bucket):
        assert holder(bucket) == name


def test_a_silent_holder_is_taken_over_once_its_lease_is_stale(bucket, messages):
    logging.getLogger("eagle_ray").setLevel(logging.INFO)
    (bucket / LOCK).write_atomic(DEAD)
    began = time.monotonic()
    with hold_output(bucket):
        assert time.monotonic() - began >= lock.LEASE_S
    own = [
        message
        for message in messages
        if message.startswith(f"{bucket}:") or message.startswith(f"{bucket} ")
    ]
    said = dict.fromkeys(message.split(": ")[-1] for message in own)
    assert list(said) == ["waiting 4 s for a sign of life", "taken over"]


def test_of_two_that_wait_for_a_dead_holder_one_gets_the_lease(bucket):
    (bucket / LOCK).write_atomic(DEAD)
    outcomes = []

    def wait() -> None:
        try:
            Lease.of(bucket).take()
            outcomes.append("taken")
        except OutputLocked:
            outcomes.append("busy")

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["busy", "busy", "taken"]


def test_a_driver_whose_lease_was_taken_over_stops(bucket):
    with (
        pytest.raises(FencedError, match=r"somebody else has taken .* over: this driver stops"),
        hold_output(bucket),
    ):
        (bucket / LOCK).write_atomic(b'{"holder": "somebody else", "token": "x", "beat": 1}')
        time.sleep(30)
    assert holder(bucket) == "somebody else"


def break_storage(proxy, times=100_000):
    for method in ("PUT", "GET", "HEAD"):
        proxy.fail(method, RefusedRequest(503, "SlowDown"), times)


def test_driver_publishes_nothing_until_its_storage_is_back(bucket, proxy):
    with hold_output(bucket) as lease:
        lease.check()
        break_storage(proxy)
        publishing = threading.Thread(target=lease.check, daemon=True)
        time.sleep(lock.SELF_FENCE_S + 2 * lock.LEASE_POLL_S)
        publishing.start()
        publishing.join(2.0)
        assert publishing.is_alive()  # in doubt: it waits
        proxy.reset()
        publishing.join(60)
        assert not publishing.is_alive()
        lease.check()
    assert holder(bucket) is None


def test_driver_overtaken_in_an_outage_stops_before_publishing(bucket, proxy):
    with (
        pytest.raises(FencedError, match=r"process 9 on elsewhere has taken .* over"),
        hold_output(bucket) as lease,
    ):
        break_storage(proxy)
        time.sleep(lock.SELF_FENCE_S + 2 * lock.LEASE_POLL_S)
        proxy.reset()
        proxy.fail(
            "PUT", RefusedRequest(503, "SlowDown"), 100_000, path=LOCK
        )  # it can read again, and not yet write
        write_past_proxy(
            bucket / LOCK, b'{"holder": "process 9 on elsewhere", "token": "y", "beat": 1}', proxy
        )
        lease.check()
        time.sleep(30)
    assert holder(bucket) == "process 9 on elsewhere"


def write_past_proxy(file, data, proxy):
    """Write past the proxy, as another driver on another network does."""
    bucket, key = s3.split_url(str(file))
    host, port = proxy.upstream
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.put_object(Bucket=bucket, Key=key, Body=data)


def test_driver_ends_with_a_transient_error_after_a_long_outage(bucket, proxy, monkeypatch):
    monkeypatch.setattr(lock, "OUTAGE_S", 5.0)
    says = r"_lock could not be written for 5 s: this driver stops"
    with pytest.raises(StorageUnavailable, match=says) as stopped, hold_output(bucket):
        break_storage(proxy)
        time.sleep(60)
    assert outcome_of(stopped.value).code == 5


def test_a_lease_that_was_deleted_ends_its_driver(bucket):
    with pytest.raises(OutputDamaged, match="_lock was deleted"), hold_output(bucket):
        (bucket / LOCK).remove()
        time.sleep(60)


def test_a_bucket_that_is_gone_for_a_moment_is_no_deleted_lease(bucket, proxy):
    with hold_output(bucket) as lease:
        proxy.fail("GET", RefusedRequest(404, "NoSuchBucket"), 2, path=LOCK)
        before = len(proxy.seen)
        while sum(request.method == "GET" for request in proxy.seen[before:]) < 4:
            time.sleep(0.05)
        lease.check()
    assert holder(bucket) is None


def test_a_late_put_of_a_dead_driver_is_no_sign_of_life(bucket):
    (bucket / LOCK).write_atomic(DEAD)
    late = threading.Timer(1.0, (bucket / LOCK).write_atomic, [DEAD.replace(b"7", b"8")])
    late.start()
    began = time.monotonic()
    with hold_output(bucket):
        assert time.monotonic() - began >= 1.0 + lock.LEASE_S  # the clock began anew


def test_a_server_that_ignores_conditions_is_refused(bucket, proxy):
    proxy.fail("PUT", IgnoredConditions(), 100)
    says = f"{bucket} at {proxy.url}: the server ignores If-None-Match"
    with pytest.raises(ConfigError, match=says), hold_output(bucket):
        pass
    assert bucket.list_versions() == {}


def test_a_few_failed_beats_are_survived(bucket, proxy):
    with hold_output(bucket):
        proxy.fail("PUT", RefusedRequest(500, "InternalError"), 5, path=LOCK)
        time.sleep(lock.SELF_FENCE_S + 1)
    assert holder(bucket) is None
