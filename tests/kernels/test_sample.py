"""The fused picks, of Triton and of a CPU's library, are the portable pick: token for token,
whatever the cuts, the ties, the dtype or the row's parts.
"""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import cpu_ops, jit_functions
from eagle_ray.kernels import sample as kernel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.noise import gumbel_noise
from eagle_ray.sampling.sampler import process, sample
from tests.support.kernels import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.3, top_k=5, seed=9),
    SamplingParams(temperature=1.0, top_p=0.8, seed=1),
    SamplingParams(temperature=0.9, min_p=0.1, seed=-7),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.6, min_p=0.05, seed=2**63),
    SamplingParams(temperature=2.0, top_p=0.99, seed=5),
    SamplingParams(temperature=1.0, top_k=500, top_p=1e-6, seed=6),
]


def sampled_by_kernels(logits, params, seq, positions, block: int = kernel.TOKENS_PER_PART):
    """By the kernels, on their device; the tokens are on the CPU."""
    sampling = SamplingBatch.of(params, DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_RAY_KERNELS", "triton")
        patch.setattr(kernel, "TOKENS_PER_PART", block)
        return sample(logits.to(DEVICE), sampling, seq.to(DEVICE), positions.to(DEVICE)).cpu()


def sampled_by_torch(logits, params, seq, positions):
    """By torch alone, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_ops, "best_library", lambda: None)
        return sample(logits, SamplingBatch.of(params), seq, positions)


def tokens_of_both_paths(
    logits, params, seed: int = 0, block: int = kernel.TOKENS_PER_PART
) -> tuple[list[int], list[int]]:
    """The tokens of the portable path and of the kernels, row i having the i-th of the parameters in turn.

    The library for CPUs, where there is one, has to pick the same.
    """
    rows = torch.arange(len(logits))
    at = rows % len(params), rows * 100 + seed
    wanted = sampled_by_torch(logits, params, *at).tolist()
    if cpu_ops.best_library():
        assert sample(logits, SamplingBatch.of(params), *at).tolist() == wanted
    return wanted, sampled_by_kernels(logits, params, *at, block).tolist()


@triton.jit
def _noise(seeds, positions, out, SIZE: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, SIZE)
    key = jit_functions.noise_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(out + row * SIZE + tokens, jit_functions.gumbel(key, tokens.to(tl.int64)))


@triton.jit
def _logs(numbers, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    v = tl.load(numbers + at)
    tl.store(out + at, jit_functions.log(v))
    tl.store(out + SIZE + at, jit_functions.log_1_minus(v))


def test_the_noise_is_the_portable_noise():
    seeds, positions = torch.tensor([0, -5, 2**63 - 1]), torch.tensor([0, 999, 2**31])
    out = torch.empty(3, 1 << 14, device=DEVICE)
    _noise[(3,)](seeds.to(DEVICE), positions.to(DEVICE), out, SIZE=1 << 14)
    torch.testing.assert_close(
        out.cpu(), gumbel_noise(seeds, positions, torch.arange(1 << 14)), atol=2e-6, rtol=3e-7
    )


def test_the_logarithms_hold_at_the_ends_of_the_uniform():
    v = torch.cat([2.0 ** torch.linspace(-33, -0.001, 4000), 1 - 2.0 ** -torch.arange(1, 25.0)])
    v = torch.cat([v, torch.full((4096 - len(v),), 0.25)]).clamp(max=1 - 2.0**-24)
    out = torch.empty(2, 4096, device=DEVICE)
    _logs[(1,)](v.to(DEVICE), out, SIZE=4096)
    wanted = torch.stack([v.double().log(), (-v.double()).log1p()])
    assert (
        (out.cpu() / wanted - 1).abs() < 5e-7
    ).all()  # a GPU's division alone may be off by 2.4e-7


@pytest.mark.parametrize(
    "dtype, block",
    [(torch.float32, 2048), (torch.float16, 2048), (torch.bfloat16, 2048), (torch.bfloat16, 128)],
    ids=str,
)
def test_every_cut_picks_the_portable_token(dtype, block):
    logits = (3 * torch.randn(8, 301, generator=torch.Generator().manual_seed(block))).to(dtype)
    wanted, found = tokens_of_both_paths(logits, PARAMS, block=block)
    assert found == wanted


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 50),
    values=st.integers(1, 4),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    cut=st.sampled_from(
        [dict(top_k=3), dict(top_p=0.5), dict(top_p=0.8, top_k=30), dict(min_p=0.4), {}]
    ),
)
def test_ties_are_kept_and_dropped_as_in_the_portable_path(seed, vocab, values, temperature, cut):
    """Logits of one to four values: top-k keeps all that tie with the last, top-p those of the highest ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-1, values - 1, (2, vocab), generator=generator).to(torch.bfloat16)
    params = [SamplingParams(temperature=temperature, seed=seed, **cut), SamplingParams()]
    wanted, found = tokens_of_both_paths(logits, params, seed, block=32)
    assert found == wanted


