"""The seconds that a run and its workers took, over attempts."""

from eagle_ray.batch.driver.usage_meter import UsageMeter


def test_workers_count_from_their_start_between_the_fewest_and_the_most():
    meter = UsageMeter(2, 4, 0.5, None, now=100.0)
    meter.update(0, 110.0)
    meter.update(3, 120.0)
    meter.update(9, 130.0)  # restarted ones
    assert meter.usage() == {"elapsed_s": 30.0, "worker_s": 20.0 + 30.0 + 40.0, "gpus_per_worker": 0.5}


def test_earlier_attempts_count_and_unknown_ones_make_it_unknown():
    earlier = {"usage": {"elapsed_s": 5.0, "worker_s": 7.0, "gpus_per_worker": 1}}
    meter = UsageMeter(1, 1, 1, earlier, now=0.0)
    meter.update(1, 2.0)
    assert meter.usage() == {"elapsed_s": 7.0, "worker_s": 9.0, "gpus_per_worker": 1}
    assert UsageMeter(1, 1, 1, {"elapsed_s": 3.0}, now=0.0).usage() is None
    assert UsageMeter(1, 1, 1, {"usage": None}, now=0.0).usage() is None
