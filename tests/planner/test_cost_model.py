"""Cost curves, their corrections, their measurement on real steps and their keeping on disk."""

import json
import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_ray.core.device import StepTimes
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import (
    CalibrationRun,
    CalibrationSetting,
    ScriptedPlanner,
    TimeBudget,
    calibrate_costs,
    catch_up_steps,
    seconds_per_sequence,
    warm_up,
)
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.planner.cost_cache import (
    adopt_costs,
    cache_path,
    cached_costs,
    costs_json,
    used_costs,
)
from eagle_ray.planner.cost_model import CostCurve, DraftWorth, StepCosts, costs_text, isotonic
from eagle_ray.planner.planner import StepOutcome, UniformPlanner
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from tests.support.toy_models import llama_engine


@pytest.fixture(autouse=True)
def propagated_log(monkeypatch, caplog):
    """A job that ran before may have taken the log to stderr alone, or wanted to hear of errors only."""
    log = logging.getLogger("eagle_ray")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "disabled", False)
    caplog.set_level(logging.WARNING, logger="eagle_ray")


seconds = st.lists(st.floats(1e-6, 10), min_size=1, max_size=12)


def flat(value: float) -> CostCurve:
    return CostCurve([1, 64], [value, value])


def some_costs() -> StepCosts:
    return StepCosts(
        CostCurve([1, 8, 16], [1.0, 1.2, 2.0]), 0.0, flat(0.1), flat(0.1), flat(0.05), flat(0.1)
    )


def update_costs(costs: StepCosts, outcome: StepOutcome) -> None:
    costs.update(outcome, costs.predict(outcome))


@given(seconds)
def test_more_rows_never_cost_less(values):
    curve = CostCurve(list(range(1, len(values) + 1)), values)
    read = [curve(n / 2) for n in range(2, 2 * len(values) + 6)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(read))


def test_isotonic_leaves_rising_values_and_averages_falling_ones():
    assert isotonic([1.0, 2.0, 3.0]) == pytest.approx([1, 2, 3])
    assert isotonic([1.0, 8.0, 2.0]) == pytest.approx([1, 4, 4])


def test_costs_between_and_beyond_what_was_measured():
    curve = CostCurve([1, 8, 16], [1.0, 1.7, 2.5])
    assert curve(0) == curve(1) == pytest.approx(1.0)
    assert curve(4.5) == pytest.approx(1.35)
    assert curve(24) == pytest.approx(3.3)


def test_a_flat_end_does_not_make_more_rows_free():
    curve = CostCurve([1, 8, 16], [1.0, 2.5, 2.5])
    assert curve(31) == pytest.approx(2.5 + 1.5)


def test_one_odd_time_at_the_end_does_not_make_large_passes_dear():
    """Beyond what is compiled beforehand a first time is long: reading 844 pairs was taken to need 478 ms, not 112."""
    curve = CostCurve([1, 50, 90, 100], [1.0, 5.9, 9.9, 15.0])
    assert curve(1000) == pytest.approx(15 + 900 * (15.0 - 5.9) / 50)


def test_first_time_of_a_larger_pass_is_weighted_by_half():
    """It pays for what is made once: 2,400 pairs took 0.6 s, then 0.2, and prompts came to look twice as dear."""
    curve = CostCurve([1, 8, 16], [1.0, 1.7, 2.5])
    curve.update(48, ratio=4.0)
    assert curve.rows == [1, 8, 16, 48]
    assert curve(48) == pytest.approx(2 * (2.5 + 0.1 * 32)) and curve(16) == pytest.approx(2.5)
    curve.update(48, ratio=0.5)
    assert curve(48) == pytest.approx(2.5 + 0.1 * 32, rel=0.03) and curve(16) == pytest.approx(
        2.5, rel=0.02
    )
    curve.update(52, ratio=1.0)  # as good as 48
    assert curve.rows[-1] == 48


def test_shorter_first_time_of_a_larger_pass_counts_in_full():
    curve = CostCurve([1, 8, 16], [1.0, 1.7, 2.5])
    curve.update(48, ratio=0.8)
    assert curve(48) == pytest.approx(0.8 * (2.5 + 0.1 * 32))