needs_library = pytest.mark.skipif(
    cpu_ops.best_library() is None, reason="no compiled library for this processor"
)


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 700),
    values=st.sampled_from([1, 2, 5, 40, None]),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    num_left=st.sampled_from([1, 3, 1000]),
    cut=st.fixed_dictionaries(
        {"temperature": st.sampled_from([1e-5, 1e-4, 0.2, 1.0, 3.0])},
        optional={
            "top_k": st.integers(1, 800),
            "top_p": st.sampled_from([1e-6, 0.3, 0.9, 0.999]),
            "min_p": st.sampled_from([0.02, 0.5, 1.0]),
        },
    ),
)
def test_a_cpus_library_picks_the_portable_token(seed, vocab, values, spread, num_left, cut):
    """Rows of few values, of wide and narrow ones, with forbidden tokens, for any cuts at once."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * spread
    logits = logits if values is None else (logits / spread * values).round() / values * spread
    worst = logits.topk(max(0, vocab - num_left), largest=False).indices
    logits = logits.scatter(1, worst, -torch.inf)
    params, rows = [SamplingParams(seed=seed + i, **cut) for i in range(3)], torch.arange(3)
    found = sample(logits, SamplingBatch.of(params), rows, rows * 7)
    assert found.tolist() == sampled_by_torch(logits, params, rows, rows * 7).tolist()


@needs_library
def test_a_row_of_the_library_does_not_depend_on_its_company():
    """Nor on threads: 64 rows of a real vocabulary's size by three threads, and each alone."""
    logits = 3 * torch.randn(64, 20_000, generator=torch.Generator().manual_seed(4))
    rows, threads = torch.arange(64), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = sample(logits, SamplingBatch.of(PARAMS), rows % len(PARAMS), rows)
    finally:
        torch.set_num_threads(threads)
    for i in range(64):
        alone = sample(
            logits[i : i + 1],
            SamplingBatch.of([PARAMS[i % len(PARAMS)]]),
            rows[:1] * 0,
            rows[i : i + 1],
        )
        assert alone.item() == together[i]


def test_top_p_keeps_what_exact_sums_keep():
    """The kept set's size, by the kernels and by the portable path, against probabilities summed in float64."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=1.0, top_p=p) for p in (0.05, 0.3, 0.5, 0.9, 0.999, 0.99999)
    ]
    sampling = SamplingBatch.of(params, DEVICE)
    rows = kernel.SampleRows(
        logits.to(DEVICE), sampling.temperature, torch.arange(6, device=DEVICE)
    )
    floors = rows.with_ties(sampling.top_p, rows.peaks(), None)[0].cpu()
    portable = process(logits, SamplingBatch.of(params), torch.arange(6)).isfinite().sum(1).tolist()
    probs = logits.double().softmax(-1).sort(-1, descending=True).values
    for row, params_of in enumerate(params):
        mass = probs[row].cumsum(0)
        for kept in ((orders(logits[row]) >= floors[row]).sum().item(), portable[row]):
            assert mass[kept - 1] >= params_of.top_p - 1e-6 and (
                kept == 1 or mass[kept - 2] < params_of.top_p + 1e-6
            )


def orders(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + 2**31


def test_rows_are_picked_alone_as_in_company():
    logits = 2 * torch.randn(4, 200, generator=torch.Generator().manual_seed(5)).bfloat16()
    params = PARAMS[2:6]
    rows = torch.arange(4)
    together = sampled_by_kernels(logits, params, rows, rows)
    for i, one in enumerate(params):
        alone = sampled_by_kernels(logits[i : i + 1], [one], rows[:1], rows[i : i + 1])
        assert alone.item() == together[i]


@pytest.mark.parametrize("row", ["nan", "inf", "-inf", "zeros", "huge"])
def test_extremes_are_picked_as_in_the_portable_path(row):
    """Greedy and plainly sampled rows; -0.0 and 0.0 tie, a NaN is the highest, as for torch."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(7))
    if row == "nan":
        logits[:, [9, 30]] = torch.tensor([-torch.nan, torch.nan])
    elif row == "inf":
        logits[:, [40, 12]] = torch.inf
    elif row == "-inf":
        logits[:, :48] = -torch.inf
    elif row == "zeros":
        logits = torch.where(torch.arange(50) % 3 == 0, 0.0, -0.0).expand(2, 50)
    else:
        logits = logits * 1e38
    wanted, found = tokens_of_both_paths(
        logits, [SamplingParams(), SamplingParams(temperature=1.0, seed=4)], block=32
    )
    assert found == wanted


