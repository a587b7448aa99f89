"""Steps of an engine that is short of space, each checked, and the plain output of every sequence."""

from __future__ import annotations

import random
from dataclasses import replace

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import PlainOutput, reference_decode
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import SAMPLING, differing_rows
from tests.support.toy_models import llama

PLAIN, TREE = (0, 0, 0), (8, 3, 4)
BLOCK = 32
MODEL = llama()
MODEL.set_attn_implementation("sdpa")
DECODED: dict[str, PlainOutput] = {}  # by prompt and parameters


def oracle(sequence: Sequence) -> PlainOutput:
    """Return the sequence's plain output, which is decoded once for all tests."""
    params = replace(sequence.sampling, max_tokens=sequence.max_tokens)
    key = repr((sequence.prompt_ids, params))
    if key not in DECODED:
        DECODED[key] = reference_decode(MODEL, sequence.prompt_ids, params, frozenset([2]))
    return DECODED[key]


def sequences(prompts: list[list[int]], max_tokens: int = 20) -> list[Sequence]:
    params = [
        SamplingParams(max_tokens=max_tokens, seed=i, **SAMPLING[i % 4])
        for i in range(len(prompts))
    ]
    return [
        Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]


def step(engine: Engine) -> list[Sequence]:
    done = engine.step()
    engine.scheduler.check_integrity()
    return done


def finish(engine: Engine, added: list[Sequence]) -> None:
    for sequence in added:
        engine.add(sequence)
    while engine.has_work:
        step(engine)


def assert_plain(done: list[Sequence]) -> None:
    """Outputs are plain decoding's and the counts obey the law, whatever happened on the way."""
    plain = [oracle(s) for s in done]
    assert differing_rows([s.output_ids for s in done], plain) == []
    for sequence in done:
        stats = sequence.stats
        produced = (
            1 + stats.num_steps + stats.num_accepted_draft_tokens - stats.num_discarded_tokens
        )
        assert len(sequence.output_ids) == produced
        assert (
            sequence.arrived_at
            <= sequence.admitted_at
            <= sequence.first_token_at
            <= sequence.finished_at
        )
        assert sequence.target_forwards >= 1 + stats.num_steps


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 97) for _ in range(n)] for n in lengths]
