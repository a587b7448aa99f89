"""EAGLE-3 through the whole engine: its trees are its own, its tokens are plain decoding's."""

import random

import pytest
import torch

from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.drafting.eagle import EagleDrafter
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.planner import UniformPlanner
from eagle_ray.engine.sequence import Sequence
from eagle_ray.models.blocks import BLOCK_SIZE
from eagle_ray.models.heads import Eagle3Head
from eagle_ray.pair import build_pair
from eagle_ray.speculative.sampling import SamplingParams
from tests.conftest import PAIR
from tests.engine.test_lossless import some_params, some_prompts
from tests.toy import head3, llama_engine, run

E3 = PAIR.parent / "pair_e3"
LAYERS = 7
TREE = (12, 4, 4)
HEADS = {
    "60 of 97 tokens": lambda: head3(),
    "3 of 97 tokens, fewer than children": lambda: head3(num_drafted=3),
    "every token": lambda: head3(num_drafted=97),
    "own embedding, narrower": lambda: narrow(),
}


def narrow() -> Eagle3Head:
    config = head3(hidden_size=16).config
    return Eagle3Head(config, draft_vocab_size=60, feature_size=96, own_embedding=True).requires_grad_(False)


def engine(num_slots: int, tree: tuple[int, int, int] = TREE, **sizes: object) -> Engine:
    return llama_engine(num_slots, *tree, num_hidden_layers=LAYERS, **{"weights": head3()} | sizes)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """24 prompts, some with a long beginning in common, greedy and sampled, decoded plainly."""
    header = some_prompts(1, seed=9)[0] * 70
    prompts = [header[: 70 * (i % 3 == 0)] + ids for i, ids in enumerate(some_prompts(24))]
    params = some_params(24, max_tokens=20)
    return prompts, params, [s.output_ids for s in run(engine(24, (0, 0, 0)), prompts, params)]


@pytest.mark.parametrize("num_slots", [1, 5])
def test_outputs_are_those_of_plain_decoding(plain, num_slots):
    prompts, params, outputs = plain
    sequences = run(engine(num_slots), prompts, params)
    assert [s.output_ids for s in sequences] == outputs
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 0


@pytest.mark.parametrize("head", HEADS)
def test_so_they_are_whatever_the_vocabulary_and_the_width(plain, head):
    prompts, params, outputs = plain
    assert [s.output_ids for s in run(engine(24, weights=HEADS[head]()), prompts, params)] == outputs


def test_so_they_are_with_little_memory_chunks_and_prefixes_in_common(plain):
    prompts, params, outputs = plain
    scarce = engine(5, kv_tokens=9 * BLOCK_SIZE, prefill_tokens=17)
    assert [s.output_ids for s in run(scarce, prompts, params)] == outputs
    assert scarce.counters.num_preemptions > 0 and scarce.counters.num_reused_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_so_they_are_when_drafting_comes_and_goes(plain, seed):
    prompts, params, outputs = plain
    rng, fickle = random.Random(seed), engine(7, prefill_tokens=40)
    sequences = [Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for sequence in sequences:
        fickle.add(sequence)
    while fickle.has_work:
        fickle.planner = UniformPlanner(*TREE) if rng.random() < 0.5 else UniformPlanner(0, 0, 0)
        fickle.step()
        fickle.scheduler.check_integrity()
    assert [s.output_ids for s in sequences] == outputs


def golden(method: str, num_slots: int = 6, **speculative: object) -> list[Sequence]:
    """The published-layout pair from its directory, through the configuration; every other prompt sampled."""
    model = ModelConfig(target=str(E3 / "target"), draft=str(E3 / "draft"), max_model_len=128)
    tree = {} if method == "none" else dict(max_nodes=15, max_depth=4, top_k=4)
    built = build_pair(model, SpeculativeConfig(method=method, **tree | speculative), num_slots)
    rng = random.Random(3)
    prompts = [[1] + [rng.randrange(3, 512) for _ in range(rng.randrange(1, 20))] for _ in range(24)]
    params = [SamplingParams(max_tokens=32, temperature=i % 2, seed=i, ignore_eos=True) for i in range(24)]
    return run(built.engine, prompts, params)


def tau(sequences: list[Sequence]) -> float:
    steps = sum(s.stats.num_steps for s in sequences)
    return 1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps


def test_the_golden_pair_gains_and_its_tokens_stay(request):
    outputs = [s.output_ids for s in golden("none")]
    for method, speculative in (
        ("eagle3", dict(budget="uniform")),
        ("eagle2", dict(budget="uniform", coupled=False)),
        ("eagle3", dict(budget="global")),
    ):
        sequences = golden(method, **speculative)
        assert [s.output_ids for s in sequences] == outputs
        if speculative["budget"] == "uniform":
            assert tau(sequences[::2]) > 1.3  # greedy rows: the reference has 1.54 on its own prompts


def test_coupling_knows_the_noise_of_the_drafted_vocabulary():
    """Of sampled rows more is accepted where the head reads the target's noise, through a map of tokens as without."""
    alone, coupled = (golden("eagle3", budget="uniform", coupled=c)[1::2] for c in (False, True))
    assert [s.output_ids for s in alone] == [s.output_ids for s in coupled]
    assert tau(coupled) > tau(alone) + 0.05


@torch.inference_mode()
def test_nothing_is_drafted_that_the_head_cannot_draft():
    built = engine(4)
    allowed, seen = set(built.drafter.head.token_ids.tolist()), set()
    draft = EagleDrafter.draft

    class Watched(EagleDrafter):
        def draft(self, *args: object) -> object:
            found = draft(self, *args)
            seen.update(found.tree.tokens[:, 1:].flatten().tolist())
            return found

    built.drafter.__class__ = Watched
    run(built, some_prompts(8), some_params(8, max_tokens=8))
    assert len(allowed) == 60 and len(seen) > 20 and seen <= allowed
