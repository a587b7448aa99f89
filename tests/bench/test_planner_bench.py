"""jobs/bench/planner.py: a short run tells the planner's place, and the same one again whatever the machine does."""

import runpy
import sys

import pytest

from eagle_ray.planner.cost_cache import CURVES
from jobs.bench.simulated_costs import cpu, mistaken

SHORT = "--batches 2 --drain 0 --tokens 60 --warm 20 --trees 1/1/1 2/2/1 --temperatures 0 1"


def printed(monkeypatch, capsys, words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["bench_planner", *words.split()])
    runpy.run_module("jobs.bench.planner", run_name="__main__")
    return capsys.readouterr().out


def test_made_up_seconds_are_the_same_twice(monkeypatch, capsys):
    first, second = (printed(monkeypatch, capsys, SHORT) for _ in range(2))
    assert first == second
    cells = first.splitlines()[-1].split("|")
    assert cells[1].strip() == "2" and cells[2].strip() in ("none", "1/1/1", "2/2/1")
    assert float(cells[4].strip(" x")) > 0.5


def test_the_engine_ranks_as_a_jobs_does():
    built = runpy.run_module("jobs.bench.planner")["built"]
    assert built(1).engine.drafter.ranking.calibration is not None


def test_mistaken_costs_are_off_by_as_much_as_was_said():
    true, wrong = cpu(), mistaken(cpu(), 0.1, seed=3)
    ratios = [b / a for name in CURVES for a, b in zip(*(getattr(c, name).seconds for c in (true, wrong)), strict=True)]
    assert max(abs(r - 1) for r in ratios) > 0.05
    assert all(r == pytest.approx(1, abs=0.5) for r in ratios)
    assert mistaken(cpu(), 0.0, seed=3) == true
