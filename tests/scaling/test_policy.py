"""How many workers a run gets: by its deadline, its market and how far it is."""

from dataclasses import replace

import pytest

from eagle_ray.scaling.policy import DeadlinePolicy, FleetSize, FleetState, UniformProgress

NONE = FleetSize(0, 0)
# Half of an hour's eight worker-hours is done by the middle.
STATE = FleetState(
    now=1800.0, began=0.0, finish_by=3600.0, start_s=100.0, tail_s=0.0, done_share=0.6,
    expected_work_s=6000.0, likely_work_s=6800.0, running=FleetSize(4, 0), starting=NONE,
    spot_share=0.8, min_workers=1, max_workers=16, has_spot=True,
)  # fmt: skip


def decide(**changes) -> FleetSize:
    return DeadlinePolicy().decide(replace(STATE, **changes))


def test_workers_of_one_market_are_those_that_are_needed():
    fixed = {"has_spot": False, "running": FleetSize(0, 4)}
    assert decide(**fixed) == FleetSize(0, 4)  # 6,800 s in 1,800 s
    assert decide(**fixed, likely_work_s=7000.0) == FleetSize(0, 4)
    assert decide(**fixed, likely_work_s=7300.0) == FleetSize(
        0, 5
    )  # the fifth takes 100 s to start
    assert decide(**fixed, likely_work_s=5600.0) == FleetSize(0, 4)  # three would just do: kept
    assert decide(**fixed, likely_work_s=4000.0) == FleetSize(0, 3)
    assert decide(**fixed, likely_work_s=90_000.0) == FleetSize(0, 16)
    assert decide(**fixed, likely_work_s=10.0, min_workers=2) == FleetSize(0, 2)
    assert decide(**fixed, finish_by=float("inf")) == FleetSize(0, 1)


def test_what_is_past_its_deadline_gets_all_workers():
    assert decide(has_spot=False, now=4000.0).on_demand == 16


def test_spot_nodes_alone_above_the_line():
    assert decide(done_share=0.6) == FleetSize(5, 0)  # as many as have enough to do
    assert decide(done_share=0.6, expected_work_s=60_000.0) == FleetSize(6, 0)
    assert decide(done_share=0.6, expected_work_s=60_000.0, spot_share=0.25) == FleetSize(16, 0)


def test_under_the_line_urgent_workers_are_on_demand():
    late = {"done_share": 0.3, "expected_work_s": 15_000.0, "likely_work_s": 17_000.0}
    assert decide(**late) == FleetSize(10, 6)  # ten are needed, and four run
    assert decide(**late | {"likely_work_s": 8000.0}).on_demand == 0  # five could still do it
    assert decide(**late | {"done_share": 0.9}).on_demand == 0


def test_near_the_end_spot_nodes_count_no_longer():
    last = decide(now=3250.0, likely_work_s=1000.0, expected_work_s=900.0, done_share=0.99)
    assert last.on_demand >= 4


def test_on_demand_is_left_two_starts_above_the_line():
    policy = DeadlinePolicy()
    late = {"done_share": 0.3, "expected_work_s": 15_000.0, "likely_work_s": 17_000.0}
    assert policy.decide(replace(STATE, **late)).on_demand
    there = {"running": FleetSize(0, 10)} | late
    assert policy.decide(replace(STATE, **there | {"done_share": 0.53})).on_demand == 10
    assert policy.decide(replace(STATE, **there | {"done_share": 0.58})).on_demand == 0


def test_uniform_progress_has_a_fixed_number_and_a_safety_net():
    policy = UniformProgress()
    assert policy.decide(replace(STATE, now=0.0)) == FleetSize(3, 0)
    middle = replace(STATE, likely_work_s=3400.0, running=FleetSize(1, 0))
    assert policy.decide(replace(middle, done_share=0.4)) == FleetSize(3, 2)
    assert policy.decide(replace(middle, done_share=0.54)) == FleetSize(3, 2)
    assert policy.decide(replace(middle, done_share=0.7)) == FleetSize(3, 0)
    assert policy.decide(replace(STATE, now=3300.0, running=NONE)) == FleetSize(0, 3)


@pytest.mark.parametrize("policy", [DeadlinePolicy, UniformProgress])
def test_no_decision_is_beyond_the_limits(policy):
    for spot in range(0, 17, 4):
        for done in (0.0, 0.5, 1.0):
            for now in (0.0, 1800.0, 3500.0, 5000.0):
                state = replace(STATE, now=now, done_share=done, running=FleetSize(spot, 16 - spot))
                decided = policy().decide(state)
                assert 0 <= decided.spot <= 16 and 0 <= decided.on_demand <= 16 - spot
