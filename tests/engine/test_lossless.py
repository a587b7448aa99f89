"""Losslessness as equality: every output is plain decoding's, token for token, whatever the tree or the batch."""

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import decode_plainly
from eagle_ray.speculative.sampling import SamplingParams
from tests.toy import llama, llama_engine, run

NEAR_TIE = 1e-4  # one row against many rows moves fp32 logits by up to 2e-5
TREES = {"plain": (0, 0, 0), "1 node": (1, 6, 10), "chain": (5, 5, 1), "8 nodes": (8, 4, 4), "60 nodes": (60, 6, 10)}
SAMPLING = [
    dict(),
    dict(temperature=0.8),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.3, top_k=20, min_p=0.02),
]


def some_prompts(count: int, vocab: int = 97, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def some_params(count: int, max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, seed=i * 7 - 3, **SAMPLING[i % len(SAMPLING)]) for i in range(count)]


def differing(outputs: list[list[int]], plain: list) -> list[int]:
    """Rows that part from plain decoding at a place where plain decoding was not nearly tied."""
    rows = []
    for i, (ids, oracle) in enumerate(zip(outputs, plain, strict=True)):
        if ids != oracle.ids:
            place = next(j for j, (a, b) in enumerate(itertools.zip_longest(ids, oracle.ids)) if a != b)
            rows += [i] if place >= len(oracle.margins) or oracle.margins[place] > NEAR_TIE else []
    return rows


@pytest.fixture(scope="module")
def oracle():
    """96 prompts on a random Llama, decoded one token at a time by transformers' own attention and cache."""
    model, prompts, params = llama(), some_prompts(96), some_params(96, max_tokens=24)
    model.set_attn_implementation("sdpa")
    plain = [decode_plainly(model, ids, p, frozenset([2])) for ids, p in zip(prompts, params, strict=True)]
    return prompts, params, plain


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("num_slots", [1, 4, 32])
def test_every_tree_and_batch_size_equals_plain_decoding(oracle, tree, num_slots):
    prompts, params, plain = (some[: 24 * num_slots] for some in oracle)
    sequences = run(llama_engine(num_slots, *TREES[tree]), prompts, params)
    assert differing([s.output_ids for s in sequences], plain) == []
    exact = sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True))
    assert exact >= len(plain) - 1  # near-ties are rarer than one row in a thousand


def test_greedy_equals_transformers_generate(oracle):
    prompts, _, _ = oracle
    model = llama()
    model.set_attn_implementation("sdpa")
    sequences = run(llama_engine(4, 8, 4, 4), prompts[:24], [SamplingParams(max_tokens=24)] * 24)
    for sequence, ids in zip(sequences, prompts, strict=False):
        generated = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        assert sequence.output_ids == generated.tolist()


def test_the_order_of_arrival_changes_nothing(oracle):
    prompts, params, plain = oracle
    order = random.Random(1).sample(range(48), 48)
    engine = llama_engine(5, 12, 3, 5)
    sequences = run(engine, [prompts[i] for i in order], [params[i] for i in order])
    assert differing([s.output_ids for s in sequences], [plain[i] for i in order]) == []


def test_drafts_are_accepted_at_all(oracle):
    """The equality above would hold for a drafter that is never right: here some drafts are."""
    prompts, params, _ = oracle
    sequences = run(llama_engine(8, 60, 6, 10), prompts, params)
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 50


@pytest.fixture(scope="module")
def embedded() -> tuple[list[list[int]], list[SamplingParams], list]:
    """The bundled prompts on the embedded pair: greedy and sampled, decoded plainly."""
    import json

    from eagle_ray.pair import ASSETS, resolve
    from eagle_ray.text import Text

    model = AutoModelForCausalLM.from_pretrained(resolve("embedded:tiny", "target"), dtype=torch.float32)
    text = Text.load(resolve("embedded:tiny", "target"))
    rows = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    prompts = [text.encode_chat(row["messages"]) for row in rows[::2]] * 2
    params = some_params(len(prompts), max_tokens=40)
    eos = frozenset([model.generation_config.eos_token_id])
    return prompts, params, [decode_plainly(model, ids, p, eos) for ids, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("slots, max_nodes, max_depth, top_k", [(1, 12, 4, 4), (8, 59, 6, 10), (32, 8, 4, 4)])
def test_the_embedded_pair_equals_plain_decoding(embedded, slots, max_nodes, max_depth, top_k):
    prompts, params, plain = embedded
    sequences = run(embedded_engine(slots, max_nodes, max_depth, top_k), prompts, params)
    assert differing([s.output_ids for s in sequences], plain) == []
    assert sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1


def embedded_engine(slots: int, max_nodes: int, max_depth: int, top_k: int) -> Engine:
    from eagle_ray.config import ModelConfig, SpeculativeConfig
    from eagle_ray.pair import build_pair

    speculative = SpeculativeConfig(max_nodes=max_nodes, max_depth=max_depth, top_k=top_k)
    return build_pair(ModelConfig(max_model_len=512), speculative, slots).engine
