"""Losslessness as equality: every output is plain decoding's, token for token, whatever the tree or the batch."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import reference_decode
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.prompts import prompt_rows
from tests.support.engines import (
    TREES,
    Oracle,
    RandomPlanner,
    differing_rows,
    mostly_slow,
    some_params,
    some_prompts,
)
from tests.support.toy_models import llama, llama_engine, run


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """40 prompts on a random Llama, decoded one token at a time by transformers' own attention and cache."""
    model, prompts, params = llama(), some_prompts(40), some_params(40, max_tokens=16)
    model.set_attn_implementation("sdpa")
    plain = [
        reference_decode(model, ids, p, frozenset([2]))
        for ids, p in zip(prompts, params, strict=True)
    ]
    return prompts, params, plain


FAST = [
    (1, "plain"),
    (1, "60 nodes"),
    (4, "chain"),
    (4, "12 nodes"),
    (32, "1 node"),
    (32, "8 nodes"),
]


@pytest.mark.parametrize(("num_slots", "tree"), mostly_slow(FAST, (1, 4, 32), TREES))
def test_every_tree_and_batch_size_equals_plain_decoding(oracle, tree, num_slots):
    prompts, params, plain = (some[: 8 * num_slots] for some in oracle)
    sequences = run(llama_engine(num_slots, *TREES[tree]), prompts, params)
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    exact = sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True))
    assert exact >= len(plain) - 1  # near-ties are rarer than one row in a thousand


@pytest.mark.parametrize("num_slots", [1, 5, 32])
def test_no_plan_changes_what_is_produced(oracle, num_slots):
    prompts, params, plain = (some[: 8 * num_slots] for some in oracle)
    engine = llama_engine(num_slots, 20, 5, 4)
    engine.planner = RandomPlanner(num_slots)
    sequences = run(
        engine, prompts, [replace(p, logprobs=i % 2 == 0) for i, p in enumerate(params)]
    )
    for sequence in sequences:
        stats, logprobs = sequence.stats, sequence.output_logprobs
        assert len(logprobs) == (len(sequence.output_ids) if sequence.sampling.logprobs else 0)
        assert len(sequence.output_ids) == 1 + stats.num_steps + stats.num_accepted_draft_tokens - (
            stats.num_discarded_tokens
        )
        assert (
            sum(stats.drafted.accepted)
            == sum(stats.calibrated.accepted)
            == stats.num_accepted_draft_tokens
        )
        assert sum(stats.drafted.nodes) == sum(stats.calibrated.nodes) <= stats.num_draft_tokens
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert (
        sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1
    )


def test_greedy_equals_transformers_generate(oracle):
    prompts, _, _ = oracle
    model = llama()
    model.set_attn_implementation("sdpa")
    sequences = run(llama_engine(4, 8, 4, 4), prompts[:12], [SamplingParams(max_tokens=16)] * 12)
    for sequence, ids in zip(sequences, prompts, strict=False):
        generated = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[
            0, len(ids) :
        ]
        assert sequence.output_ids == generated.tolist()


def test_the_order_of_arrival_changes_nothing(oracle):
    prompts, params, plain = oracle
    order = random.Random(1).sample(range(24), 24)
    engine = llama_engine(5, 12, 3, 5)
    sequences = run(engine, [prompts[i] for i in order], [params[i] for i in order])
    assert differing_rows([s.output_ids for s in sequences], [plain[i] for i in order]) == []


def test_drafts_are_accepted_at_all():
    """The equality above would hold for a drafter that is never right: here some drafts are."""
    sequences = run(llama_engine(48, 60, 6, 10), some_prompts(96), some_params(96, max_tokens=24))
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 50


def embedded_oracle(per_category: int, max_tokens: int = 40) -> Oracle:
    """Held-out prompts of every category on the embedded pair, greedy and sampled, decoded plainly."""
    directory = download("embedded:tiny", "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text, eos = Tokenizer.load(directory), frozenset([model.generation_config.eos_token_id])
    prompts = [text.encode_chat(row["messages"]) for row in prompt_rows(per_category)]
    params = some_params(len(prompts), max_tokens)
    return (
        prompts,
        params,
        [reference_decode(model, ids, p, eos) for ids, p in zip(prompts, params, strict=True)],
    )


def embedded_engine(
    num_slots: int, max_nodes: int, max_depth: int, top_k: int, budget: str = "uniform"
) -> Engine:
    tree = dict(max_nodes=max_nodes, max_depth=max_depth, top_k=top_k, budget=budget)
    method = tree if max_nodes else dict(method="none")
    return build_engine_from_config(
        ModelConfig(max_model_len=512), SpeculativeConfig(**method), EngineArgs(num_slots)
    ).engine


@pytest.fixture(scope="module")
def embedded() -> Oracle:
    return embedded_oracle(per_category=2, max_tokens=20)


@pytest.mark.parametrize(
    "num_slots, tree, budget",
    [
        (1, "12 nodes", "uniform"),
        (8, "60 nodes", "global"),
        pytest.param(
            32, "8 nodes", "global", marks=pytest.mark.slow
        ),  # the same on a random Llama, above
        (16, "plain", "uniform"),
    ],
)
def test_the_embedded_pair_equals_plain_decoding(embedded, num_slots, tree, budget):
    prompts, params, plain = (some[: 6 * num_slots] for some in embedded)
    sequences = run(embedded_engine(num_slots, *TREES[tree], budget), prompts, params)
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert (
        sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1
    )


@pytest.mark.slow
def test_hundreds_of_prompts_in_every_cell():
    """240 prompts, three batch sizes, six trees: prints how many rows differ and where plain decoding was tied."""
    prompts, params, plain = embedded_oracle(per_category=40)
    for num_slots in (1, 8, 32):
        for tree, shape in TREES.items():
            outputs = [
                s.output_ids for s in run(embedded_engine(num_slots, *shape), prompts, params)
            ]
            exact = sum(ids == p.ids for ids, p in zip(outputs, plain, strict=True))
            print(f"{num_slots} slots, {tree}: {exact} of {len(plain)} identical")
            assert differing_rows(outputs, plain) == []
            assert exact >= len(plain) - 1


@pytest.mark.parametrize("overflows", ["always", "now and then"])
def test_head_that_overflows_changes_no_output(oracle, overflows):
    """NaN is greater than any number, and would outrank the root."""
    engine = llama_engine(4, 8, 3, 4)
    with torch.no_grad():
        if overflows == "always":
            engine.drafter.head.fc.bias.fill_(torch.nan)
        else:
            engine.drafter.embed_tokens = torch.nn.Embedding.from_pretrained(
                engine.drafter.embed_tokens.weight.clone()
            )
            engine.drafter.embed_tokens.weight[::3] = torch.inf
    prompts, params, plain = (some[:12] for some in oracle)
    outputs = [s.output_ids for s in run(engine, prompts, params)]
    assert differing_rows(outputs, plain) == []
