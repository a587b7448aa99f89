"""Products in several threads: the team's, shared by threads of Python and new in a forked child, and OpenMP's."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from eagle_ray.kernels import cpu_ops
from tests.support.quantised_weights import ROWS, large_weight

pytestmark = pytest.mark.skipif(
    cpu_ops.best_library() is None, reason="no compiled library for this processor"
)


@pytest.fixture(params=[2, 3, 7])
def num_threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("in_team", [True, False])
def test_any_number_of_threads_computes_the_bits_of_one(num_threads, in_team):
    weight = large_weight()
    with cpu_ops.team(in_team):
        found = [cpu_ops.quantized_matmul(ROWS, weight, None) for _ in range(20)]
    torch.set_num_threads(1)
    alone = cpu_ops.quantized_matmul(ROWS, weight, None)
    assert all(torch.equal(each, alone) for each in found)


def test_regions_of_changing_sizes_follow_each_other(num_threads):
    """A member that goes on late must not take another region's size for its own."""
    weight = large_weight()
    expected = cpu_ops.quantized_matmul(ROWS[:4], weight, None)
    for i in range(2000):
        torch.set_num_threads(2 + i * num_threads % 6)
        with cpu_ops.team():
            found = cpu_ops.quantized_matmul(ROWS[:4], weight, None)
        assert torch.equal(found, expected)


def test_a_team_in_a_team_is_the_same_one(num_threads):
    with cpu_ops.team():
        with cpu_ops.team():
            assert cpu_ops.num_threads() == num_threads
        assert cpu_ops.num_threads() == num_threads
    assert torch.get_num_threads() == num_threads


def test_torch_has_one_thread_in_the_team_and_all_afterwards(num_threads):
    with cpu_ops.team():
        assert cpu_ops.num_threads() == num_threads and torch.get_num_threads() == 1
    assert cpu_ops.num_threads() == torch.get_num_threads() == num_threads
    with pytest.raises(ValueError, match="inside"), cpu_ops.team():
        raise ValueError("inside")
    assert torch.get_num_threads() == num_threads


def test_python_threads_that_compute_at_once_get_own_results():
    """One of them has the team; the others compute alone meanwhile."""
    weight, results = large_weight(), {}
    expected = [cpu_ops.quantized_matmul(ROWS * i, weight, None) for i in range(4)]

    def compute(i):
        torch.set_num_threads(2)
        with cpu_ops.team():
            results[i] = [cpu_ops.quantized_matmul(ROWS * i, weight, None) for _ in range(50)]

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(1)
    for i in range(4):
        assert all(torch.equal(each, expected[i]) for each in results[i])


FORK = """
import os, signal
import torch
from eagle_ray.kernels import cpu_ops
from tests.support.quantised_weights import ROWS, large_weight

torch.set_num_threads(2)
weight = large_weight()

def product():
    with cpu_ops.team():
        return cpu_ops.quantized_matmul(ROWS, weight, None).numpy().tobytes()

expected = product()
child = os.fork()
if not child:
    signal.alarm(60)  # seconds; a child that waits for threads it does not have is ended
    os._exit(product() != expected)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert product() == expected
"""


def test_a_forked_child_has_a_team_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=200, env=dict(os.environ))
