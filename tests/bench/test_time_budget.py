"""A run goes on whatever a part of it raises, keeps what it knows, and gives no section more than its share."""

import time
import weakref

import pytest
import torch

from jobs.bench.gpu import time_budget as module
from jobs.bench.gpu.settings import Results
from jobs.bench.gpu.time_budget import Agenda, DeviceLost


@pytest.fixture
def clock(monkeypatch):
    """now[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def agenda(minutes: float = 1, **rest) -> tuple[Agenda, list[int]]:
    """And how many failures were known each time that the results were kept."""
    kept = []
    return Agenda(Results(), torch.device("cpu"), minutes, lambda r: kept.append(len(r.failed)), **rest), kept


def failing(error: BaseException):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no room"), AssertionError(), KeyError("x")]
)
def test_a_fault_is_a_line_and_what_follows_is_done(error, capsys):
    mine, kept = agenda()
    assert mine.do("8b: batch 64", 0, failing(error)) is None
    assert mine.do("8b: batch 4", 0, lambda: 7) == 7 and mine.do("parts", 0, lambda: None) is True
    assert [line.split(":")[2] for line in mine.results.failed] == [f" {type(error).__name__}"]
    assert kept == [1, 1, 1] and f"!! FAILED 8b: batch 64: {type(error).__name__}" in capsys.readouterr().out


def test_what_a_failed_part_made_is_let_go(monkeypatch):
    """The memory that ran out must be free for the next cell: nobody may hold the error, whose frames hold tensors."""
    made, alive = [], []
    monkeypatch.setattr(module, "release", lambda device: alive.append(made[0]()))

    def function():
        mine = torch.zeros(4)
        made.append(weakref.ref(mine))
        raise torch.OutOfMemoryError("no more of them")

    agenda()[0].do("cell", 0, function)
    assert alive == [None]


@pytest.mark.parametrize("said", ["CUDA error: unspecified launch failure", "device-side assert triggered"])
def test_a_lost_device_ends_the_run_with_everything_kept(said):
    mine, kept = agenda()
    with pytest.raises(DeviceLost, match=said):
        mine.do("cell", 0, failing(RuntimeError(said)))
    assert kept == [1]


def test_section_uses_its_share_and_leaves_the_rest_to_others(clock, capsys):
    mine, _ = agenda()
    with mine.section("ours", share=0.5):
        assert mine.left_s == 30
        clock[0] += 25
        assert mine.do("long", 6, lambda: 1) is None and mine.do("short", 4, lambda: 1) == 1
    assert mine.left_s == 35 and mine.results.skipped == ["long"]
    assert "-- skipped: long (about 6 s, 5 s left of ours)" in capsys.readouterr().out
    clock[0] += 30
    with mine.section("last", share=0.5):
        assert mine.left_s == 5
        clock[0] += 9
        assert mine.left_s == 0


def test_only_what_is_asked_for_is_done():
    mine, kept = agenda(only=("batch 1,",))
    assert mine.do("8b: batch 16, context 1", 0, lambda: 1) is None and mine.do("8b: batch 1, context 1", 0, time.time)
    assert mine.results.skipped == [] and kept == [0]
