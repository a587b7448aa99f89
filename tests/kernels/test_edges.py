"""Picks of either path under top-p differ only at its edge, and what tells that from a fault tells it right."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.evaluation.method_comparison import Equivalence
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import NEAR_TIE, reachable_tokens, rounding_cause
from eagle_ray.sampling.sampler import sample
from tests.support.kernels import DEVICE

ROWS, VOCAB = (256, 128256) if DEVICE == "cuda" else (24, 700)
PARAMS = [SamplingParams(temperature=1.0, top_p=(i + 0.5) / ROWS, seed=i) for i in range(ROWS)]


def random_logits() -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return 2 * torch.randn(ROWS, VOCAB, generator=generator, device=DEVICE)


def picks(logits: torch.Tensor) -> list[int]:
    rows = torch.arange(ROWS, device=DEVICE)
    return sample(logits, SamplingBatch.of(PARAMS, DEVICE), rows, rows).tolist()


def compared(logits: torch.Tensor, found: list[int], wanted: list[int]) -> Equivalence:
    """Compare picks of the same rows; rounding may explain one that differs."""
    total = Equivalence()
    for i, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        cause = None
        if mine != other:
            cause = rounding_cause(logits[i], PARAMS[i], i, other, mine, NEAR_TIE[torch.float32])
        total += Equivalence(1, mine == other, cause == "tie", cause == "cut")
    return total


def test_kernels_pick_what_the_portable_path_picks(fused, monkeypatch):
    logits = random_logits()
    found = picks(logits)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    same = compared(logits, found, picks(logits))
    assert same.is_explained and same.num_equal >= 0.9 * ROWS


def test_a_wrong_pick_is_no_edge():
    found = picks(logits := random_logits())
    wrong = compared(logits, [(token + 1) % VOCAB for token in found], found)
    assert not wrong.is_explained and wrong.num_equal == 0


@pytest.mark.parametrize(
    "top_p, edge", [(0.5, True), (0.500005, True), (0.4999, False), (0.8, False), (1.0, False)]
)
def test_the_edge_is_where_a_tokens_sum_meets_top_p(top_p, edge):
    """Ascending sums are 0.2, 0.5 and 1: 0.5 of probability are dropped, or 0.3 to 0.7."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    position = next(
        i
        for i in range(100)
        if reachable_tokens(logits, SamplingParams(temperature=1.0), i, 1e-6)[1]
    )
    params = SamplingParams(
        temperature=1.0, top_p=top_p
    )  # noise at this position prefers token 1 where top-p keeps it
    assert bool(reachable_tokens(logits, params, position, 1e-6)[:2].all()) == edge
    assert not reachable_tokens(
        logits, SamplingParams(temperature=0.0, top_p=top_p), position, 1e-6
    )[1]


def test_what_is_explained_needs_something_to_explain():
    assert not Equivalence().is_explained and Equivalence(3, 1, 1, 1).is_explained
    assert not Equivalence(3, 1, 1, 0).is_explained
