"""No more threads than a model is worth, and none left standing."""

import time
from pathlib import Path

import pytest
import torch

from eagle_ray.models import runtime as threads


class TimedWork:
    """Work that takes as long as the number of threads says, by a clock of its own."""

    def __init__(self, seconds: dict[int, float]):
        self._seconds, self.now = seconds, 0.0

    def run(self) -> None:
        self.now += self._seconds[torch.get_num_threads()]


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({8: 0.004, 4: 0.008, 2: 0.016, 1: 0.032}, 8),  # all of them help
        ({8: 0.010, 4: 0.008, 2: 0.016, 1: 0.032}, 4),  # the last ones are in the way
        ({8: 0.009, 4: 0.009, 2: 0.009, 1: 0.009}, 1),  # none helps
    ],
)
def test_the_fewest_threads_that_are_nearly_as_fast(eight_threads, monkeypatch, seconds, wanted):
    work = TimedWork(seconds)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: work.now)
    assert threads.tune_num_threads(work.run) == wanted == torch.get_num_threads()


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({8: 0.009, 4: 0.009, 2: 0.009, 1: 0.009}, 8),  # another process has the other cores now
        ({8: 0.010, 4: 0.008, 2: 0.006, 1: 0.009}, 2),  # fewer are faster
    ],
)
def test_threads_of_the_team_stay_unless_fewer_are_faster(
    eight_threads, monkeypatch, seconds, wanted
):
    work = TimedWork(seconds)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: work.now)
    assert threads.tune_num_threads(work.run, threads.MIN_TEAM_SPEEDUP) == wanted


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts the process's threads in /proc"
)
def test_a_passing_thread_leaves_no_helpers(eight_threads):
    def product() -> set[str]:
        assert torch.equal(torch.ones(64, 512) @ torch.ones(512, 512), torch.full((64, 512), 512.0))
        return thread_ids()

    before = thread_ids()  # some of other tests may end meanwhile
    added = threads.run_in_temporary_thread(product) - before
    assert len(added) >= 8
    deadline = time.monotonic() + 10
    while (
        thread_ids() & added and time.monotonic() < deadline
    ):  # the system takes a moment to bury them
        time.sleep(0.01)
    assert not thread_ids() & added


def test_what_a_passing_thread_raises_is_raised():
    with pytest.raises(KeyError, match="gone"):
        threads.run_in_temporary_thread(lambda: {}["gone"])


def thread_ids() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}
