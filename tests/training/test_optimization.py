"""The shared descent: threads change nothing but the time, and a run repeats."""

import torch
from torch import nn

from eagle_ray.training.optimization import GradientDescent, Losses, learning_rate_factor


def regression(num_threads: int, num_steps: int = 60) -> tuple[nn.Module, list[float]]:
    """A linear model learning a fixed matrix from 32 points a step, and its loss at every step."""
    torch.manual_seed(0)
    wanted = torch.randn(8, 8)
    model = nn.Linear(8, 8)
    descent = GradientDescent(
        [model.weight], [model.bias], num_steps=num_steps, matrix_rate=0.5, other_rate=0.02, max_norm=1.0
    )

    def losses_of(points: torch.Tensor) -> Losses:
        total = (model(points) - points @ wanted).square().mean(-1).sum()
        return Losses(total, len(points), {"loss": total.item()})

    shown = []
    for step in range(num_steps):
        points = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        shown.append(descent.step(step, points.chunk(num_threads), losses_of).means["loss"])
    return model, shown


def test_the_loss_falls():
    _, losses = regression(num_threads=2)
    assert losses[-1] < losses[0] / 10


def test_two_threads_do_what_one_does():
    one, two = regression(num_threads=1, num_steps=5)[0], regression(num_threads=2, num_steps=5)[0]
    torch.testing.assert_close(one.weight, two.weight, rtol=0.02, atol=1e-3)  # Muon orthogonalizes in bf16


def test_a_run_repeats_exactly():
    first, second = regression(num_threads=2)[0], regression(num_threads=2)[0]
    assert torch.equal(first.weight, second.weight)


def test_the_rate_rises_stays_and_falls():
    factors = [learning_rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 1 / 40
    assert factors[39] == factors[399] == 1.0
    assert factors[400:] == sorted(factors[400:], reverse=True)
    assert factors[-1] == 0.02
