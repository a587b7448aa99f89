"""A target that computes NaN or infinity while decoding: the row at fault is an error, and the others are not."""

from __future__ import annotations

import pytest
import torch

from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import llama_engine

PROMPTS = [[7, 8, 9], [5, 6, 40, 41, 9], [60, 61]]
WAYS = {
    "plain": {},
    "trees": dict(max_nodes=9, max_depth=4, top_k=3),
    "replayed": dict(max_nodes=9, max_depth=4, top_k=3, graphs=True),
    "launched ahead": dict(max_nodes=9, max_depth=4, top_k=3, graphs=True, overlap=True),
    "quantised": dict(max_nodes=9, max_depth=4, top_k=3, quantised=True),
    "quantised and plain": dict(quantised=True),
}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SETTINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3),
    "with log-probabilities": SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2),
    "with a control": SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
}


def spoil(engine, token, value=torch.nan):
    """Make what the target computes of this token no number."""
    with torch.no_grad():
        engine.target.model.get_input_embeddings().weight[token] = value


def answers(engine, params, prompts=PROMPTS):
    sequences = [Sequence(str(b), ids, params) for b, ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return sequences


def assert_failed(sequence):
    assert sequence.error is not None and sequence.error.code == "not_finite"
    assert str(sequence.error).startswith("the target computes what is no number (NaN)")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_token_whose_row_is_nan_ends_its_sequence_alone(way, settings):
    params = SETTINGS[settings]
    prompts = [[3 + 11 * b, 5 + 7 * b, 9 + 10 * b] for b in range(8)]
    whole = answers(llama_engine(3, **WAYS[way]), params, prompts)
    tokens = [{*s.prompt_ids, *s.output_ids} for s in whole]
    b, token = next(
        (b, token)
        for b, sequence in enumerate(whole)
        for token in sequence.output_ids[2:-1]
        if token not in sequence.prompt_ids and sum(token in each for each in tokens) == 1
    )
    engine = llama_engine(3, **WAYS[way])
    spoil(engine, token)
    found = answers(engine, params, prompts)
    assert_failed(found.pop(b))
    whole.pop(b)
    assert [s.output_ids for s in found] == [s.output_ids for s in whole]
    assert all(s.error is None for s in found)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_whose_row_is_nan_ends_its_sequence_alone(way):
    whole = answers(llama_engine(3, **WAYS[way]), GREEDY)
    others = {token for s in whole[::2] for token in [*s.prompt_ids, *s.output_ids]}
    token = next(token for token in PROMPTS[1] if token not in others)
    engine = llama_engine(3, **WAYS[way])
    spoil(engine, token)
    good, bad, last = answers(engine, GREEDY)
    assert_failed(bad)
    assert bad.output_ids == []
    assert [good.output_ids, last.output_ids] == [s.output_ids for s in whole[::2]]
    [again] = answers(engine, GREEDY, [PROMPTS[0]])
    assert again.output_ids == whole[0].output_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_end_a_sequence(temperature):
    """One of both tokens has +inf, whatever the sign of the number that is multiplied."""
    engine = llama_engine(1, max_nodes=9, max_depth=4, top_k=3)
    with torch.no_grad():
        engine.target.model.lm_head.weight[5, 0] = torch.inf
        engine.target.model.lm_head.weight[6, 0] = -torch.inf
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature, seed=1)
    [bad] = answers(engine, params, [PROMPTS[0]])
    assert_failed(bad)
