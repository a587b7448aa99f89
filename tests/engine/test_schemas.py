"""Rows with schemas: each is constrained plain decoding's under every tree, and what is complete is valid.

pytest tests/engine/test_schemas.py -m slow -s          # 300 rows, three trees, 1, 8 and 32 slots
"""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import PlainOutput, reference_decode
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.prompts import prompt_rows
from tests.support.engines import SAMPLING, TREES, differing_rows
from tests.support.schemas import Schema, check_schema, some_schemas
from tests.support.toy_models import run

VOCAB, EOS = 1536, 4


@cache
def text() -> Tokenizer:
    return Tokenizer.load(download("embedded:tiny", "target"))


def embedded_engine(num_slots: int, max_nodes: int, max_depth: int, top_k: int) -> Engine:
    tree = SpeculativeConfig(
        method="eagle2", max_nodes=max_nodes, max_depth=max_depth, top_k=top_k, budget="uniform"
    )
    return build_engine_from_config(
        ModelConfig(max_model_len=512), tree, EngineArgs(num_slots)
    ).engine


def some_rows(
    schemas: list[Schema], max_tokens: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """A prompt for each schema, and its sampling: every other row is greedy."""
    asked = [text().encode_chat(row["messages"]) for row in prompt_rows(per_category=8)]
    prompts = [asked[i % len(asked)] for i in range(len(schemas))]
    params = []
    for i, schema in enumerate(schemas):
        own = SAMPLING[1 + i // 2 % 3] if i % 2 else {}
        params.append(SamplingParams(max_tokens=max_tokens, seed=i, json_schema=schema, **own))
    return prompts, params


def plain_outputs(prompts: list[list[int]], params: list[SamplingParams]) -> list[PlainOutput]:
    model = AutoModelForCausalLM.from_pretrained(
        download("embedded:tiny", "target"), dtype=torch.float32
    )
    grammars = GrammarCompiler(text().to_json, VOCAB, [EOS])
    eos = frozenset([EOS])
    return [
        reference_decode(model, ids, p, eos, grammars)
        for ids, p in zip(prompts, params, strict=True)
    ]


def check(sequences: list[Sequence], plain: list[PlainOutput], schemas: list[Schema]) -> int:
    """Check every row and return how many are complete."""
    assert [s.error for s in sequences if s.error] == []
    assert differing_rows([s.output_ids for s in sequences], plain) == []
    assert (
        sum(s.output_ids == p.ids for s, p in zip(sequences, plain, strict=True)) >= len(plain) - 1
    )
    complete = 0
    for sequence, schema in zip(sequences, schemas, strict=True):
        if sequence.finish_reason == "stop":
            assert sequence.grammar.is_complete
            check_schema(text().decode(sequence.output_ids[:-1]), schema)
            complete += 1
    return complete


def test_a_few_rows_are_plain_decodings_and_valid():
    schemas = [
        *some_schemas(3),
        *some_schemas(21)[16:],
    ]  # nested and recursive ones, and short ones
    prompts, params = some_rows(schemas, max_tokens=40)
    sequences = run(embedded_engine(5, *TREES["12 nodes"]), prompts, params)
    assert check(sequences, plain_outputs(prompts, params), schemas) > 2
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 30


@pytest.mark.slow
def test_hundreds_of_rows_are_plain_decodings_and_valid():
    """Print of every cell how many rows are complete, how many equal plain decoding's, and tokens per step.

    At one slot, which takes the most steps, each tree decodes a third of the rows.
    """
    schemas = some_schemas(300)
    prompts, params = some_rows(schemas, max_tokens=96)
    plain = plain_outputs(prompts, params)
    print(
        f"\nplain decoding: {sum(EOS in p.ids for p in plain)} of {len(plain)} rows are complete",
        flush=True,
    )
    for num_slots in (32, 8, 1):
        for i, name in enumerate(("chain", "12 nodes", "60 nodes")):
            rows = slice(i, None, 3) if num_slots == 1 else slice(None)
            sequences = run(embedded_engine(num_slots, *TREES[name]), prompts[rows], params[rows])
            complete = check(sequences, plain[rows], schemas[rows])
            same = sum(s.output_ids == p.ids for s, p in zip(sequences, plain[rows], strict=True))
            steps = sum(s.stats.num_steps for s in sequences)
            per_step = sum(len(s.output_ids) for s in sequences) / steps
            found = f"{complete} complete and valid, {same} equal, {per_step:.2f} tokens a step"
            print(f"{num_slots} slots, {name}: {len(sequences)} rows, {found}", flush=True)
            assert complete > len(sequences) / 2
