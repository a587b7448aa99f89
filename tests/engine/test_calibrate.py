"""Which steps are measured, in what order, and that measuring keeps to its budget."""

from functools import partial
from itertools import chain

import pytest

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import (
    BATCH_STEP,
    SHORT_PROMPT,
    STEP_REPLAYS,
    CalibrationRun,
    CalibrationSetting,
    CalibrationSizes,
    TimeBudget,
    calibrate_costs,
    calibration_mode,
    scripted_planner,
)
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.planner.cost_model import BUCKETS
from tests.support.toy_models import llama_engine

TREE = 8, 3, 3
UNLIMITED = 1e9


@pytest.fixture
def recorded_steps(monkeypatch) -> list[tuple[CalibrationSetting, int]]:
    """Every step that a bench takes, and the length of its prompts."""
    steps = []
    take = CalibrationRun.run_step

    def noted(bench: CalibrationRun, setting: CalibrationSetting, length: int = SHORT_PROMPT):
        steps.append((setting, length))
        return take(bench, setting, length)

    monkeypatch.setattr(CalibrationRun, "run_step", noted)
    return steps


def sizes_of(num_slots: int, tree: tuple[int, int, int] = TREE) -> CalibrationSizes:
    return CalibrationSizes(num_slots, TreeBounds(*tree), device="cpu")


def test_a_spent_budget_leaves_the_steps_that_every_curve_needs(recorded_steps):
    engine = llama_engine(4, *TREE)
    costs = calibrate_costs(engine, TimeBudget(0.0))
    assert [setting for setting, _ in recorded_steps] == sizes_of(4).needed()
    assert costs.verify.rows == [1, 2, 8]
    assert costs.attention_per_token == costs.attention_per_row == 0.0
    assert costs.plain_seconds(4, 100.0) > 0 and costs.draft_seconds(4, 12, 3) > 0
    assert not engine.has_work and engine.counters.num_steps == 0
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("seconds", [6, 9, 14, 40])
def test_measuring_ends_with_the_step_that_spends_the_budget(recorded_steps, seconds):
    """On a clock on which each step takes a second. A long prompt is followed by one plain step at least."""
    calibrate_costs(
        llama_engine(4, *TREE), TimeBudget(seconds, clock=lambda: float(len(recorded_steps)))
    )
    assert seconds <= len(recorded_steps) <= seconds + 3
    assert (
        len(recorded_steps) == seconds
        or recorded_steps[-1][1] == recorded_steps[-2][1] != SHORT_PROMPT
    )


def test_calibration_order_is_single_batches_contexts_all_sizes(recorded_steps):
    calibrate_costs(llama_engine(4, *TREE), TimeBudget(UNLIMITED))
    sizes = sizes_of(4)
    first = [*sizes.needed(), *sizes.trees(), *sizes.batches()[0]]
    assert [setting for setting, _ in recorded_steps[: len(first)]] == first
    num_before_contexts = next(
        i for i, (_, length) in enumerate(recorded_steps) if length != SHORT_PROMPT
    )
    assert {
        setting.num_nodes for setting, _ in recorded_steps[len(first) : num_before_contexts]
    } == {1}
    rest = [
        setting
        for setting, length in recorded_steps[num_before_contexts:]
        if length == SHORT_PROMPT
    ]
    assert rest == [*first, *sizes.all()]


def test_every_size_is_replayed_where_the_budget_allows(recorded_steps):
    calibrate_costs(llama_engine(4, *TREE), TimeBudget(UNLIMITED))
    settings = [setting for setting, _ in recorded_steps]
    assert min(settings.count(setting) for setting in sizes_of(4).all()) >= STEP_REPLAYS


def test_short_calibration_prompts_differ_to_use_many_experts(monkeypatch):
    engine, prompts = llama_engine(4, *TREE), set()
    add = engine.add
    monkeypatch.setattr(
        engine, "add", lambda sequence: (prompts.add(tuple(sequence.prompt_ids)), add(sequence))
    )
    with calibration_mode(engine, scripted_planner(engine)) as bench:
        bench.run_step(CalibrationSetting(4, 1, 0, 0))
        assert len(prompts) == 4 and {len(prompt) for prompt in prompts} == {SHORT_PROMPT}
        bench.clear()
        bench.run_step(CalibrationSetting(4, 1, 0, 0), length=64)
        assert sum(len(prompt) == 64 for prompt in prompts) == 1, (
            "on a CPU all have a long one in common"
        )


def test_levels_are_measured_as_wide_as_they_are_recorded():
    graphs = CudaGraphRunner("cpu", 64, 1024, fused=True)
    sizes = CalibrationSizes(64, TreeBounds(60, 6, 10), "cuda", partial(graphs.level_widths, 10))
    for settings in (chain(*sizes.batches()), sizes.all()):
        widths = {
            setting.width for setting in settings if setting.batch_size == 64 and setting.depth == 2
        }
        assert {1, 2, 4} <= widths
    assert {s.width for s in sizes.needed() if s.num_nodes == 2} == {1, 10}


def test_first_batch_sizes_grow_by_a_factor_up_to_all_slots():
    assert [batch[0].batch_size for batch in sizes_of(100).batches()] == [
        BATCH_STEP,
        BATCH_STEP**2,
        100,
    ]
    assert [batch[0].batch_size for batch in sizes_of(8).batches()] == [8]
    assert sizes_of(1).batches() == [[]]


@pytest.mark.parametrize("tree", [(1, 1, 1), (2, 2, 1), (8, 3, 3), (60, 6, 10)])
@pytest.mark.parametrize("num_slots", [1, 4, 32, 64])
def test_no_tree_is_larger_than_it_may_be(num_slots, tree):
    sizes = sizes_of(num_slots, tree)
    settings = [
        *sizes.needed(),
        *sizes.trees(),
        *chain(*sizes.batches()),
        *sizes.all(),
        sizes.small_tree,
    ]
    max_nodes, max_depth, top_k = tree
    assert max(setting.num_nodes for setting in settings) <= 1 + max_nodes
    assert max(setting.depth for setting in settings) <= max_depth
    assert max(setting.width for setting in settings) <= top_k
    assert {1, num_slots} <= {setting.batch_size for setting in settings}
    assert {setting.num_nodes for setting in sizes.trees()} <= set(BUCKETS)


def test_a_budget_is_spent_when_its_seconds_are_over():
    now = [100.0]
    budget = TimeBudget(5.0, clock=lambda: now[0])
    now[0] = 104.9
    assert not budget.is_spent
    now[0] = 105.0
    assert budget.is_spent
