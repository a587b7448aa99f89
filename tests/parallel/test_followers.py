"""Followers: processes that end with their leader, and it with them, whatever happens to any of them."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from eagle_ray import LLM, SamplingParams
from eagle_ray.core.errors import EngineError
from eagle_ray.parallel import followers as followers_module
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


def test_two_processes_answer_as_one_and_leave_nothing():
    before, ports = meetings(), listening()
    with LLM(**SETTINGS) as llm:
        one = ids(llm.generate(PROMPTS, PARAMS))
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        assert len(followers_of(os.getpid())) == 1
        assert ids(llm.generate(PROMPTS, PARAMS)) == one
    assert not followers_of(os.getpid()) and meetings() == before
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


def test_a_follower_that_cannot_load_says_why(tmp_path):
    """Rank 1 reads other rows than rank 0, of a file that is damaged only there."""
    from eagle_ray.parallel.followers import Followers

    followers = Followers("raise SystemExit(3)", 2, None)
    try:
        assert wait_until(lambda: followers.why_lost() is not None, 20)
        assert followers.why_lost() == "rank 1 ended with exit code 3"
    finally:
        followers.close()
