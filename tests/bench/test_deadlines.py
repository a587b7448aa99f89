"""Policies on a simulated clock: a few small worlds, and the bench's figures on more of them (slow)."""

import dataclasses
import json
import math

import numpy as np
import pytest

from eagle_ray.scaling.policy import DeadlinePolicy, FixedWorkers, FleetSize, UniformProgress
from jobs.bench.deadlines import capped, compare, fixed_world, promise_errors, world_of
from jobs.bench.public_spot_traces import read_trace
from jobs.bench.simulated_fleet import ON_DEMAND, SPOT, SpotTrace, World, oracle_dollars, simulate

ALWAYS = SpotTrace(np.array([1e9]), np.array([16]))
# 800 rows of 100 tokens in ten slots: a worker needs 8,000 s.
PLAIN = World(
    lengths=np.full(800, 1000.0), classes=np.array(["a"] * 800), slots=10, token_s=0.1,
    speed=lambda now: 1.0, room=ALWAYS, finish_s=3000.0, prices={ON_DEMAND: 3.0, SPOT: 1.0},
    start_s=100.0, max_tokens=1000,
)  # fmt: skip


def test_a_plain_job_ends_when_arithmetic_says():
    outcome = simulate(PLAIN, FixedWorkers(FleetSize(0, 4)))
    assert outcome.ended_s == pytest.approx(100 + 2000, abs=20)
    assert outcome.dollars == pytest.approx(4 * 2100 * 3 / 3600, rel=0.02)
    assert oracle_dollars(PLAIN) == pytest.approx(8000 / 3600, rel=0.05)
    assert outcome.rows_done == 800 and outcome.losses == 0


def test_lost_nodes_lose_their_rows_and_nothing_else():
    gone = SpotTrace(np.array([650.0, 1200.0, 1e9]), np.array([4, 0, 4]))
    outcome = simulate(dataclasses.replace(PLAIN, room=gone), FixedWorkers(FleetSize(4, 0)))
    assert outcome.rows_done == 800 and outcome.losses == 4 and outcome.lost_s > 0
    assert outcome.ended_s == pytest.approx(2100 + 650 + outcome.lost_s / 4, abs=20)


def test_on_demand_only_where_spot_nodes_would_not_do():
    cheap = simulate(PLAIN, DeadlinePolicy())
    assert cheap.worker_s[ON_DEMAND] == 0 and cheap.ended_s < 3000
    never = SpotTrace(np.array([1e9]), np.array([0]))
    alone = simulate(dataclasses.replace(PLAIN, room=never), DeadlinePolicy())
    assert alone.worker_s[SPOT] == 0 and alone.ended_s < 3000


def test_a_speed_that_halves_is_made_up_for():
    slower = dataclasses.replace(PLAIN, has_spot=False, speed=lambda t: 1.0 if t < 1500 else 0.5)
    assert simulate(slower, DeadlinePolicy()).ended_s < 3000
    fixed = simulate(slower, FixedWorkers(FleetSize(0, 3)))
    assert fixed.ended_s > 3000


def test_a_cap_stops_before_its_dollars():
    cheap = dataclasses.replace(PLAIN, max_dollars=3.0, finish_s=math.inf)
    outcome = simulate(cheap, FixedWorkers(FleetSize(0, 4)))
    assert 0 < outcome.num_stopped < 800 and 2.5 < outcome.dollars <= 3.06


def test_zones_of_a_public_trace_add_up_from_any_moment(tmp_path):
    zones = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, data in zip(zones, ([0, 2, 2, 1], [1, 1, 1, 3, 9]), strict=True):
        path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": data}))
    trace = read_trace(zones)
    assert trace.seconds == 1200
    room = trace.starting_at(400)  # in the second tick
    assert [room(now) for now in (0, 299, 599, 600, 5000)] == [3, 3, 3, 4, 4]
    zones[1].write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [1]}))
    with pytest.raises(ValueError, match="one gap between ticks"):
        read_trace(zones)


def test_the_oracle_pays_a_start_for_new_nodes_alone():
    steady = SpotTrace(np.array([1e9]), np.array([4]))
    growing = SpotTrace(np.array([600.0, 1200.0, 1e9]), np.array([4, 5, 4]))
    worlds = [dataclasses.replace(PLAIN, room=trace) for trace in (steady, growing)]
    assert oracle_dollars(worlds[0]) == pytest.approx(oracle_dollars(worlds[1]), rel=0.01)
    gone = SpotTrace(np.array([600.0, 700.0, 1e9]), np.array([4, 0, 4]))
    dearer = oracle_dollars(dataclasses.replace(PLAIN, room=gone))
    assert dearer > 1.01 * oracle_dollars(worlds[0])


@pytest.mark.parametrize("seed", [0, 3])
def test_small_worlds_are_in_time(seed):
    world = world_of(seed, scale=0.4)
    assert compare(world, DeadlinePolicy()).end <= 1


@pytest.mark.slow
def test_no_deadline_is_missed_that_uniform_progress_meets():
    for seed in range(12):
        baseline = compare(world_of(seed), UniformProgress())
        ours = compare(world_of(seed), DeadlinePolicy())
        assert ours.end <= 1 or baseline.end > 1, seed
        assert ours.cost < 1.6, seed


@pytest.mark.slow
def test_promises_and_caps():
    late = []
    for seed in range(8):
        for share, error, *_ in promise_errors(fixed_world(seed), workers=6):
            if share >= 0.5 and abs(error) > 0.1:
                late.append((seed, share, error))
        spent, _ = capped(fixed_world(seed), 6, 0.8)
        assert spent <= 1.02, seed
        assert capped(fixed_world(seed), 6, 1.1)[1] == 0, seed
    assert not late
