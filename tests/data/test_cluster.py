"""How many engines a cluster carries, and how rows are shared out among them."""

import pytest

from eagle_ray.config import ExecutionConfig
from eagle_ray.data.cluster import Workers, plan_workers
from eagle_ray.data.pipeline import CALLS_PER_ACTOR, _batch_size
from eagle_ray.data.stops import ClusterError


@pytest.mark.parametrize(
    ("settings", "device", "resources", "wanted"),
    [
        ({}, "auto", {"CPU": 2}, Workers(1, 1, 0, threads=2)),
        ({}, "auto", {"CPU": 16}, Workers(8, 8, 0, threads=2)),
        ({}, "auto", {"CPU": 96}, Workers(8, 8, 0, threads=12)),
        ({"actors": 2}, "auto", {"CPU": 2}, Workers(2, 2, 0, threads=1)),
        ({}, "auto", {"CPU": 16, "GPU": 8}, Workers(8, 8, 1, threads=2)),
        ({"gpus_per_actor": 2}, "auto", {"CPU": 16, "GPU": 8}, Workers(4, 4, 2, threads=4)),
        ({"gpus_per_actor": 0.5}, "cuda", {"CPU": 4, "GPU": 1}, Workers(2, 2, 0.5, threads=2)),
        ({"actors": 3}, "auto", {"CPU": 6, "GPU": 2}, Workers(3, 3, 0.5, threads=2)),
        ({"actors": 2}, "auto", {"CPU": 6, "GPU": 8}, Workers(2, 2, 1, threads=3)),
        ({}, "cpu", {"CPU": 8, "GPU": 8}, Workers(4, 4, 0, threads=2)),
        ({"actors": {"min": 2, "max": 6}}, "auto", {"CPU": 6}, Workers(2, 6, 0, threads=1)),
    ],
)
def test_actors_follow_the_clusters_devices(settings, device, resources, wanted):
    assert plan_workers(ExecutionConfig.model_validate(settings), device, resources, num_rows=1000) == wanted


def test_there_are_never_more_actors_than_rows():
    assert plan_workers(ExecutionConfig(actors=4), "cpu", {"CPU": 4}, num_rows=3).most == 3


@pytest.mark.parametrize(("settings", "device"), [({}, "cuda"), ({"gpus_per_actor": 1}, "auto")])
def test_gpus_that_are_not_there_stop_the_job(settings, device):
    with pytest.raises(ClusterError, match="GPU"):
        plan_workers(ExecutionConfig.model_validate(settings), device, {"CPU": 4}, num_rows=10)


@pytest.mark.parametrize("slots", [1, 2, 16, 64])
def test_what_is_in_flight_fills_the_slots_several_times_over(slots):
    assert _batch_size(slots, actors=2, num_rows=10_000) * CALLS_PER_ACTOR >= 4 * slots


def test_few_rows_are_spread_over_all_actors():
    assert _batch_size(slots=16, actors=4, num_rows=16) == 2
    assert _batch_size(slots=16, actors=4, num_rows=1) == 1
