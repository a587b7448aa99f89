"""Noise that is pinned, processors that are transformers' own, and the law of the pick."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import GREEDY_BELOW
from eagle_ray.core.seeds import as_int64, mix64, sample_seed
from eagle_ray.requests.parameters import MAX_TEMPERATURE, SamplingParams
from eagle_ray.sampling.noise import gumbel_noise, keyed_hash, mix64_tensor
from eagle_ray.sampling.sampler import process, sample

MASK = 2**64 - 1


def slow_hash(seed: int, position: int, token: int) -> int:
    key = mix64((mix64(seed) + position) & MASK)
    return mix64((key + token * 0x9E3779B97F4A7C15) & MASK) >> 32


def test_mix64_is_splitmix64s_finaliser():
    """The first outputs of splitmix64 seeded with 0, as published: state advances by the golden gamma."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(gamma * i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_mix64_on_tensors_equals_mix64_on_integers(value):
    assert mix64_tensor(torch.tensor([value])).item() == as_int64(mix64(value))


def test_the_hash_is_pinned():
    """Changing the noise changes every sampled output of every run: these numbers are a contract."""
    hashes = keyed_hash(torch.tensor([0, 7, -5]), torch.tensor([0, 12, 999]), torch.arange(4))
    assert hashes.tolist() == [
        [slow_hash(s, p, t) for t in range(4)] for s, p in ((0, 0), (7, 12), (-5, 999))
    ]
    assert hashes[1].tolist() == [639153043, 99067993, 803890576, 2567319236]


def test_noise_is_finite_at_the_ends_of_the_hash(monkeypatch):
    from eagle_ray.sampling import noise as module

    monkeypatch.setattr(module, "keyed_hash", lambda *_: torch.tensor([[0, 1, 2**31, 2**32 - 1]]))
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), torch.arange(4))
    assert noise.isfinite().all() and noise[0].tolist() == sorted(noise[0].tolist(), reverse=True)


def test_noise_is_standard_gumbel():
    """Mean 0.5772 and variance 1.6449 over 4 million values; 6 standard errors: false alarms below 1e-8."""
    noise = gumbel_noise(torch.arange(1000), torch.arange(1000), torch.arange(4000)).double()
    assert abs(noise.mean().item() - 0.57722) < 6 * 1.2825 / 2000
    assert (
        abs(noise.var().item() - 1.64493) < 6 * 0.0018
    )  # sd of the sample variance: sqrt((4.4 + 2) / 4e6) * 1.645


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0.7),
        dict(temperature=1.3, top_k=5),
        dict(temperature=1.0, top_p=0.8),
        dict(temperature=0.9, min_p=0.1),
        dict(temperature=0.9, min_p=1.0),
        dict(temperature=1.1, top_k=20, top_p=0.6, min_p=0.05),
        dict(temperature=1.0, top_k=1000, top_p=1e-6),
    ],
)
def test_processors_equal_transformers(params):
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * 3
    sampling = SamplingBatch.of([SamplingParams(**params)])
    wanted = TemperatureLogitsWarper(params["temperature"])(None, logits)
    wanted = TopKLogitsWarper(params["top_k"])(None, wanted) if "top_k" in params else wanted
    wanted = TopPLogitsWarper(params["top_p"])(None, wanted) if "top_p" in params else wanted
    wanted = MinPLogitsWarper(params["min_p"])(None, wanted) if "min_p" in params else wanted
    torch.testing.assert_close(
        process(logits, sampling, torch.zeros(40, dtype=torch.int64)), wanted
    )


@pytest.mark.parametrize("tail, is_kept", [(0.0995, False), (0.1005, True)])
def test_top_p_drops_what_lies_past_p_and_no_more(tail, is_kept):
    """The two likeliest tokens together stand just above p = 0.9, or just below it."""
    logits = torch.tensor([[0.5, 0.5 - tail, tail]]).log()
    scores = process(
        logits,
        SamplingBatch.of([SamplingParams(temperature=1.0, top_p=0.9)]),
        torch.zeros(1).long(),
    )
    assert scores.isfinite().tolist() == [[True, True, is_kept]]


def test_rows_of_one_pass_keep_their_own_parameters():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3, top_k=2),
        SamplingParams(temperature=0.5, seed=4),
    ]
    logits = torch.randn(30, 17, generator=torch.Generator().manual_seed(1))
    seq, positions = torch.arange(30) % 3, torch.arange(30)
    together = sample(logits, SamplingBatch.of(params), seq, positions)
    for i, one in enumerate(params):
        rows = seq == i
        alone = sample(logits[rows], SamplingBatch.of([one]), seq[rows] * 0, positions[rows])
        assert together[rows].tolist() == alone.tolist()


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(4))
    rows = torch.arange(50)
    picks = sample(
        logits, SamplingBatch.of([SamplingParams(temperature=temperature, seed=1)]), rows * 0, rows
    )
    assert picks.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, MAX_TEMPERATURE])
def test_scores_at_temperature_bounds_are_finite_and_in_order(temperature):
    logits = 30 * torch.randn(20, 97, generator=torch.Generator().manual_seed(4))
    scores = process(
        logits, SamplingBatch.of([SamplingParams(temperature=temperature)]), torch.zeros(20).long()
    )
    assert scores.isfinite().all()
    assert (scores.gather(1, logits.argsort(-1)).diff() >= 0).all()


def test_greedy_ties_go_to_the_lowest_id():
    assert (
        sample(
            torch.zeros(1, 9),
            SamplingBatch.of([SamplingParams()]),
            torch.tensor([0]),
            torch.tensor([0]),
        )
        == 0
    )


def test_the_pick_follows_the_processed_distribution():
    """Chi-square over 200,000 draws, 7 degrees of freedom; the 1e-6 quantile is 38.3: one false alarm in a million."""
    draws = 200_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0]).expand(draws, 8)
    sampling = SamplingBatch.of([SamplingParams(temperature=1.3, seed=11)])
    picks = sample(logits, sampling, torch.zeros(draws, dtype=torch.int64), torch.arange(draws))
    expected = (logits[0] / 1.3).softmax(-1) * draws
    observed = torch.bincount(picks, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 38.3


def test_sample_zero_keeps_the_seed():
    assert sample_seed(-7, 0) == -7
    assert len({sample_seed(5, j) for j in range(1000)}) == 1000


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("temperature", "1"),
        ("temperature", float("inf")),
        ("temperature", 1e308),
        ("temperature", 100.1),
        ("top_k", 2.5),
        ("top_k", 2**63),
        ("top_k", float("inf")),
        ("min_p", "0"),
        ("max_tokens", 1.5),
        ("max_tokens", float("inf")),
        ("seed", 1.5),
        ("seed", 2**64),
        ("top_logprobs", 2.5),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^SamplingParams.{field}: must be "):
        SamplingParams(**{field: value})
