"""Followers: processes that end with their leader, and it with them, whatever happens to any of them."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import product

import psutil
import pytest
import torch

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly import costs, tensor_parallel
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.kernels import availability
from eagle_ray.parallel import followers as followers_module
from eagle_ray.parallel.followers import Followers
from eagle_ray.parallel.rank_group import RankGroup
from tests.support.ranks import NAME, followers_of, wait_until

PROMPTS = [f"The number {i} is" for i in range(48)]
PARAMS = [SamplingParams(max_tokens=16, temperature=0.8 * (i % 2), seed=i) for i in range(48)]
SETTINGS = dict(threads=1, slots=8, method="eagle2", budget="uniform", max_nodes=12, device="cpu")
LONG = [
    SamplingParams(max_tokens=1000, ignore_eos=True, temperature=1.0, seed=i) for i in range(48)
]


@pytest.fixture
def warm_followers(monkeypatch, warm_python) -> None:
    """Fork followers from the warm process. They have its command line, so they are found by their process's name."""
    subprocess.run([sys.executable, "-c", ""], check=True)  # the warm process is there from now on
    name = f"from tests.support.forked_popen import set_process_name; set_process_name({NAME!r})"
    monkeypatch.setattr(
        tensor_parallel, "FOLLOWER_PROGRAM", f"{name}; {tensor_parallel.FOLLOWER_PROGRAM}"
    )


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def open_resources() -> Counter[str]:
    """Return how many files, sockets and pipes this process has open, by kind, and children under "children"."""
    names = [
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if _is_open(number)
    ]
    kinds = Counter(
        name.partition(":")[0] if name.startswith(("socket:", "pipe:")) else name for name in names
    )
    return kinds + Counter(children=len(psutil.Process().children(recursive=True)))


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def listening() -> set[int]:
    """Return the ports at which this process listens."""
    return {
        c.laddr.port
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }


def test_two_processes_answer_as_one_and_leave_nothing(warm_followers):
    """But the file in memory in which they met, which stays."""
    ports = listening()
    with LLM(**SETTINGS) as llm:
        one = ids(llm.generate(PROMPTS, PARAMS))
    before = open_resources()
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        assert len(followers_of(os.getpid())) == 1
        assert ids(llm.generate(PROMPTS, PARAMS)) == one
    assert not followers_of(os.getpid())
    assert wait_until(lambda: listening() <= ports, 5)
    assert wait_until(
        lambda: [*(open_resources() - before).elements()] == ["/memfd:eagle-ray-ranks (deleted)"], 5
    ), open_resources() - before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hung_follower_ends_the_engine_within_seconds(warm_followers, monkeypatch, number):
    monkeypatch.setattr(followers_module, "SILENCE_S", 3.0)
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        [follower] = followers_of(os.getpid())
        threading.Timer(0.5, lambda: os.kill(follower.pid, number)).start()
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"rank 1 (was ended by signal 9|does not answer)"):
            llm.generate(PROMPTS, LONG)
        assert time.monotonic() - started < 15
        assert not followers_of(os.getpid())


def test_follower_that_dies_idle_is_named_in_every_call(warm_followers):
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        [follower] = followers_of(os.getpid())
        follower.kill()
        for _ in range(2):
            with pytest.raises(EngineError, match="rank 1 was ended by signal 9"):
                llm.generate(PROMPTS[:2])


def without_memory(follower: psutil.Process) -> None:
    """Let it map no more, as if a limit of its own was reached."""
    follower.rlimit(psutil.RLIMIT_AS, (follower.memory_info().vms,) * 2)


HURTS = {
    "killed": psutil.Process.kill,
    "stopped": psutil.Process.suspend,
    "without memory": without_memory,
}
LOST = r"rank 1 (was ended by signal|does not answer|ended with exit code 1|failed)"


@pytest.mark.parametrize(
    "moment, how",
    [*product(["weights", "costs"], ["killed", "stopped"]), ("weights", "without memory")],
)
def test_a_follower_lost_while_rank_0_starts_fails_the_start(request, monkeypatch, moment, how):
    """As the first tensor of the weights is read, while it imports torch, or before the first cost is measured."""
    monkeypatch.setattr(followers_module, "SILENCE_S", 3.0)
    if moment == "weights":  # before its first beat
        monkeypatch.setattr(followers_module, "FIRST_BEAT_S", 5.0)
    else:  # not while it imports torch
        request.getfixturevalue("warm_followers")
    place = (RankGroup, "check") if moment == "weights" else (costs, "planner_for")
    original, hurt = getattr(*place), []

    def loses_one(*arguments, **named):
        if not hurt:
            hurt.extend(followers_of(os.getpid()))
            HURTS[how](hurt[0])
        return original(*arguments, **named)

    monkeypatch.setattr(*place, loses_one)
    started = time.monotonic()
    with pytest.raises(EngineError, match=LOST):
        LLM(tensor_parallel=2, **SETTINGS | {"budget": "global"})
    assert time.monotonic() - started < 60
    assert hurt and not followers_of(os.getpid())