@pytest.mark.parametrize("measured", [[1], [1, 8, 64]])
def test_sizes_that_are_each_run_once_are_priced_all_the_same(measured: list[int]):
    """Catching up never takes as many pairs twice; at the start next to nothing was measured, and that was flat."""
    curve, rows = CostCurve(measured, [1e-3] * len(measured)), measured[-1]
    while rows < 20_000:
        rows = int(1.25 * rows) + 1
        took = 1e-3 + 5e-5 * rows
        curve.update(rows, took / curve(rows))
    assert curve(rows) == pytest.approx(took, rel=0.2)


def test_steps_correct_costs_of_their_rows_and_less_of_others():
    costs = some_costs()
    for _ in range(200):  # everything takes twice as long, and 16 rows four times
        for rows, took in ((1, 2.0), (8, 2.4), (16, 8.0)):
            update_costs(
                costs, StepOutcome(PLAIN_PLAN, 1, 0, 0, 0, rows, 0, 0, StepTimes(0.0, took, 0.1))
            )
    assert costs.verify(8) / costs.verify(1) == pytest.approx(1.2, rel=0.15)
    assert costs.verify(16) / costs.verify(1) == pytest.approx(4.0, rel=0.15)


def test_wrong_cost_is_corrected_by_running_one_size_alone():
    costs = some_costs()
    for _ in range(100):
        update_costs(
            costs, StepOutcome(PLAIN_PLAN, 1, 0, 0, 0, 16, 0, 0, StepTimes(0.0, 3.0, 0.05))
        )
    assert costs.verify(16) == pytest.approx(3.0, rel=0.05)
    assert costs.verify(1) < costs.verify(16) * 0.6


def test_a_context_is_read_by_every_row_of_its_sequence():
    costs = replace(some_costs(), attention_per_token=0.01, attention_per_row=0.002)
    assert costs.verify_seconds(8, 100, 8) == pytest.approx(1.2 + 100 * 0.01)
    assert costs.verify_seconds(16, 100, 8) == pytest.approx(2.0 + 100 * (0.01 + 0.002))
    assert costs.verify_seconds_by_rows([8, 16], 100, 8).tolist() == [
        costs.verify_seconds(n, 100, 8) for n in (8, 16)
    ]
    assert costs.row_seconds(16, 100, 8) == pytest.approx(costs.verify.slope(16) + 100 * 0.002 / 8)


@pytest.mark.parametrize(
    ("most", "taken", "rises"), [(math.inf, 0.3, True), (0.0, 0.3, False), (0.0, 0.02, False)]
)
def test_unusual_step_may_only_lower_the_draft_overhead(most, taken, rises):
    costs = some_costs()
    outcome = StepOutcome(DraftPlan(1, 1), 4, 0, 1, 4, 8, 2, 0, StepTimes(0.1, 1.2, taken))
    costs.update(outcome, costs.predict(outcome), most)
    assert (costs.draft_overhead(4) > 0.1) == rises
    assert (costs.draft_overhead(4) < 0.1) == (taken < 0.1)


def test_learned_overhead_is_bounded_where_a_limit_is_set():
    costs = some_costs()
    outcome = StepOutcome(DraftPlan(1, 1), 4, 0, 1, 4, 8, 2, 0, StepTimes(0.1, 1.2, 0.9))
    for _ in range(100):
        costs.update(outcome, costs.predict(outcome), 1.7)
    assert costs.draft_overhead(4) == pytest.approx(1.7 * some_costs().draft_overhead(4), rel=0.02)


def test_drafts_pay_from_the_plain_steps_that_theirs_takes():
    costs = StepCosts(
        verify=CostCurve([1, 8], [0.004, 0.0075]),
        attention_per_token=0.0,
        catch_up=CostCurve([1], [0.001]),
        expand=CostCurve([1], [0.0005]),
        plain_overhead=CostCurve([1], [0.001]),
        draft_overhead=CostCurve([1], [0.002]),
    )
    assert costs.break_even(8, 3) == pytest.approx((0.0075 + 0.001 + 2 * 0.0005 + 0.002) / 0.005)
    last = costs_text(costs).splitlines()[-1]
    assert "a row costs 0.12 passes: drafts pay from tau 1.8" in last and "2.3 with 8 nodes" in last
    assert DraftWorth.of(costs).text in last


