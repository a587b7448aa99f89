"""Offers: how often the target's picks teach."""

import torch

from eagle_ray.methods.calibration_feedback import UPDATE_INTERVAL, WARMUP_STEPS, is_due, update_interval


def taught(num_levels: int, steps: range) -> int:
    return sum(is_due(step, num_levels) for step in steps)


def test_all_of_the_first_steps_teach():
    assert taught(1, range(1, WARMUP_STEPS + 1)) == taught(9, range(1, WARMUP_STEPS + 1)) == WARMUP_STEPS


def test_later_one_in_a_few_does_and_fewer_where_trees_are_deep():
    later = range(1000, 1000 + 10 * UPDATE_INTERVAL * 9)
    assert taught(1, later) == len(later) // UPDATE_INTERVAL
    assert taught(9, later) == len(later) // 9


def test_trees_of_no_level_teach_nothing():
    assert not taught(0, range(100))


def test_a_gpu_learns_less_often():
    interval = update_interval(torch.device("cuda"))
    assert sum(is_due(step, 4, interval) for step in range(1000, 1000 + 10 * interval)) == 10
    assert interval > update_interval(torch.device("cpu")) == UPDATE_INTERVAL
