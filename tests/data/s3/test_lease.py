"""The lock in a bucket: one driver at a time, taken over from the dead and never from the living."""

import json
import logging
import threading
import time

import pytest

from eagle_ray.config import ConfigError
from eagle_ray.data import lock
from eagle_ray.data.lock import LOCK, Lease, lock_output
from eagle_ray.data.stops import OutputBusy, Overtaken
from tests.data.s3.proxy import IgnoreConditions, Refuse


@pytest.fixture(autouse=True)
def quicker(monkeypatch, quick_lease):
    for name, seconds in {"LEASE_S": 3.5, "BEAT_S": 0.5, "GIVE_UP_S": 3.0, "LOOK_S": 0.2}.items():
        monkeypatch.setattr(lock, name, seconds)


DEAD = b'{"holder": "process 1 on gone", "token": "x", "beat": 7}'  # and never beats again


def holder(output):
    return json.loads((output / LOCK).read_bytes())["holder"]


def test_a_second_driver_is_refused_while_the_first_lives_and_let_in_after(bucket):
    with lock_output(bucket):
        name = holder(bucket)
        with pytest.raises(OutputBusy, match=f"{bucket} is being written by {name}"), lock_output(bucket):
            pass
    assert holder(bucket) is None
    with lock_output(bucket):
        assert holder(bucket) == name


def test_a_silent_holder_is_taken_over_once_its_lease_is_stale(bucket, caplog):
    caplog.set_level(logging.INFO, "eagle_ray")
    logging.getLogger("eagle_ray").addHandler(caplog.handler)
    (bucket / LOCK).write_whole(DEAD)
    began = time.monotonic()
    with lock_output(bucket):
        assert time.monotonic() - began >= lock.LEASE_S
    said = dict.fromkeys(r.getMessage().split(": ")[-1] for r in caplog.records if r.name == "eagle_ray")
    assert list(said) == ["waiting 4 s for a sign of life", "taken over"]
    logging.getLogger("eagle_ray").removeHandler(caplog.handler)


def test_of_two_that_wait_for_a_dead_holder_one_gets_the_lease(bucket):
    (bucket / LOCK).write_whole(DEAD)
    outcomes = []

    def wait() -> None:
        try:
            Lease(bucket).take()
            outcomes.append("taken")
        except OutputBusy:
            outcomes.append("busy")

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["busy", "busy", "taken"]


def test_a_driver_whose_lease_was_taken_over_stops(bucket):
    with pytest.raises(Overtaken, match=r"somebody else has taken .* over: this driver stops"), lock_output(bucket):
        (bucket / LOCK).write_whole(b'{"holder": "somebody else", "token": "x", "beat": 1}')
        time.sleep(30)
    assert holder(bucket) == "somebody else"


def test_a_driver_that_cannot_renew_its_lease_stops_before_it_is_stale(bucket, proxy):
    began = time.monotonic()
    with pytest.raises(Overtaken, match=r"_lock could not be written for .* s: this driver stops"), lock_output(bucket):
        proxy.fail("PUT", Refuse(503, "SlowDown"), 10_000)
        proxy.fail("GET", Refuse(503, "SlowDown"), 10_000)
        time.sleep(30)
    assert time.monotonic() - began < 15


def test_a_server_that_ignores_conditions_is_refused(bucket, proxy):
    proxy.fail("PUT", IgnoreConditions(), 100)
    says = f"{bucket} at {proxy.url}: the server ignores If-None-Match"
    with pytest.raises(ConfigError, match=says), lock_output(bucket):
        pass
    assert bucket.stamps() == {}


def test_a_few_failed_beats_are_survived(bucket, proxy):
    with lock_output(bucket):
        proxy.fail("PUT", Refuse(500, "InternalError"), 5, path=LOCK)
        time.sleep(lock.GIVE_UP_S + 1)
    assert holder(bucket) is None