def test_what_each_sampled_row_takes_is_learned_from_plain_steps():
    """Calibration runs greedy rows. Sampled ones take 1 s each after the pass here, and a step with drafts has more."""
    costs = some_costs()
    plain = StepOutcome(DraftPlan(0, 0), 4, 0, 0, 0, 4, 0, 0, StepTimes(0.0, 1.0, 4.0))
    for _ in range(50):
        costs.update(plain, costs.predict(plain))
    drafted = StepOutcome(DraftPlan(2, 1), 4, 0, 2, 4, 12, 0, 0, StepTimes(0.0, 0.0, 0.0))
    assert costs.predict(drafted).overhead == pytest.approx(costs.draft_overhead(4) + 12, rel=0.1)
    greedy = some_costs()
    assert greedy.predict(drafted).overhead == greedy.draft_overhead(4)


def test_widths_and_depths_at_once_cost_what_each_costs_alone():
    costs = replace(some_costs(), expand=CostCurve([1, 8, 16], [0.1, 0.3, 0.4]))
    each = [[costs.draft_seconds(5, 4 * width, depth) for depth in (1, 2, 3)] for width in (1, 3)]
    assert costs.catch_up(5) + costs.level_seconds([4, 12], 3) == pytest.approx(np.array(each))


def test_the_same_rows_of_more_sequences_take_longer():
    costs = replace(some_costs(), per_sequence=0.01)
    assert costs.verify_seconds(16, 0, 16) == pytest.approx(2.0 + 16 * 0.01)
    assert costs.verify_seconds_by_rows([16, 8], 0, 4).tolist() == pytest.approx(
        [2.0 + 4 * 0.01, 1.2 + 4 * 0.01]
    )
    assert costs.plain_seconds(8, 0) == pytest.approx(1.2 + 8 * 0.01 + costs.plain_overhead(8))


def test_what_a_sequence_adds_is_told_from_what_rows_do():
    """Passes of 1 + rows / 8 s and a tenth for each sequence: of 8 rows, of 16, and of 4 in one way only."""
    sizes = [(8, 1), (8, 2), (8, 8), (16, 4), (16, 16), (4, 4)]
    seconds = {(rows, batch): [1 + rows / 8 + 0.1 * batch] for rows, batch in sizes}
    assert seconds_per_sequence(seconds) == pytest.approx(0.1)
    assert (
        seconds_per_sequence({(4, 4): [1.0]}) == 0
        and seconds_per_sequence({(8, 1): [2.0], (8, 8): [1.0]}) == 0
    )


def test_cpu_catch_up_steps_fit_the_kernels_that_are_made():
    assert [catch_up_steps(n, "cpu", 6) for n in (1, 8, 16, 24, 32, 64)] == [7, 7, 4, 2, 1, 1]
    assert {catch_up_steps(n, "cuda", 6) for n in (1, 16, 256)} == {
        4
    }  # with those of a tree of 2 levels, 7 at most


def test_a_draft_of_one_level_says_nothing_of_further_ones():
    costs = some_costs()
    for _ in range(50):  # reading takes half as long, levels as long as was thought
        for depth, took in ((1, 0.05), (3, 0.05 + 2 * 0.1)):
            update_costs(
                costs,
                StepOutcome(DraftPlan(3, 1), 8, 0, depth, 8, 16, 0, 0, StepTimes(took, 2.0, 0.1)),
            )
    assert costs.catch_up(8) == pytest.approx(0.05, rel=0.1) and costs.expand(8) == pytest.approx(
        0.1, rel=0.15
    )


def test_real_steps_are_measured_and_forgotten():
    engine = llama_engine(4, 8, 3, 3)
    costs = calibrate_costs(engine)
    assert not engine.has_work and engine.counters.num_steps == 0
    assert costs.verify.rows[0] == 1 and costs.verify.rows[-1] >= 9
    assert all(
        s > 0
        for curve in (costs.verify, costs.catch_up, costs.expand, costs.draft_overhead)
        for s in curve.seconds
    )
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("apart", [False, True])
def test_contexts_are_read_from_shared_or_from_own_blocks(apart, monkeypatch):
    engine = llama_engine(4, 8, 3, 3)
    planner, longest = ScriptedPlanner(), 2 * BLOCK_SIZE
    engine.planner = planner
    bench, blocks = CalibrationRun(engine, planner, apart), engine.target.cache.blocks
    bench.run_step(CalibrationSetting(1, 1, 0, 0), longest)
    bench.run_step(CalibrationSetting(4, 1, 0, 0), longest)
    assert len(blocks.block_table[:4, 0].unique()) == (4 if apart else 1)
    bench.run([CalibrationSetting(1, 1, 0, 0), CalibrationSetting(1, 2, 1, 1)])
    bench.run_contexts(CalibrationSetting(4, 3, 2, 2), TimeBudget(60.0))
    costs = bench.costs()
    assert costs.attention_per_token >= 0 and costs.attention_per_row >= 0
    bench.clear()
    engine.scheduler.check_integrity()


