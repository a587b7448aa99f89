"""EAGLE-3 through the whole engine: its trees are its own, its tokens are plain decoding's."""

import random
from dataclasses import replace

import pytest
import torch

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import RandomPlanner, some_params, some_prompts
from tests.support.jobs import PAIR
from tests.support.toy_models import head3, llama_engine, run

E3 = PAIR.parent / "pair_e3"
LAYERS = 7
TREE = (12, 4, 4)


def engine(num_slots: int, tree: tuple[int, int, int] = TREE, **sizes: object) -> Engine:
    return llama_engine(num_slots, *tree, num_hidden_layers=LAYERS, **{"weights": head3()} | sizes)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """8 prompts, some with a long beginning in common, greedy and sampled, decoded plainly."""
    header = (some_prompts(1, seed=9)[0] * 70)[:70]
    prompts = [header * (i % 3 == 0) + ids for i, ids in enumerate(some_prompts(8))]
    params = some_params(8, max_tokens=12)
    return prompts, params, [s.output_ids for s in run(engine(8, (0, 0, 0)), prompts, params)]


@pytest.mark.parametrize("num_drafted", [3, 97])
def test_outputs_are_those_of_plain_decoding_for_any_draft_vocab(plain, num_drafted):
    """Fewer tokens than children, and the whole vocabulary; in between, below."""
    prompts, params, outputs = plain
    assert [
        s.output_ids
        for s in run(engine(8, weights=head3(num_drafted=num_drafted)), prompts, params)
    ] == outputs


def test_so_they_are_with_chunks_and_prefixes_in_common(plain):
    prompts, params, outputs = plain
    chunked = engine(5, prefill_tokens=17)
    assert [s.output_ids for s in run(chunked, prompts, params)] == outputs
    assert chunked.counters.num_reused_tokens > 0


@pytest.mark.slow
def test_outputs_are_those_of_plain_decoding_under_preemption():
    """Four sequences that grow to three blocks each over a pool of five."""
    prompts = [some_prompts(40)[i] * 30 for i in range(4)]
    prompts = [ids[:length] for ids, length in zip(prompts, (20, 25, 28, 30), strict=True)]
    params = [replace(p, ignore_eos=True) for p in some_params(4, max_tokens=60)]
    outputs = [s.output_ids for s in run(engine(4, (0, 0, 0)), prompts, params)]
    scarce = engine(4, kv_tokens=5 * BLOCK_SIZE)
    assert [s.output_ids for s in run(scarce, prompts, params)] == outputs
    assert scarce.counters.num_preemptions > 0


def test_so_they_are_whatever_is_planned(plain):
    prompts, params, outputs = plain
    fickle = engine(5, (20, 5, 4), prefill_tokens=40)
    fickle.planner = RandomPlanner(seed=1)
    assert [s.output_ids for s in run(fickle, prompts, params)] == outputs


def golden(method: str, **speculative: object) -> list[Sequence]:
    """The pair in its published layout, through the configuration; every other prompt is sampled."""
    model = ModelConfig(target=str(E3 / "target"), draft=str(E3 / "draft"), max_model_len=64)
    tree = {} if method == "none" else dict(max_nodes=15, max_depth=4, top_k=4)
    built = build_engine_from_config(
        model, SpeculativeConfig(method=method, **tree | speculative), EngineArgs(16)
    )
    rng = random.Random(3)
    prompts = [
        [1] + [rng.randrange(3, 512) for _ in range(rng.randrange(1, 12))] for _ in range(16)
    ]
    params = [
        SamplingParams(max_tokens=16, temperature=i % 2, seed=i, ignore_eos=True) for i in range(16)
    ]
    return run(built.engine, prompts, params)


def tau(sequences: list[Sequence]) -> float:
    steps = sum(s.stats.num_steps for s in sequences)
    return 1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps


def test_published_layout_gains_and_coupling_raises_sampled_tau():
    plain, coupled = golden("none"), golden("eagle3", budget="uniform", ranking="coupled")
    alone = golden(
        "eagle2", budget="uniform", ranking="calibrated"
    )  # the same tree, whatever the head's generation
    assert (
        [s.output_ids for s in plain]
        == [s.output_ids for s in coupled]
        == [s.output_ids for s in alone]
    )
    assert tau(coupled[::2]) > 1.3  # greedy rows; the reference has 1.54 on its own prompts
    assert tau(coupled[1::2]) > tau(alone[1::2]) + 0.05


@pytest.mark.slow
def test_the_batch_wide_budget_changes_no_token():
    plain, measured = golden("none"), golden("eagle3", budget="global")
    assert [s.output_ids for s in plain] == [s.output_ids for s in measured]


@torch.inference_mode()
def test_nothing_is_drafted_that_the_head_cannot_draft():
    built = engine(8)
    allowed, seen = set(built.drafter.head.token_ids.tolist()), set()
    draft = EagleDrafter.draft

    class WatchedDrafter(EagleDrafter):
        def draft(self, *args: object) -> object:
            found = draft(self, *args)
            seen.update(found.tree.tokens[:, 1:].flatten().tolist())
            return found

    built.drafter.__class__ = WatchedDrafter
    run(built, some_prompts(6), some_params(6, max_tokens=4))
    assert len(allowed) == 60 and len(seen) > 20 and seen <= allowed