@pytest.mark.parametrize(
    "logits", [torch.full((3, 40), torch.nan), torch.full((3, 40), -torch.inf)], ids=["nan", "-inf"]
)
def test_cuts_of_nonsense_are_tokens(logits):
    assert all(0 <= token < 40 for token in tokens_of_both_paths(logits, PARAMS[2:6])[1])


def test_a_view_of_wider_logits_and_no_rows_at_all():
    wide = torch.randn(8, 2, 90, generator=torch.Generator().manual_seed(8))
    for logits in (wide[::2, 0, :77], wide[:, 1].T[:, :5].T, wide[:0, 0]):
        wanted, found = tokens_of_both_paths(logits, PARAMS[:2])
        assert found == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 97, 5000])
def test_log_probs_of_given_tokens(dtype, vocab, fused):
    from eagle_ray.sampling.sampler import log_probs_of

    logits = (10 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(9))).to(dtype)
    logits[3, : vocab // 2] = -torch.inf
    tokens = torch.tensor([0, vocab - 1, vocab // 2, vocab - 1])
    wanted = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(
        log_probs_of(logits.to(DEVICE), tokens.to(DEVICE)).cpu(), wanted, atol=2e-5, rtol=1e-6
    )


def test_log_probs_of_a_row_with_a_nan_are_nan(fused):
    from eagle_ray.sampling.sampler import log_probs_of

    logits = torch.zeros(3, 9)
    logits[0, 3], logits[1, 4] = torch.nan, torch.inf
    assert log_probs_of(
        logits.to(DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    ).isnan().tolist() == [
        True,
        True,
        False,
    ]


def test_processed_scores_say_what_could_have_been_picked():
    """The kernels never pick what `process` drops: 12 picks under a sharp cut, by different noise."""
    logits = (
        torch.randn(1, 60, generator=torch.Generator().manual_seed(2)).bfloat16().expand(12, 60)
    )
    params, rows = [SamplingParams(temperature=1.5, top_k=3, seed=1)], torch.arange(40)
    kept = process(logits[:1], SamplingBatch.of(params), rows[:1]).isfinite()[0]
    tokens = sampled_by_kernels(logits, params, rows * 0, rows)
    assert kept[tokens].all() and set(tokens.tolist()) == set(kept.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("num_left", [1, 40])
def test_forbidden_tokens_are_never_picked(num_left):
    """Controls make tokens impossible: more than top-k keeps, whole parts of a row, all but one."""
    generator = torch.Generator().manual_seed(num_left)
    logits = torch.randn(8, 130, generator=generator) * 3
    left = torch.rand(8, 130, generator=generator).topk(num_left, 1).indices
    forbidden = torch.ones_like(logits, dtype=torch.bool).scatter(1, left, False)
    portable, fused = tokens_of_both_paths(
        logits.masked_fill(forbidden, -torch.inf), PARAMS, block=64
    )
    assert portable == fused
    assert all(token in allowed for token, allowed in zip(fused, left.tolist(), strict=True))
