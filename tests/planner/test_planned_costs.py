"""Costs of steps that are planned from a card's figures, next to those that were measured."""

from dataclasses import replace

import pytest

from eagle_ray.core.errors import ConfigError
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.planner.cards import CARDS, find_card
from eagle_ray.planner.planned_costs import PairSizes, planned_costs
from eagle_ray.planner.steady_step import FullBatch, steady_step
from jobs.bench.simulated_costs import h100, h200

WEIGHTS = 7.5e9  # of a Llama 8B, its embedding left out
LLAMA = PairSizes(2 * WEIGHTS, 0, 1.0, WEIGHTS, 0, 131_072, 0.8e9, 2, 4096, 32)
BOUNDS = TreeBounds(60, 6, 10)


@pytest.mark.parametrize(
    ("name", "measured", "error"), [("h200", h200(), 0.08), ("h100", h100(), 0.1)]
)
def test_passes_are_planned_as_they_were_measured(name, measured, error):
    planned = planned_costs(find_card(name), LLAMA)
    for rows in measured.verify.rows:
        assert planned.verify(rows) == pytest.approx(measured.verify(rows), rel=error), rows
    assert planned.attention_per_token == pytest.approx(measured.attention_per_token, rel=0.1)
    for rows in (1, 40, 256, 640):
        assert planned.expand(rows) == pytest.approx(measured.expand(rows), rel=0.25), rows


def test_a_card_with_more_bandwidth_takes_less_time():
    seconds = {name: planned_costs(card, LLAMA).verify(1) for name, card in CARDS.items()}
    by_bandwidth = sorted(CARDS, key=lambda name: CARDS[name].bandwidth_gb_s)
    assert sorted(seconds, key=seconds.__getitem__, reverse=True) == by_bandwidth


def test_ranks_read_their_part_and_add_up_over_the_link():
    half = replace(LLAMA, dense_bytes=WEIGHTS, dense_weights=WEIGHTS / 2, num_ranks=2)
    one = planned_costs(find_card("h100"), LLAMA)
    two = planned_costs(find_card("h100"), half)
    slow = planned_costs(replace(find_card("h100"), link_gb_s=32), half)
    assert one.verify(1) / 2 < two.verify(1) < one.verify(1)
    assert two.verify(2048) < slow.verify(2048)


def test_a_row_reads_its_own_experts_and_many_rows_read_all():
    sizes = replace(LLAMA, dense_bytes=2e9, expert_bytes=28e9, active_share=1 / 16)
    assert sizes.read_bytes(1) == pytest.approx(2e9 + 28e9 / 16)
    assert sizes.read_bytes(200) == pytest.approx(30e9, rel=1e-3)


def test_a_plain_step_has_a_token_for_each_slot():
    costs = planned_costs(find_card("h100"), LLAMA)
    step = steady_step(costs, BOUNDS, FullBatch(64, 64 * 400), None)
    assert step.tau == 1.0 and step.seconds == costs.plain_seconds(64, 64 * 400)


def test_names_are_those_of_the_table_in_any_case():
    assert find_card("H100").name == "h100"
    assert find_card("h100").is_device("NVIDIA H100 80GB HBM3")
    assert not find_card("h100").is_device("NVIDIA H100 PCIe")
    assert find_card("a100").is_device("NVIDIA A100-SXM4-80GB")
    assert not find_card("a100-40").is_device("NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match=r"--gpus: 'v100' is no known card\. Known: a10, a100, "):
        find_card("v100")
