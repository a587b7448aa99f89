"""jobs/bench/steady_state.py counts what an engine does with a stream of requests."""

import json
import sys

import pytest

from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from jobs.bench import steady_state
from jobs.bench.steady_state import Workload, make_engine, measure


@pytest.mark.slow
def test_the_bench_writes_an_object_for_each_number_of_slots(monkeypatch, tmp_path):
    out = tmp_path / "steady.json"
    words = f"--slots 2 3 --outputs 4 8 --sequences 2 --json {out}"
    monkeypatch.setattr(sys, "argv", ["steady_state", *words.split()])
    steady_state.main()
    found = json.loads(out.read_text())
    assert [each["slots"] for each in found] == [2, 3]
    for each in found:
        assert 0 < each["share_ahead"] <= 1 and 0 < each["slots_busy"] <= 1
        assert 0 < each["prompt_passes_per_step"] <= 1 and each["host_ms_per_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tree", [NO_TREE, TreeBounds(4, 2, 2)])
def test_a_device_that_costs_nothing_takes_the_same_steps(tree):
    """Outputs end by their length alone, so plain steps are the same; drafts are accepted as in the first step."""
    work = Workload(3, outputs=(4, 8), num_windows=2)
    real, recorded = (
        measure(make_engine(3, tree, is_recorded), work) for is_recorded in (False, True)
    )
    assert recorded.share_ahead > 0 and recorded.slots_busy > 0.3
    if tree == NO_TREE:
        assert recorded.slots_busy == real.slots_busy
        assert recorded.prompt_passes_per_step == real.prompt_passes_per_step


@pytest.mark.slow
def test_rows_with_a_schema_are_as_long_as_the_others():
    state = measure(
        make_engine(3, NO_TREE), Workload(3, outputs=(4, 8), schema_every=2, num_windows=1)
    )
    assert 0 < state.slots_busy <= 1
