"""The least logit that the cuts keep, found by bits of its order, is the one that sorting finds."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import topk_topp as kernel
from eagle_ray.methods.coupling import NUM_CUT, lowest_retained
from eagle_ray.requests.parameters import SamplingParams
from tests.support.kernels import DEVICE

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.3, top_k=5, seed=9),
    SamplingParams(temperature=1.0, top_p=0.8, seed=1),
    SamplingParams(temperature=0.9, min_p=0.1, seed=7),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.6, min_p=0.05, seed=2),
    SamplingParams(temperature=5.0, top_p=0.999, seed=5),
    SamplingParams(temperature=1.0, top_k=500, top_p=1e-6, seed=6),
    SamplingParams(top_k=3, top_p=0.5),
]


def found_and_expected(logits: torch.Tensor, params=PARAMS) -> tuple[torch.Tensor, torch.Tensor]:
    sampling, logits = SamplingBatch.of(params, DEVICE), logits.to(DEVICE)
    cuts = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    expected = lowest_retained(logits.float(), sampling, torch.arange(len(params), device=DEVICE))
    expected[sampling.temperature == 0] = -torch.inf
    return kernel.cut_floor(logits, *cuts, NUM_CUT), expected


VOCABS = [1, 7, 64, 65, 260]
FAST = [*((vocab, torch.float32) for vocab in VOCABS), (65, torch.float16), (260, torch.bfloat16)]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        pytest.param(vocab, dtype, marks=[] if (vocab, dtype) in FAST else [pytest.mark.slow])
        for vocab in VOCABS
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
    ids=str,
)
def test_the_kernel_finds_what_sorting_finds(vocab, dtype, monkeypatch):
    monkeypatch.setattr(kernel, "ROW_BLOCK", 128)
    logits = 3 * torch.randn(len(PARAMS), 2, vocab, generator=torch.Generator().manual_seed(vocab))
    found, expected = found_and_expected(logits.to(dtype))
    assert torch.equal(found, expected)


def test_rows_that_cut_nothing_are_not_read():
    """Numbers that would break the search, where nothing is to be found."""
    logits = torch.full((3, 1, 40), torch.nan)
    found, _ = found_and_expected(
        logits, [SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(top_k=3)]
    )
    assert found.isneginf().all()


def test_ties_are_kept_together():
    logits = torch.zeros(2, 1, 100)
    logits[0, 0, :3], logits[0, 0, 10:] = 1.0, -1.0
    found, _ = found_and_expected(logits, [SamplingParams(temperature=1.0, top_k=5, seed=1)] * 2)
    assert found.flatten().tolist() == [0.0, -torch.inf]  # all of the second row are the best
