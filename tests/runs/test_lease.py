"""The lease of a run directory, tried without waiting: one holder, locally and in a bucket."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from eagle_ray.runs import lease as module
from eagle_ray.runs import process_identity
from eagle_ray.runs.job_errors import FencedError
from eagle_ray.runs.lease import LOCK, Lease, hold
from eagle_ray.runs.process_identity import Process
from eagle_ray.storage.path import StoragePath, json_bytes

HOLD = """
import sys, time
from eagle_ray.runs.lease import Lease
from eagle_ray.storage.path import StoragePath
print(Lease.of(StoragePath.of(sys.argv[1])).try_take(), flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["local", "s3"])
def output(request, tmp_path) -> StoragePath:
    return (
        StoragePath.of(tmp_path / "out")
        if request.param == "local"
        else request.getfixturevalue("bucket") / "out"
    )


@pytest.fixture
def short_lease_times(monkeypatch) -> None:
    for name, seconds in {"LEASE_S": 1.0, "HEARTBEAT_S": 0.2, "LEASE_POLL_S": 0.1}.items():
        monkeypatch.setattr(module, name, seconds)


def test_a_lease_has_one_holder_until_it_is_given_back(output):
    one, two = Lease.of(output), Lease.of(output)
    assert one.try_take() and not two.try_take() and str(os.getpid()) in two.holder
    two.release()  # not its own
    assert not Lease.of(output).try_take()
    one.release()
    assert two.try_take() and not one.try_take()
    two.release()
    assert one.try_take()
    one.release()


def test_the_lease_of_a_killed_process_is_free_at_once(output):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"True\n"
    mine = Lease.of(output)
    assert not mine.try_take()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert mine.try_take()
    mine.release()


def test_lock_file_deleted_before_it_is_locked_is_no_lease(tmp_path, monkeypatch):
    """Two processes would hold a lease: one of a file without a name, and one of its successor."""
    output, flock = StoragePath.of(tmp_path), module.fcntl.flock

    def deleted_before(handle: int, how: int) -> None:
        monkeypatch.setattr(module.fcntl, "flock", flock)
        os.unlink(tmp_path / LOCK)
        flock(handle, how)

    monkeypatch.setattr(module.fcntl, "flock", deleted_before)
    with hold(output):
        assert not Lease.of(output).try_take()


def write_lock(bucket, process: Process, boot: str) -> StoragePath:
    facts = {
        "holder": "process 1 on gone",
        "token": "x",
        "beat": 7,
        "process": asdict(process),
        "boot": boot,
    }
    (bucket / LOCK).write_atomic(json_bytes(facts))
    return bucket


def test_process_of_a_machine_of_the_same_name_is_watched(bucket, short_lease_times):
    ended = replace(Process.current(), pid=2**22 + 1)
    lease = Lease.of(write_lock(bucket, ended, "another start, or another machine"))
    assert not lease.try_take() and not lease.is_holder_alive()
    time.sleep(module.LEASE_S)
    assert lease.try_take()
    lease.release()


def test_holder_is_notified_of_a_lost_lease_and_leaves_it_alone(bucket, short_lease_times):
    told = []
    lease = Lease.of(bucket, lambda: told.append(lease.lost))
    assert lease.try_take()
    write_lock(bucket, Process.current(), "")
    while not told:
        time.sleep(0.05)
    with pytest.raises(FencedError, match=r"process 1 on gone has taken .* over"):
        lease.check()
    lease.release()
    assert (
        isinstance(told[0], FencedError)
        and json.loads((bucket / LOCK).read_bytes())["token"] == "x"
    )


def test_process_is_identified_by_records_of_earlier_versions():
    this = Process.current()
    stat = Path("/proc/self/stat")
    if stat.exists():  # as they read it there
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        assert abs(ticks - int(this.started)) <= 1
        assert replace(this, started=str(ticks)).is_gone() is False
    assert (
        replace(this, started=str(int(this.started) - 10 * process_identity.TICKS_PER_S)).is_gone()
        is True
    )  # a reused PID
    assert replace(this, started="Fri Nov 27 12:00:00 2026").is_gone() is None  # of macOS
    assert replace(this, host="elsewhere").is_gone() is None
