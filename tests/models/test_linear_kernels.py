"""The kernel for few rows is the one that a trial found faster by far, and computes what F.linear does."""

import pytest
import torch
from torch import nn

from eagle_ray.models import linear_kernels
from eagle_ray.models.linear_kernels import FILLED_ONLY, MIN_PACKED_ROWS, Kernel, choose_kernels
from eagle_ray.models.packed_linear import PackedLinear, pack_linears
from tests.models.test_packed_linear import needs_packing

pytestmark = needs_packing


class Clock:
    """Seconds that pass as each kernel says, whatever the time."""

    def __init__(self, seconds: dict[Kernel, float]):
        self.seconds, self.now = seconds, 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """Let a trial of one row find these seconds, on a model of any size; other numbers of rows are alike."""

    def set_seconds(filled: float, packed: float, plain: float) -> None:
        clock = Clock({Kernel.FILLED: filled, Kernel.PACKED: packed, Kernel.PLAIN: plain})
        run = linear_kernels._run

        def slow_run(kernel, rows, *layer):
            clock.now += clock.seconds[kernel] if len(rows) == 1 else 1.0
            return run(kernel, rows, *layer)

        monkeypatch.setattr(linear_kernels, "_run", slow_run)
        monkeypatch.setattr(linear_kernels, "time", clock)
        monkeypatch.setattr(linear_kernels, "SAMPLE_BYTES", 1)

    return set_seconds


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 2.0, 2.0), Kernel.FILLED),
        ((1.0, 0.95, 0.95), Kernel.FILLED),  # not by far: the bits of a larger pass are worth more
        ((1.0, 0.5, 0.8), Kernel.PACKED),
        ((1.0, 2.0, 0.8), Kernel.PLAIN),
    ],
)
def test_another_kernel_is_taken_only_where_it_is_faster_by_far(timed, seconds, chosen):
    timed(*seconds)
    assert choose_kernels([nn.Linear(64, 64)]) == FILLED_ONLY | {1: chosen}


def test_weights_that_are_too_many_are_not_kept_twice(timed, monkeypatch):
    timed(1.0, 2.0, 0.1)
    monkeypatch.setattr(linear_kernels, "MAX_PLAIN_BYTES", 64 * 64 * 4)
    assert choose_kernels([nn.Linear(64, 64), nn.Linear(64, 64)]) == FILLED_ONLY


def test_bf16_keeps_the_bits_of_a_larger_pass_however_fast_another_kernel_is(timed):
    timed(1.0, 0.1, 0.1)
    assert choose_kernels([nn.Linear(64, 64, dtype=torch.bfloat16)]) == FILLED_ONLY


def test_a_small_model_is_not_tried():
    assert choose_kernels([nn.Linear(64, 64)]) == FILLED_ONLY


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 2), (5,)])
def test_every_kernel_computes_the_layer(kernel, shape):
    torch.manual_seed(0)
    plain = nn.Linear(48, 80).requires_grad_(False)
    inputs = torch.randn(*shape, 48)
    packed = PackedLinear(plain, dict.fromkeys(range(1, MIN_PACKED_ROWS), kernel))
    torch.testing.assert_close(packed(inputs), plain(inputs), atol=1e-5, rtol=0)


def test_a_models_layers_are_packed_with_what_was_chosen(timed):
    timed(1.0, 2.0, 0.5)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96))
    pack_linears(model, fewest_weights=1)
    assert all(layer._kernels[1] is Kernel.PLAIN and layer._plain is not None for layer in model)