class UncallablePlanner(UniformPlanner):
    """Fails as soon as it is asked or told anything."""

    def plan(self, batch):
        raise AssertionError("asked")

    def observe(self, outcome):
        raise AssertionError("told")


@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
def test_warm_up_steps_are_neither_counted_nor_learned_from(tree):
    engine = llama_engine(2, *tree)
    engine.planner = planner = UncallablePlanner(TreeBounds(*tree))
    warm_up(engine)
    assert engine.planner is planner and not engine.has_work and engine.counters.num_steps == 0
    engine.scheduler.check_integrity()


def test_a_drafter_of_one_level_can_be_measured():
    assert calibrate_costs(llama_engine(2, 1, 1, 1)).expand(1) > 0


def test_costs_are_measured_once_and_cached_by_their_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    calls = []

    def measured() -> StepCosts:
        calls.append(1)
        return some_costs()

    first = cached_costs({"target": "a"}, measured)
    again = cached_costs({"target": "a"}, measured)
    assert costs_json(first) == costs_json(again) and len(calls) == 1
    cached_costs({"target": "b"}, measured)
    assert len(calls) == 2


def test_workers_that_start_together_measure_once(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    calls, second_asks = [], threading.Event()

    def measured() -> StepCosts:
        calls.append(1)
        assert second_asks.wait(60)
        return some_costs()

    def second() -> StepCosts:
        second_asks.set()
        return cached_costs({"target": "a"}, measured)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cached_costs, {"target": "a"}, measured)
        while not calls:
            time.sleep(0.01)
        other = threads.submit(second)
        assert costs_json(first.result()) == costs_json(other.result()) and len(calls) == 1


DAMAGED_COSTS: list[dict[str, object]] = [
    {"per_sequence": 10**400},
    {"per_sequence": math.nan},
    {"verify": {"rows": [], "seconds": []}},
    {"verify": {"rows": [1, 2], "seconds": [1.0]}},
    {"verify": {"rows": [2, 1], "seconds": [1.0, 1.0]}},
    {"verify": {"rows": [1, 2], "seconds": [1.0, math.inf]}},
    {"verify": {"rows": [1, 2], "seconds": [1.0, -1.0]}},
]


def test_costs_of_another_machine_are_adopted_only_if_intact(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "there"))
    parts = {"target": {"labels": {number: "x" for number in range(12)}}}
    cached_costs(parts, some_costs)
    (file,) = (tmp_path / "there" / "costs").glob("*.json")
    assert file in used_costs()

    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "here"))
    for name, data in [
        (file.name, b"{"),
        (file.name, b"[]"),
        ("00.json", file.read_bytes()),
        (file.name, b"\xff"),
    ]:
        with pytest.raises(ValueError, match="it holds"):
            adopt_costs(name, data)
    whole = json.loads(file.read_bytes())
    for change in DAMAGED_COSTS:
        with pytest.raises(ValueError, match="it holds no costs"):
            adopt_costs(file.name, json.dumps(whole | {"costs": whole["costs"] | change}).encode())
    with pytest.raises(ValueError, match="it holds no costs"):
        adopt_costs(file.name, b"[" * 100_000)
    adopt_costs(file.name, file.read_bytes())
    assert costs_json(cached_costs(parts, lambda: pytest.fail("measured"))) == costs_json(
        some_costs()
    )


@pytest.mark.parametrize(
    "damage", ["", "{", "[" * 100_000, json.dumps({"costs": {"verify": 3}}), json.dumps([])]
)
def test_a_damaged_file_is_measured_anew(tmp_path, monkeypatch, damage, caplog):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path))
    path = cache_path({"target": "a"})
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert costs_json(cached_costs({"target": "a"}, some_costs)) == costs_json(some_costs())
    assert "measuring again" in caplog.text
    assert json.loads(path.read_text())["of"] == {"target": "a"}


def test_a_place_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "file"))
    cached_costs({"target": "a"}, some_costs)
    assert "cannot be" in caplog.text
