"""Followers: processes that end with their leader, and it with them, whatever happens to any of them."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest

from eagle_ray import LLM, SamplingParams
from eagle_ray.core.errors import EngineError
from eagle_ray.parallel import followers as followers_module
from eagle_ray.parallel.followers import Followers
from tests.support.ranks import followers_of, meetings, wait_until

PROMPTS = [f"The number {i} is" for i in range(48)]
PARAMS = [SamplingParams(max_tokens=16, temperature=0.8 * (i % 2), seed=i) for i in range(48)]
SETTINGS = dict(threads=1, slots=8, method="eagle2", budget="uniform", max_nodes=12, device="cpu")
LONG = [SamplingParams(max_tokens=1000, ignore_eos=True, temperature=1.0, seed=i) for i in range(48)]


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def listening() -> set[int]:
    """Return the ports at which this process listens."""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_two_processes_answer_as_one_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # ranks of other tests meet in the usual one
    ports = listening()
    with LLM(**SETTINGS) as llm:
        one = ids(llm.generate(PROMPTS, PARAMS))
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        assert len(followers_of(os.getpid())) == 1
        assert ids(llm.generate(PROMPTS, PARAMS)) == one
    assert not followers_of(os.getpid()) and not meetings()
    assert wait_until(lambda: listening() <= ports, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_dies_or_hangs_ends_the_engine_within_seconds(monkeypatch, number):
    monkeypatch.setattr(followers_module, "SILENCE_S", 3.0)
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        [follower] = followers_of(os.getpid())
        threading.Timer(0.5, lambda: os.kill(follower.pid, number)).start()
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"rank 1 (was ended by signal 9|does not answer)"):
            llm.generate(PROMPTS, LONG)
        assert time.monotonic() - started < 15
        assert not followers_of(os.getpid())


def test_a_follower_that_dies_while_nothing_runs_is_named_in_every_call():
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        [follower] = followers_of(os.getpid())
        follower.kill()
        for _ in range(2):
            with pytest.raises(EngineError, match="rank 1 was ended by signal 9"):
                llm.generate(PROMPTS[:2])


PROGRAM = """
import sys
from eagle_ray import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(tensor_parallel=2, threads=1, slots=8, method="none", device="cpu")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("stops_follower", [False, True])
def test_a_leader_that_dies_leaves_no_process(stops_follower):
    """Its followers end even if they are stopped."""
    leader = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert leader.stdout.readline() == b"ready\n"
        [follower] = followers_of(leader.pid)
        if stops_follower:
            follower.suspend()
        leader.kill()
        leader.wait()
        assert wait_until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE, 10)
    finally:
        leader.kill()
        leader.wait()


def test_a_follower_that_ends_early_says_how():
    followers = Followers("raise SystemExit(3)", 2, None)
    try:
        assert wait_until(lambda: followers.why_lost() is not None, 20)
        assert followers.why_lost() == "rank 1 ended with exit code 3"
    finally:
        followers.close()


def test_a_leader_that_does_not_come_back_is_told(monkeypatch):
    """Not before all ranks have met: until then it looks for itself."""
    monkeypatch.setattr(followers_module, "GRACE_S", 0.1)
    followers, reasons = Followers("raise SystemExit(3)", 2, None), []
    followers.tell_if_stuck(reasons.append)
    try:
        assert wait_until(lambda: followers.why_lost() is not None, 20)
        time.sleep(1.0)
        assert not reasons
        followers.note_meeting()
        assert wait_until(lambda: bool(reasons), 10) and reasons == ["rank 1 ended with exit code 3"]
    finally:
        followers.close()


PATIENT = """
from eagle_ray.parallel import followers
followers.SILENCE_S = 0.5
followers.be_follower(lambda start, pipe: pipe.recv())
"""


def test_a_follower_waits_for_a_program_that_is_busy(monkeypatch):
    """The leader's watch sends no beat within the test, as if the program's code held Python's lock."""
    monkeypatch.setattr(followers_module, "BEAT_S", 1000.0)
    followers = Followers(PATIENT, 2, None)
    try:
        [pid] = followers.pids
        assert not wait_until(lambda: not psutil.pid_exists(pid) or followers.why_lost() is not None, 12)
    finally:
        followers.close()
    assert not psutil.pid_exists(pid)


def test_directories_of_killed_leaders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 3600
    for name in ("eagle-ray-ranks-killed", "eagle-ray-ranks-new", "other"):
        (tmp_path / name).mkdir()
        if name != "eagle-ray-ranks-new":
            os.utime(tmp_path / name, (long_ago, long_ago))
    first = Followers("import time; time.sleep(60)", 2, None)
    held = os.path.dirname(first.meeting)
    os.utime(held, (long_ago, long_ago))
    second = Followers("import time; time.sleep(60)", 2, None)
    try:
        assert not (tmp_path / "eagle-ray-ranks-killed").exists() and os.path.isdir(held)
        assert (tmp_path / "eagle-ray-ranks-new").is_dir() and (tmp_path / "other").is_dir()
    finally:
        first.close()
        second.close()
    assert {path.name for path in tmp_path.iterdir()} == {"eagle-ray-ranks-new", "other"}