def test_a_follower_without_memory_ends_the_engine_and_says_so(warm_followers):
    """There is none for the thread that compiles a grammar."""
    with LLM(tensor_parallel=2, **SETTINGS) as llm:
        [follower] = followers_of(os.getpid())
        llm.generate(PROMPTS[:2])
        without_memory(follower)
        with pytest.raises(
            EngineError,
            match=r"rank 1 failed \((ImportError: .* failed to map|RuntimeError: can't start)",
        ):
            llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, regex="[ab]{5}"))
        assert not followers_of(os.getpid())


PROGRAM = """
import subprocess, sys
from eagle_ray import LLM, SamplingParams
from tests.support.forked_popen import ForkedPopen
subprocess.Popen = ForkedPopen
if __name__ == "__main__":
    llm = LLM(tensor_parallel=2, threads=1, slots=8, method="none", device="cpu")
    print("ready", flush=True)
    sys.stdin.read()
"""


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("stops_follower", [False, True])
def test_a_leader_that_dies_leaves_no_process(warm_python, stops_follower):
    """Its followers end even if they are stopped."""
    leader = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert leader.stdout.readline() == b"ready\n"
        [follower] = followers_of(leader.pid)
        children = psutil.Process(leader.pid).children(recursive=True)
        if stops_follower:
            follower.suspend()
        leader.kill()
        leader.wait()
        assert follower in children and wait_until(lambda: not any(map(runs, children)), 10)
    finally:
        leader.kill()
        leader.wait()


def test_ranks_that_are_closed_give_back_threads_and_connections(monkeypatch):
    """Engines with ranks that are opened one after another have as many threads each."""
    monkeypatch.setattr(tensor_parallel, "FOLLOWER_PROGRAM", "import time; time.sleep(60)")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(2):
            member = tensor_parallel.launch_ranks(
                ModelConfig(device="cpu"), SpeculativeConfig(), EngineArgs(2), 2
            )
            assert torch.get_num_threads() == 2
            availability.together.add(member.ranks)
            member.lockstep.close()
            assert torch.get_num_threads() == 4
            assert member.ranks not in availability.together
    finally:
        torch.set_num_threads(before)


def test_ranks_are_left_once_their_requests_have_failed(monkeypatch):
    """As on a GPU, on which the leader waits in a sum."""
    monkeypatch.setattr(tensor_parallel, "FOLLOWER_PROGRAM", "raise SystemExit(3)")
    monkeypatch.setattr(followers_module, "GRACE_S", 0.1)
    member, reasons = (
        tensor_parallel.launch_ranks(
            ModelConfig(device="cpu"), SpeculativeConfig(), EngineArgs(2), 2
        ),
        [],
    )
    try:
        availability.together.add(member.ranks)
        member.lockstep.tell_if_stuck(reasons.append)
        member.ranks.when_met()
        assert wait_until(lambda: member.ranks not in availability.together, 20)
        assert reasons == ["rank 1 ended with exit code 3"]
    finally:
        member.lockstep.close()


def test_a_follower_that_ends_early_says_how():
    followers = Followers("raise SystemExit(3)", 2, None)
    try:
        assert wait_until(lambda: followers.why_lost() is not None, 20)
        assert followers.why_lost() == "rank 1 ended with exit code 3"
    finally:
        followers.close()


def test_a_follower_that_cannot_be_started_is_named(monkeypatch):
    """The second of them; the first one ends, too."""
    own, names = followers_module.start_child, []

    def start(command, name, *arguments, **files):
        names.append(name)
        if len(names) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return own(command, name, *arguments, **files)

    monkeypatch.setattr(followers_module, "start_child", start)
    followers = Followers("import time; time.sleep(60)", 3, None)
    try:
        assert wait_until(lambda: followers.why_lost() is not None, 20)
        assert (
            followers.why_lost() == "rank 2 cannot be started ([Errno 12] Cannot allocate memory)"
        )
        assert not [pid for pid in followers.pids if psutil.pid_exists(pid)]
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
        assert wait_until(lambda: bool(reasons), 10) and reasons == [
            "rank 1 ended with exit code 3"
        ]
    finally:
        followers.close()


PATIENT = """
from eagle_ray.parallel import followers
followers.SILENCE_S = 0.25
followers.be_follower(lambda start, pipe: pipe.recv())
"""


def test_a_follower_waits_for_a_program_that_is_busy(warm_python, monkeypatch):
    """The leader's watch sends no beat within the test, as if the program's code held Python's lock."""
    monkeypatch.setattr(followers_module, "FOLLOWER_BEAT_S", 1000.0)
    followers = Followers(PATIENT, 2, None)
    try:
        [pid] = followers.pids
        assert not wait_until(
            lambda: not psutil.pid_exists(pid) or followers.why_lost() is not None, 4
        )
    finally:
        followers.close()
    assert not psutil.pid_exists(pid)
