"""Drafters that run no model: every output is plain decoding's, and what they offer is accepted where texts repeat."""

import random
from dataclasses import replace

import pytest
from transformers import LlamaForCausalLM

from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import decode_plainly
from eagle_ray.pair import build_engine, build_pair
from eagle_ray.speculative.sampling import SamplingParams
from eagle_ray.speculative.stats import AcceptanceStats
from tests.engine.test_lossless import Oracle, Whimsical, differing, some_params
from tests.toy import llama, run

METHODS = ["ngram", "suffix", "recycling", "lookahead", "ngram+suffix"]
TREE = dict(max_nodes=8, max_depth=5, top_k=3)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def oracle(model) -> Oracle:
    """12 prompts that repeat themselves and one another, some from their start on, decoded by transformers' cache."""
    rng, params = random.Random(3), [replace(p, ignore_eos=True) for p in some_params(12, max_tokens=48)]
    phrases = [[rng.randrange(3, 97) for _ in range(rng.randint(2, 9))] for _ in range(6)]
    prompts = [[i for phrase in rng.choices(phrases, k=5) for i in phrase][:28] for _ in params]
    prompts[::4] = [(phrases[0] * 70)[:70] + ids[:5] for ids in prompts[::4]]  # long enough to share blocks
    plain_model = llama()
    plain_model.set_attn_implementation("sdpa")
    plain = [decode_plainly(plain_model, ids, p, frozenset([2])) for ids, p in zip(prompts, params, strict=True)]
    return prompts, params, plain


def engine_of(model: LlamaForCausalLM, method: str, num_slots: int, kv_tokens: int | None = None) -> Engine:
    speculative = SpeculativeConfig(method=method, budget="uniform", **TREE)
    return build_engine(model, None, speculative, num_slots, 128, kv_tokens)


def check(engine: Engine, oracle: Oracle, times: int) -> AcceptanceStats:
    """All of it, each time in another order: from the second time on the drafter knows what it has read."""
    prompts, params, plain = oracle
    stats = AcceptanceStats.empty(0)
    for seed in range(times):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        sequences = run(engine, [prompts[i] for i in order], [params[i] for i in order])
        assert differing([s.output_ids for s in sequences], [plain[i] for i in order]) == []
        for sequence in sequences:
            stats = stats.merge(sequence.stats)
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 7])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_plain_decoding(model, oracle, method, num_slots):
    stats = check(engine_of(model, method, num_slots), oracle, times=2)
    assert stats.num_accepted_draft_tokens > 50


@pytest.mark.parametrize("method", METHODS)
def test_no_plan_changes_what_is_produced(model, oracle, method):
    """Some members, any width and depth, plain steps between; few blocks, so that sequences are pre-empted."""
    engine = engine_of(model, method, 4, kv_tokens=160)
    engine.planner = Whimsical(5)
    prompts, params, plain = oracle
    stats = check(engine, (prompts, [replace(p, logprobs=True) for p in params], plain), times=1)
    assert stats.num_accepted_draft_tokens > 10
    assert engine.counters.num_preemptions > 0 and engine.counters.num_reused_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_batch_wide_budget_measures_it_and_changes_nothing(model, oracle, method):
    engine = build_engine(model, None, SpeculativeConfig(method=method, **TREE), 4, 128)
    assert engine.planner.costs.read(1) > 0 and engine.planner.costs.level(4) > 0
    check(engine, oracle, times=3)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_repeats_itself_is_drafted(method):
    """The embedded target copies; tau counts the bonus token, so that 1 is plain decoding."""
    speculative = SpeculativeConfig(method=method, budget="uniform", **TREE)
    pair = build_pair(ModelConfig(max_model_len=512), speculative, slots=2)
    ids = pair.text.encode_chat([{"role": "user", "content": "Write a list of animals."}])
    sequences = run(pair.engine, [ids] * 2, [SamplingParams(max_tokens=64, ignore_eos=True)] * 2)
    assert sequences[0].output_ids == sequences[1].output_ids
    assert min(s.stats.mean_acceptance_length for s in sequences) > 1.2
    assert all(s.draft_forwards == 0 for s in sequences)
