"""The fused ranking is the portable ranking, coupled or not, over all tokens or a choice of them."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import topk as kernel
from eagle_ray.methods.candidate_ranker import CandidateRanker
from eagle_ray.methods.coupling import Coupling
from eagle_ray.requests.parameters import SamplingParams
from tests.support.kernels import DEVICE

PLAIN = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
    SamplingParams(temperature=2.0, seed=5),
]
CUT = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3, top_k=4),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=2.0, min_p=0.1),
]
LENGTHS = torch.tensor([5, 9, 3, 7], device=DEVICE)


def logits_of(vocab: int, nodes: int = 2, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(4, nodes, vocab, generator=torch.Generator().manual_seed(seed))


def children(logits, width, params=PLAIN, coupling=None, token_ids=None):
    ranking = CandidateRanker(lambda features: features, None, coupling, token_ids)
    ranking.start(SamplingBatch.of(params, DEVICE), LENGTHS)
    return ranking.children(logits.to(DEVICE), None, width)


def assert_same_children(fused, portable) -> None:
    assert (fused.tokens == portable.tokens).all()
    torch.testing.assert_close(fused.log_probs, portable.log_probs, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(
        fused.draft_log_probs, portable.draft_log_probs, atol=3e-5, rtol=1e-5
    )


@pytest.mark.parametrize("vocab, width", [(1, 1), (5, 10), (97, 10), (4100, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_heads_own_ranking(vocab, width, dtype, monkeypatch):
    places = torch.stack(
        [torch.randperm(vocab, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    )
    logits = (places.view(4, 2, vocab) % 251 / 16).to(
        dtype
    )  # the best of them are apart in every dtype
    logits = logits.masked_fill(places.view(4, 2, vocab) > 250, -3.0)
    portable = children(logits, width)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    assert_same_children(children(logits, width), portable)


@pytest.mark.parametrize("params", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_coupled_ranking(params, trimmed, monkeypatch):
    monkeypatch.setattr(kernel, "TOPK_PART_TOKENS", 64)
    logits, coupling = logits_of(150), Coupling(1, DEVICE)
    coupling.fit.parameters[0, 0] = torch.tensor([1.1, 0.8, 0.4, -6.0], device=DEVICE)
    ids = (
        torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:150].to(DEVICE)
        if trimmed
        else None
    )
    portable = children(logits, 6, params, coupling, ids)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    assert_same_children(children(logits, 6, params, coupling, ids), portable)


def test_of_equal_scores_the_lower_place_comes_first(monkeypatch):
    monkeypatch.setattr(kernel, "TOPK_PART_TOKENS", 16)
    logits = (
        torch.randint(0, 3, (2, 3, 100), generator=torch.Generator().manual_seed(1))
        .float()
        .to(DEVICE)
    )
    scores, places, _ = kernel.top_k(logits, 20)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :20]
    assert (places == order).all()
    torch.testing.assert_close(scores, logits.log_softmax(-1).gather(-1, order))


@pytest.mark.parametrize("coupling", [None, Coupling(1, DEVICE)], ids=["own", "coupled"])
def test_a_head_that_overflows_offers_nothing(coupling, monkeypatch):
    monkeypatch.setattr(kernel, "TOPK_PART_TOKENS", 16)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    logits = logits_of(40)
    logits[0, 0, 7], logits[1, 1, 20] = torch.nan, torch.inf
    logits[2, 0], logits[3, 1, :39] = -torch.inf, -torch.inf
    found = children(logits, 5, coupling=coupling)
    nothing = found.log_probs.isneginf().all(-1)
    assert nothing.tolist() == [[True, False], [False, True], [True, False], [False, False]]
    assert ((found.tokens >= 0) & (found.tokens < 40)).all()
    assert found.log_probs[3, 1, 0] == 0 and found.tokens[3, 1, 0] == 39


def test_what_is_too_wide_goes_the_portable_way(monkeypatch):
    portable = children(logits_of(90), kernel.MAX_K + 1)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    assert_same_children(children(logits_of(90), kernel.MAX_K + 1), portable)
