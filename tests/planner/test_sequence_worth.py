"""Easy and hard texts by turns and side by side, in made-up seconds: what the drafts of each sequence are worth."""

import itertools

import pytest

from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.planner.acceptance_model import MEMORY
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.planner.sequence_worth import LESSONS, SequenceWorths
from jobs.bench.mixed_texts import (
    BOUNDS,
    EASY,
    HARD,
    MixedTexts,
    hard,
    scaled,
    side_by_side,
    turns,
)
from jobs.bench.simulated_costs import SimulatedPlanner, amx, cpu

PARTS = ("verify", "expand", "catch_up", "draft_overhead")


def speed(planner, costs, size, chances, num_tokens, seed=0) -> float:
    """Return the tokens per second of a run, which what the planner observes is 10 % about."""
    priced = SimulatedPlanner(planner, costs(), noise=0.1, seed=seed)
    MixedTexts(size, chances, seed).run(priced, num_tokens)
    return priced.tokens_per_second


def over_plain(costs, size, chances, num_tokens, **wrong) -> float:
    """Return the planner's speed over plain decoding's, with these of its costs wrong by a factor at first."""
    planner = BudgetPlanner(BOUNDS, scaled(costs(), **wrong))
    plain = speed(UniformPlanner(NO_TREE), costs, size, chances, num_tokens)
    return speed(planner, costs, size, chances, num_tokens) / plain


def test_a_new_sequence_is_average():
    worths = SequenceWorths()
    assert worths.of(object()) == 1.0
    assert worths.is_new(object())
    assert worths.groups([object()]) == []


def test_worth_follows_promises_and_accepted_drafts():
    worths = SequenceWorths()
    easy_one, hard_one = object(), object()
    both = [easy_one, hard_one]
    for _ in range(10):
        worths.observe_draft(both, [0.8, 0.3])
        worths.observe_result(both, [2, 0], [1.0, 1.0])
    assert worths.of(easy_one) > 1.5
    assert worths.of(hard_one) < 0.5
    assert worths.accuracy(easy_one) > 1 > worths.accuracy(hard_one)
    every, half = worths.groups(both)
    assert (every.number, half.number) == (2, 1)
    assert half.worth == half.min_worth == worths.of(easy_one) > every.worth
    worths.keep_only([hard_one])
    assert worths.is_new(easy_one)
    assert not worths.is_new(hard_one)


def test_retries_of_a_left_out_sequence_become_rare():
    worths = SequenceWorths()
    text = object()
    for _ in range(LESSONS):
        worths.observe_draft([text], [0.5])
    tried = [step for step in range(1000) if worths.members([text], 10.0, step)]
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert tried[0] == MEMORY
    assert waits == [MEMORY * 2 ** (i + 1) for i in range(len(waits))]
    assert len(tried) < 5


def test_one_sequence_drafts_for_easy_texts_alone():
    """Hard texts are given up after a few drafts each, and easy ones are not lost with them."""
    planner = SimulatedPlanner(BudgetPlanner(BOUNDS, cpu()), cpu())
    world = MixedTexts(1, turns, seed=1)
    drafted = {EASY: [], HARD: []}
    for _ in range(3000):
        text = world.texts[0]
        world.step(planner)
        drafted[text.chance].append(planner.outcomes[-1].depth > 0)
    shares = {chance: sum(all_) / len(all_) for chance, all_ in drafted.items()}
    assert shares[EASY] > 0.7
    assert shares[HARD] < 0.2


@pytest.mark.parametrize(
    ("costs", "size", "min_gain"), [(cpu, 1, 1.2), (amx, 8, 1.25), (amx, 32, 1.0)]
)
def test_mixed_texts_gain(costs, size, min_gain):
    chances = turns if size == 1 else side_by_side(size)
    num_tokens = 3000 if size == 1 else 150 * size
    assert over_plain(costs, size, chances, num_tokens) > min_gain


@pytest.mark.parametrize("factor", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "part", [PARTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PARTS[1:])]
)
def test_mixed_texts_gain_with_wrong_costs(part, factor):
    assert over_plain(cpu, 1, turns, 3000, **{part: factor}) > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", [8, 32])
def test_wrong_costs_lose_little_side_by_side(size, part, factor):
    assert over_plain(cpu, size, side_by_side(size), 150 * size, **{part: factor}) > 0.97


@pytest.mark.parametrize("size", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_hard_texts_cost_at_most_one_percent(size):
    assert over_plain(cpu, size, hard, 4000) > 0.99


def test_drafts_that_lose_end_within_30_steps_of_a_text():
    planner = SimulatedPlanner(BudgetPlanner(BOUNDS, cpu()), cpu())
    easy_world = MixedTexts(1, lambda slot, draw: EASY)
    easy_world.run(planner, 1000)
    assert planner.planner.will_draft

    planner.reset()
    world = MixedTexts(1, hard)
    world.texts[0].length = 200
    for _ in range(100):
        world.step(planner)
    drafted = [i for i, outcome in enumerate(planner.outcomes) if outcome.depth]
    assert len(drafted) < 30
    assert sum(i >= 30 for i in drafted) <= 2
