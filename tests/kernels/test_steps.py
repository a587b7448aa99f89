"""An engine whose steps run on the kernels produces what the portable engine does, greedy and sampled."""

from eagle_ray.requests.parameters import SamplingParams
from tests.support.kernels import DEVICE
from tests.support.toy_models import head3, llama_engine, run

WHOLE = [
    SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=4, ignore_eos=True, logprobs=True),
]
CUT = [
    SamplingParams(
        temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, seed=2, max_tokens=3, ignore_eos=True
    )
]


def outputs(params, *tree, **shape):
    done = run(
        llama_engine(len(params), *tree, device=DEVICE, **shape),
        [[5, 6, 7], [8]][: len(params)],
        params,
    )
    return (
        [s.output_ids for s in done],
        [s.stats for s in done],
        [p for s in done for p in s.output_logprobs],
    )


def test_kernels_change_no_token(monkeypatch):
    portable = outputs(WHOLE, 5, 3, 2)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    fused, plain = outputs(WHOLE, 5, 3, 2), outputs(WHOLE)
    assert fused[0] == plain[0] == portable[0]
    assert [s.accepted_by_depth for s in fused[1]] == [s.accepted_by_depth for s in portable[1]]
    assert max(abs(a - b) for a, b in zip(fused[2], portable[2], strict=True)) < 1e-4


def test_kernels_cut_as_the_portable_path_does(monkeypatch):
    portable = outputs(CUT, 3, 2, 2)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    assert outputs(CUT, 3, 2, 2)[0] == portable[0]


def test_a_head_of_its_own_vocabulary_is_ranked_by_kernels(monkeypatch):
    shape = dict(weights=head3(), num_hidden_layers=7)
    portable = outputs(WHOLE, 5, 3, 2, **shape)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    assert outputs(WHOLE, 5, 3, 2, **shape)[0] == portable[0]
