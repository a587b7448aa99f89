"""jobs/bench/planner.py: a short run tells the planner's place, and the same one again whatever the machine does."""

import json
import runpy
import sys

import pytest

from eagle_ray.core.device import StepTimes
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.planner.cost_cache import CURVES
from eagle_ray.planner.planner import StepOutcome
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from jobs.bench.simulated_costs import cpu, mistaken, padded

SHORT = "--batches 2 --tokens 60 --warm 20 --trees 1/1/1 2/2/1 --temperatures 0 1"


def run_planner_bench(monkeypatch, capsys, words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["bench_planner", *words.split()])
    runpy.run_module("jobs.bench.planner", run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_made_up_seconds_are_the_same_twice(monkeypatch, capsys):
    first, second = (run_planner_bench(monkeypatch, capsys, f"{SHORT} --mixed") for _ in range(2))
    assert first == second
    cells = [cell.strip() for cell in first.splitlines()[-1].split("|")]
    assert cells[1:4] == ["cpu", "2", "[0.0, 1.0]"] and cells[4] in (
        "none",
        "1/1/1",
        "2/2/1",
        "chain",
    )
    assert float(cells[6].removesuffix("x")) > 0.5


@pytest.mark.slow
def test_every_way_is_priced_in_every_world_by_its_own_passes(monkeypatch, capsys, tmp_path):
    file = tmp_path / "cells.json"
    run_planner_bench(monkeypatch, capsys, f"{SHORT} --world h100 h200 --no-sync --json {file}")
    cells = json.loads(file.read_text())
    ways = {(cell["world"], cell["batch"], cell["temperature"]): set() for cell in cells}
    for cell in cells:
        ways[cell["world"], cell["batch"], cell["temperature"]].add(cell["way"])
        assert cell["tokens_per_s"] > 0
    assert set(ways) == {(world, 2, t) for world in ("h100", "h200") for t in (0.0, 1.0)}
    assert all(names == {"none", "1/1/1", "2/2/1", "chain", "ours"} for names in ways.values())


def test_a_step_is_priced_as_it_is_replayed():
    sizes = CudaGraphRunner("cpu", 64, 512, fused=True).pass_sizes(TreeBounds(60, 6, 10))
    parts = {"num_cached": 0, "num_catch_up": 5, "num_accepted": 3, "num_prompt_tokens": 0}
    parts["seconds"] = StepTimes(0, 0, 0)
    drafting = StepOutcome(DraftPlan(3, 10, num_children=10), 5, depth=3, num_rows=40, **parts)
    plain = StepOutcome(PLAIN_PLAN, 5, depth=0, num_rows=5, **parts)
    assert (padded(drafting, sizes).num_rows, padded(drafting, sizes).level_rows) == (64, 16 * 10)
    assert padded(plain, sizes).num_rows == 8


def test_the_engine_ranks_and_learns_as_a_jobs_does():
    built = runpy.run_module("jobs.bench.planner")["built"]
    assert built(1).engine.drafter.ranking.calibration is not None
    assert built(1, replays=True).engine.drafter.ranking.offers.interval == 1


def test_mistaken_costs_are_off_by_as_much_as_was_said():
    true, wrong = cpu(), mistaken(cpu(), 0.1, seed=3)
    ratios = [
        b / a
        for name in CURVES
        for a, b in zip(*(getattr(c, name).seconds for c in (true, wrong)), strict=True)
    ]
    assert max(abs(r - 1) for r in ratios) > 0.05
    assert all(r == pytest.approx(1, abs=0.5) for r in ratios)
    assert mistaken(cpu(), 0.0, seed=3) == true
