"""Storage that fails: what passes is tried again, what does not ends in one line and in time."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from eagle_ray.cli.main import main
from eagle_ray.runs.job_errors import outcome_of
from eagle_ray.storage import retries, s3
from eagle_ray.storage.path import StoragePath, read_json
from eagle_ray.storage.retries import EXTENDED_WAITS_S, extended_retries
from eagle_ray.storage.s3 import WAITS_S
from eagle_ray.storage.store import NotAllowed, StorageError, StorageTimeout
from tests.support.s3 import (
    DroppedConnection,
    LostAnswer,
    RefusedRequest,
    SlowAnswer,
    TruncatedAnswer,
    UnansweredRequest,
)

TRIES = len(s3.WAITS_S) + 1
SLOW_DOWN, BROKEN = RefusedRequest(503, "SlowDown"), RefusedRequest(500, "InternalError")
DATA = b"0123456789" * 20_000


@pytest.mark.parametrize(
    "fault",
    [SLOW_DOWN, BROKEN, DroppedConnection(), LostAnswer(), RefusedRequest(429, "TooManyRequests")],
)
def test_a_write_that_fails_a_few_times_is_made(bucket, proxy, fault):
    proxy.fail("PUT", fault, TRIES - 1)
    assert (bucket / "a").write_atomic(DATA).size == len(DATA)
    assert (bucket / "a").read_bytes() == DATA


@pytest.mark.parametrize(
    "fault", [SLOW_DOWN, BROKEN, TruncatedAnswer(), LostAnswer(), SlowAnswer(0.02)]
)
def test_a_read_that_fails_a_few_times_is_made(bucket, proxy, fault):
    (bucket / "a").write_atomic(DATA)
    proxy.fail("GET", fault, TRIES - 1)
    assert (bucket / "a").read_bytes() == DATA


@pytest.mark.parametrize("fault", [SLOW_DOWN, BROKEN])
def test_the_tries_are_counted_and_the_error_says_where(bucket, proxy, fault):
    proxy.fail("PUT", fault, 100)
    with pytest.raises(
        StorageError, match=f"{bucket}/a at {proxy.url}: {fault.code} injected"
    ) as error:
        (bucket / "a").write_atomic(DATA)
    assert len(proxy.seen) == TRIES and "\n" not in str(error.value)


def test_a_job_outlasts_more_failures_than_a_command(bucket, proxy, monkeypatch):
    monkeypatch.setattr(retries, "EXTENDED_WAITS_S", (0.01, 0.01))
    proxy.fail("PUT", SLOW_DOWN, TRIES + 1)
    with extended_retries():
        (bucket / "a").write_atomic(DATA)
    assert len(proxy.seen) == TRIES + 2
    assert sum(s3.WAITS_S) < 20 < 60 < sum((*WAITS_S, *EXTENDED_WAITS_S))


def test_what_will_not_pass_is_not_tried_again(bucket, proxy):
    proxy.fail("PUT", RefusedRequest(403, "AccessDenied"), 100)
    with pytest.raises(PermissionError, match="AccessDenied injected: check the credentials"):
        (bucket / "a").write_atomic(DATA)
    assert len(proxy.seen) == 1


DENIED, UNKNOWN_KEY = (
    RefusedRequest(403, "AccessDenied"),
    RefusedRequest(403, "InvalidAccessKeyId"),
)  # to us the same
REFUSALS = EXPIRED, GONE = (
    RefusedRequest(400, "ExpiredToken"),
    RefusedRequest(404, "NoSuchBucket"),
)


@pytest.fixture
def tries(monkeypatch) -> int:
    """Fewer tries than there are: each of a job that is refused makes a new client."""
    monkeypatch.setattr(s3, "WAITS_S", (0.01, 0.01))
    return 3


def and_slowly(fault):
    return pytest.param(fault, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "fault",
    [DENIED, and_slowly(UNKNOWN_KEY), EXPIRED, and_slowly(GONE)],
    ids=lambda fault: fault.code,
)
def test_refused_request_is_retried_or_ends_the_job_as_an_outage(
    bucket, proxy, monkeypatch, tries, fault
):
    monkeypatch.setattr(retries, "EXTENDED_WAITS_S", (0.01, 0.01))
    with extended_retries():
        (bucket / "a").write_atomic(b"first")
        proxy.fail("PUT", fault, tries + 1)
        proxy.fail("GET", fault, tries + 1)
        (bucket / "a").write_atomic(b"second")
        assert read_json(bucket / "b") is None and (bucket / "a").read_bytes() == b"second"
        proxy.fail("PUT", fault, 100)
        with pytest.raises(StorageError, match="Such requests were answered before") as error:
            (bucket / "a").write_atomic(b"third")
    assert outcome_of(error.value).code == 5


@pytest.mark.parametrize(
    "fault", [and_slowly(DENIED), UNKNOWN_KEY, *REFUSALS], ids=lambda fault: fault.code
)
def test_a_refusal_at_first_contact_is_permanent(bucket, proxy, monkeypatch, tries, fault):
    monkeypatch.setattr(retries, "EXTENDED_WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(s3, "answered_requests", set())
    proxy.fail("PUT", fault, 100)
    for is_job in (False, True):
        with extended_retries() if is_job else nullcontext(), pytest.raises(StorageError) as error:
            (bucket / "a").write_atomic(b"x")
        assert outcome_of(error.value).code == 2
    assert len(proxy.seen) == 1 + tries + 2


def test_credentials_that_come_late_are_found(bucket, proxy, monkeypatch):
    """As those of an instance whose metadata service is too busy at first."""
    monkeypatch.setattr(retries, "EXTENDED_WAITS_S", (0.01,))
    (bucket / "a").write_atomic(b"mine")
    key = os.environ["AWS_ACCESS_KEY_ID"]
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    s3.session_of.cache_clear()
    with pytest.raises(NotAllowed, match="no credentials: set AWS_ACCESS_KEY_ID"):
        (bucket / "a").read_bytes()
    monkeypatch.setattr(
        s3.time, "sleep", lambda seconds: monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    )
    with extended_retries():
        assert (bucket / "a").read_bytes() == b"mine"


def test_a_bucket_that_is_gone_is_no_empty_output(bucket, capsys):
    assert main(["status", "s3://vanished-bucket/out"]) == 2
    assert (
        "s3://vanished-bucket/out/_shards.json" in (said := capsys.readouterr().err)
        and "no such bucket" in said
    )
    assert main(["status", f"{bucket}/out"]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.fixture
def wait_one_second(monkeypatch) -> Iterator[Callable[[], None]]:
    """Let an answer be late after a second. A busy machine may be late itself, so only tests of lateness do it."""

    def shorten() -> None:
        monkeypatch.setattr(s3, "READ_S", 1.0)
        monkeypatch.setattr(s3, "CONNECT_S", 1.0)
        s3.session_of.cache_clear()  # a client keeps the limits that it began with

    yield shorten
    s3.session_of.cache_clear()


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_server_that_never_answers_is_an_error_in_time(
    bucket, proxy, method, monkeypatch, wait_one_second
):
    monkeypatch.setattr(s3, "WAITS_S", (0.01,))
    (bucket / "a").write_atomic(DATA)
    wait_one_second()
    proxy.fail(method, UnansweredRequest(), 100)
    act = {"GET": StoragePath.read_bytes, "PUT": lambda file: file.write_atomic(b"x")}[method]
    with pytest.raises(
        StorageTimeout, match=f"{bucket}/a at {proxy.url}: no answer in time, 2 times"
    ):
        act(bucket / "a")


def test_nobody_there_is_an_error_with_the_endpoint(bucket, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:9"):
        (bucket / "a").read_bytes()


@pytest.mark.parametrize("endpoint", ["127.0.0.1", "http://"])
def test_an_endpoint_that_is_no_url_is_an_error_with_its_name(bucket, endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StorageError, match=f"AWS_ENDPOINT_URL: .*{endpoint}"):
        (bucket / "a").stat()


def test_put_cut_off_by_a_dropped_connection_changes_nothing(bucket, proxy):
    (bucket / "b").write_atomic(b"old")
    proxy.fail("PUT", DroppedConnection(), 100)
    for name in ("a", "b"):
        with pytest.raises(StorageError):
            (bucket / name).write_atomic(DATA)
    assert not (bucket / "a").exists() and (bucket / "b").read_bytes() == b"old"


def test_a_conditional_put_whose_answer_is_lost_is_known_as_ours(bucket, proxy):
    proxy.fail("PUT", LostAnswer())
    first = (bucket / "a").create(b"mine")
    assert first == (bucket / "a").stat()
    proxy.fail("PUT", LostAnswer())
    assert (bucket / "a").replace(b"mine again", first.version) == (bucket / "a").stat()
    assert (bucket / "a").create(b"theirs") is None


def test_the_last_look_is_before_every_try(bucket, proxy):
    looks = []
    proxy.fail("PUT", BROKEN, 2)
    (bucket / "a").write_atomic(b"x", lambda: looks.append(len(proxy.seen)))
    assert looks == [0, 1, 2]


def test_a_slow_answer_is_waited_for_while_it_comes(bucket, proxy, wait_one_second):
    (bucket / "a").write_atomic(DATA)
    wait_one_second()
    proxy.fail("GET", SlowAnswer(0.1), 1)
    with (bucket / "a").open() as opened:
        assert opened.read() == DATA
    assert len([request for request in proxy.seen if request.method == "GET"]) == 1


def test_a_command_whose_storage_fails_says_so_in_one_line(bucket, proxy, capsys):
    (bucket / "out" / "_run.json").write_atomic(b"{}")
    proxy.fail("GET", SLOW_DOWN, 100)
    assert main(["report", f"{bucket}/out"]) == 5
    said = capsys.readouterr().err
    assert (
        said.startswith(f"eagle-ray: {bucket}/out/_run.json at {proxy.url}: SlowDown")
        and said.count("\n") == 1
    )
