"""The shared descent: threads change nothing but the time, and a run repeats."""

import torch
from torch import nn

from eagle_ray.training.head_recipe import Losses
from eagle_ray.training.optimization import Clipping, GradientDescent, Schedule, muon


def regression(num_threads: int, num_steps: int = 60) -> tuple[nn.Module, list[float]]:
    """A linear model learning a fixed matrix from 32 points a step, and its loss at every step."""
    torch.manual_seed(0)
    wanted = torch.randn(8, 8)
    model = nn.Linear(8, 8)
    optimizers = muon([model.weight], [model.bias], 0.5, 0.0)
    schedule = Schedule("plateau", num_steps, warmup_steps=40)
    descent = GradientDescent(optimizers, schedule, Clipping(norm=1.0), threads=num_threads)

    def losses_of(points: torch.Tensor) -> Losses:
        total = (model(points) - points @ wanted).square().mean(-1).sum() / 32
        return Losses(total, {"loss": total.item()})

    shown = []
    for step in range(num_steps):
        points = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        shown.append(descent.step(step, points.chunk(num_threads), losses_of)[0]["loss"])
    return model, shown


def test_the_loss_falls():
    _, losses = regression(num_threads=2)
    assert losses[-1] < losses[0] / 10


def test_two_threads_do_what_one_does():
    one, two = regression(num_threads=1, num_steps=5)[0], regression(num_threads=2, num_steps=5)[0]
    torch.testing.assert_close(
        one.weight, two.weight, rtol=0.02, atol=1e-3
    )  # Muon orthogonalizes in bf16


def test_a_run_repeats_exactly():
    first, second = regression(num_threads=2)[0], regression(num_threads=2)[0]
    assert torch.equal(first.weight, second.weight)


def test_the_rate_rises_stays_and_falls():
    factors = [Schedule("plateau", 1000, warmup_steps=40).factor(step) for step in range(1000)]
    assert factors[0] == 1 / 40
    assert factors[39] == factors[399] == 1.0
    assert factors[400:] == sorted(factors[400:], reverse=True)
    assert factors[-1] == 0.02


def test_the_published_schedule_rises_and_falls_to_nothing():
    factors = [Schedule("linear", 100, warmup_steps=10).factor(step) for step in range(101)]
    assert factors[0] == 0.1 and factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] == 0.0


def test_gradients_are_clipped_by_value_and_by_norm():
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    sgd = [torch.optim.SGD(model.parameters(), lr=1.0)]
    descent = GradientDescent(sgd, Schedule("constant", 10, 0), Clipping(value=0.5, norm=5.0))
    slopes = torch.tensor([[0.1, 30.0, 40.0]])
    _, norm = descent.step(0, [slopes], lambda shard: Losses((model.weight * shard).sum(), {}))
    assert abs(norm - 50.0) < 0.01
    torch.testing.assert_close(
        before - model.weight, torch.tensor([[0.01, 0.5, 0.5]]), rtol=1e-3, atol=1e-4
    )
