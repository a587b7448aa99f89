"""near_tie: what rounding can make the target sample is found, and nothing more than that is excused."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import reachable_tokens, rounding_cause
from eagle_ray.sampling.sampler import sample

VOCAB = 40
FILTERS = [
    dict(),
    dict(top_k=5),
    dict(top_p=0.8),
    dict(min_p=0.05),
    dict(top_k=12, top_p=0.9),
    dict(top_k=20, top_p=0.7, min_p=0.02),
]


def sampled_tokens(logits: torch.Tensor, params: SamplingParams, position: int) -> list[int]:
    """Return the token of each row of logits [R, V]."""
    rows = torch.zeros(len(logits), dtype=torch.long)
    return sample(logits, SamplingBatch.of([params]), rows, rows + position).tolist()


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        pytest.param(
            temperature,
            filters,
            id=f"{temperature}-{filters}",
            marks=[pytest.mark.slow] * ((i + j) % 3 > 0),
        )
        for i, temperature in enumerate([0.3, 1.0, 1.5])
        for j, filters in enumerate(FILTERS)
    ],
)
def test_whatever_rounding_makes_of_a_sample_is_reachable(filters, temperature):
    """Logits that move by half the tolerance each, as in bf16: each token sampled then was named before."""
    torch.manual_seed(0)
    changed = 0
    for position in range(120):
        params = SamplingParams(temperature=temperature, seed=position, **filters)
        logits, tolerance = 2 * torch.randn(VOCAB), 0.2
        moved = logits + (torch.rand(200, VOCAB) - 0.5) * tolerance
        reachable = reachable_tokens(logits, params, position, tolerance)
        tokens = set(sampled_tokens(moved, params, position))
        assert reachable[list(tokens)].all()
        changed += len(tokens) > 1
    assert changed >= 5  # the noise was large enough to matter


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_what_fp32_rounding_cannot_reach_is_not_excused(filters):
    torch.manual_seed(0)
    excused = 0
    for position in range(300):
        params = SamplingParams(temperature=1.0, seed=position, **filters)
        logits = 2 * torch.randn(VOCAB)
        reachable = reachable_tokens(logits, params, position, 1e-4)
        assert reachable[sampled_tokens(logits[None], params, position)[0]]
        excused += int(reachable.sum()) - 1
    assert excused <= 2


def test_causes_are_told_apart():
    logits = torch.tensor([1.0, 0.99995, 0.5, -3.0])
    assert rounding_cause(logits, SamplingParams(), 0, 0, 1, 1e-4) == "tie"
    assert rounding_cause(logits, SamplingParams(), 0, 0, 2, 1e-4) is None

    params = SamplingParams(temperature=1.0, top_k=1)
    position = next(
        i
        for i in range(100)
        if sampled_tokens(logits[None], SamplingParams(temperature=1.0, top_k=2), i) == [1]
    )
    assert sampled_tokens(logits[None], params, position) == [0]
    assert (
        rounding_cause(logits, params, position, 0, 1, 1e-4) == "cut"
    )  # the top two change places
    assert rounding_cause(logits, params, position, 0, 1, 1e-6) is None


def test_a_low_temperature_magnifies_what_rounding_does():
    logits = torch.tensor([0.0, 0.0, -9.0])

    def num_ties(temperature: float) -> int:
        params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(200)]
        return sum(bool(reachable_tokens(logits, p, 0, 0.01)[:2].all()) for p in params)

    assert num_ties(1.0) < 10 < 50 < num_ties(0.01)
