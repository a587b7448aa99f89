"""Coupling finds the weights that made the picks, reads the target's own noise, and marks what a cut would drop."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.coupling import LARGE_NOISE, Coupling, dropped
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.noise import gumbel_noise
from eagle_ray.sampling.sampler import process, sample

ROWS, VOCAB = 16, 60


def sampling_batch(temperature: float = 1.0, **params: float) -> SamplingBatch:
    return SamplingBatch.of(
        [SamplingParams(temperature=temperature, seed=i, **params) for i in range(ROWS)]
    )


@pytest.mark.parametrize("weights", [(1.5, 0.5, 0.4), (0.8, 1.5, 0.0)])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_weights_that_made_the_picks_are_recovered(weights, temperature):
    coupling, sampling, rows = Coupling(levels=2), sampling_batch(temperature), torch.arange(ROWS)
    generator, reached = (
        torch.Generator().manual_seed(0),
        torch.tensor([[False], [True]]).expand(2, ROWS),
    )
    for step in range(600):
        logits = 2 * torch.randn(ROWS, VOCAB, generator=generator)
        noise = gumbel_noise(sampling.seed, torch.full((ROWS,), step), torch.arange(VOCAB))
        push = weights[1] * noise + weights[2] * (noise - LARGE_NOISE).clamp(min=0)
        probs = (weights[0] * logits + temperature * push).softmax(-1)
        picks = torch.multinomial(probs, 1, generator=generator)[:, 0]
        logits, noise, picks = (torch.stack([x, x]) for x in (logits, noise, picks))
        coupling.update(logits, sampling, rows, noise, picks, reached)
    found = coupling.fit.parameters[1, 0, :3]
    torch.testing.assert_close(found, torch.tensor(weights), atol=0.2, rtol=0)
    assert (coupling.fit.parameters[0] == Coupling(levels=1).fit.parameters[0]).all()


@pytest.mark.parametrize("params", [{}, dict(top_p=0.8), dict(top_k=5), dict(min_p=0.1)])
def test_an_exact_drafter_with_full_weights_knows_the_pick(params):
    """The noise is the target's, at the target's position: were either wrong, 16 picks of 60 tokens would not agree."""
    coupling, sampling, rows = Coupling(levels=1), sampling_batch(1.3, **params), torch.arange(ROWS)
    coupling.fit.parameters[:] = torch.tensor([20.0, 20.0, 0.0, -1e4])
    logits = 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(7, 7 + ROWS)
    picks = sample(logits, sampling, rows, positions)
    noise, others = (
        gumbel_noise(sampling.seed, positions + i, torch.arange(VOCAB)) for i in range(2)
    )
    best = coupling.log_probs(0, logits[:, None], sampling, rows, noise).argmax(-1)[:, 0]
    assert (best == picks).all()
    assert (
        coupling.log_probs(0, logits[:, None], sampling, rows, others).argmax(-1)[:, 0] != picks
    ).any()


@pytest.mark.parametrize(
    "params", [dict(top_p=0.8), dict(top_k=5), dict(min_p=0.1), dict(top_k=9, top_p=0.5, min_p=0.1)]
)
def test_dropped_is_what_the_processors_drop(params):
    sampling, rows = sampling_batch(0.9, **params), torch.arange(ROWS)
    logits = 3 * torch.randn(ROWS, 2, VOCAB, generator=torch.Generator().manual_seed(2))
    wanted = torch.stack([process(logits[:, f], sampling, rows).isinf() for f in range(2)], 1)
    assert (dropped(logits, sampling, rows) == wanted).all() and wanted.any()


def test_what_was_dropped_wrongly_is_learned():
    """A drafter whose top-p drops half of what the target picks: dropping must come to count for little."""
    coupling, sampling, rows = Coupling(levels=1), sampling_batch(1.0, top_k=2), torch.arange(ROWS)
    coupling.fit.parameters[:, :, 3] = -5.0
    generator, reached = torch.Generator().manual_seed(3), torch.ones(1, ROWS, dtype=torch.bool)
    for step in range(300):
        logits = torch.randn(ROWS, 4, generator=generator)
        picks = torch.randint(0, 4, (ROWS,), generator=generator)
        noise = gumbel_noise(sampling.seed, torch.full((ROWS,), step), torch.arange(4))
        coupling.update(logits[None], sampling, rows, noise[None], picks[None], reached)
    assert coupling.fit.parameters[0, 0, 3] > -1.0
