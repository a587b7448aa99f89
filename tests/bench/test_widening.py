"""A widened pair computes what the small pair computes: logits, features, head outputs, tokens and acceptance."""

import pytest
import torch

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.heads import EagleHead
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.embedding_map import ModelShape
from jobs.bench.widening import BENCH, LLAMA_1B, LLAMA_3B, LLAMA_8B, widen_pair
from tests.support.toy_models import head, llama, run

TOLERANCE = 1e-4
VOCAB = 97
SHAPES = {
    "same groups": ModelShape(64, 3, 4, 2, 16, 80, 128),
    "same head size": ModelShape(48, 2, 8, 2, 8, 48, 97),
    "no groups": ModelShape(75, 4, 5, 5, 24, 64, 101),
    "one more layer only": ModelShape(36, 3, 4, 2, 8, 48, 97),
}


@pytest.fixture(params=SHAPES)
def pairs(request):
    small = llama(), head(rms_norm_eps=1e-5)
    return small, widen_pair(*small, SHAPES[request.param])


def some_ids(count: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_features_and_logits_stay(pairs):
    (small, _), (wide, _) = pairs
    ids = some_ids()
    wanted, got = (model.model(ids, use_cache=False).last_hidden_state for model in (small, wide))
    width = wanted.shape[-1]
    assert (got[..., :width] - wanted).abs().max() < TOLERANCE
    assert not got[..., width + 1 :].any()
    logits = wide.lm_head(got)
    assert (logits[..., :VOCAB] - small.lm_head(wanted)).abs().max() < TOLERANCE
    assert (logits[..., VOCAB:] < -100).all()


@torch.no_grad()
def test_the_heads_outputs_stay(pairs):
    (small, small_head), (wide, wide_head) = pairs
    ids, positions = some_ids(), torch.arange(19).expand(3, -1)
    logits = []
    for model, eagle in ((small, small_head), (wide, wide_head)):
        features = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        embeddings = model.model.embed_tokens(ids[:, 1:])
        once = eagle(embeddings, features, positions)
        twice = eagle(embeddings, once, positions)  # as in drafting: on the head's own output
        logits.append(model.lm_head(torch.cat([once, twice])))
    assert (logits[1][..., :VOCAB] - logits[0]).abs().max() < TOLERANCE
    assert (logits[1][..., VOCAB:] < -100).all()


def outputs(model, eagle) -> list[tuple[list[int], list[int]]]:
    """Greedy ids and acceptance histograms of a few prompts."""
    tree = SpeculativeConfig(method="eagle2", max_nodes=12, max_depth=4, top_k=4, budget="uniform")
    engine = build_engine(model, eagle, tree, EngineArgs(3, 128))
    prompts = [ids[: 5 + i].tolist() for i, ids in enumerate(some_ids(count=6))]
    sequences = run(engine, prompts, [SamplingParams(max_tokens=24)] * len(prompts))
    return [(s.output_ids, s.stats.histogram) for s in sequences]


@pytest.mark.slow
def test_ids_and_acceptance_stay(pairs):
    small, wide = pairs
    assert outputs(*wide) == outputs(*small)


@torch.no_grad()
def test_an_embedding_and_biases_of_the_heads_own_are_widened():
    small = llama()
    own = EagleHead(head().config, bias=True, own_embedding=True)
    wide, wide_own = widen_pair(small, own, SHAPES["same groups"])
    assert torch.equal(wide_own.embed_tokens.weight[:VOCAB, :32], own.embed_tokens.weight)
    assert torch.equal(wide_own.fc.bias[:32], own.fc.bias) and not wide_own.fc.bias[32:].any()
    assert wide_own.embed_tokens.weight[0, 32] == wide.model.embed_tokens.weight[0, 32] != 0


def test_few_weights_are_zero(pairs):
    """Kernels must find no zeros to profit from; those that there are face live inputs that they must not pass on."""
    _, (wide, _) = pairs
    extra = [p for layer in wide.model.layers[2:] for p in layer.parameters() if p.ndim == 2]
    assert all((p != 0).float().mean() > 0.99 for p in extra)


def test_the_shapes_cost_what_they_say():
    assert 0.09 < BENCH.draft_weights / BENCH.pass_weights < 0.10
    assert 130e6 < BENCH.pass_weights + BENCH.hidden_size * BENCH.vocab_size < 300e6
    for shape, billions, kv_bytes in (
        (LLAMA_1B, 1.236, 32768),
        (LLAMA_3B, 3.03, 65536),
        (LLAMA_8B, 7.505, 131072),
    ):
        assert round(shape.pass_weights / 1e9, 3 if shape is not LLAMA_3B else 2) == billions
        assert 2 * shape.kv_numbers == kv_bytes


def test_weights_have_their_dtype_and_frequencies_stay_exact():
    model, eagle = widen_pair(llama(), head(), SHAPES["same groups"], dtype=torch.bfloat16)
    assert {p.dtype for m in (model, eagle) for p in m.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    for module in (model.model.rotary_emb, eagle.rotary, eagle.bfloat16().rotary):
        assert module.inv_freq.dtype == torch.float32 and torch.equal(
            module.inv_freq, eagle.rotary.inv_freq
        )


def test_a_shape_that_is_too_small_is_refused():
    for shape in (
        ModelShape(32, 2, 4, 2, 8, 48, 97),
        ModelShape(64, 1, 4, 2, 8, 48, 97),
        ModelShape(64, 2, 2, 2, 8, 48, 97),
    ):
        with pytest.raises(EngineError):
            widen_pair(llama(), head(), shape)
