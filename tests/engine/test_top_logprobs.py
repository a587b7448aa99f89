"""Log-probabilities of prompts, outputs and alternatives: those of one plain pass over the whole text."""

import pytest
import torch

from eagle_ray.models.target import PrefillBatch
from eagle_ray.sampling.sampler import SamplingParams
from tests.helpers.toy_models import llama_engine, run

ASKING = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=3, prompt_logprobs=True)


def plain_log_probs(ids):
    """After every token but the last, from one pass over all of them; the same seed makes the same weights."""
    target = llama_engine(1).target
    target.cache.blocks.reserve(0, len(ids))
    with torch.inference_mode():
        return target.logits(target.prefill(PrefillBatch.of([0], [ids])).hidden)[:-1].log_softmax(-1)


@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
@pytest.mark.parametrize("prefill_tokens", [512, 5])
def test_they_are_those_of_one_plain_pass(tree, prefill_tokens):
    prompts = [[5, 9, 33, 7, 21, 40, 2, 3], [8, 9], [5, 9, 33, 7, 21, 40, 2, 3, 11] * 3]
    engine = llama_engine(2, *tree, prefill_tokens=prefill_tokens)
    sequences = run(engine, prompts, [ASKING] * 3) + run(engine, prompts[2:], [ASKING])  # the last could reuse blocks
    for sequence in sequences:
        log_probs = plain_log_probs(sequence.token_ids)
        own = log_probs.gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0]
        found = sequence.prompt_logprobs[1:] + sequence.output_logprobs
        assert sequence.prompt_logprobs[0] is None and sequence.prompt_tops[0] == []
        assert found == pytest.approx(own.tolist(), abs=1e-4)
        tops = sequence.prompt_tops[1:] + sequence.output_tops
        assert [len(top) for top in tops] == [3] * len(log_probs)
        best = log_probs.topk(3)
        assert [[id for id, _ in top] for top in tops] == best.indices.tolist()
        assert [p for top in tops for _, p in top] == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


def test_who_does_not_ask_has_none_beside_one_who_does():
    quiet = SamplingParams(max_tokens=5, ignore_eos=True)
    asking, other = run(llama_engine(2, 8, 3, 3), [[5, 6], [7, 8]], [ASKING, quiet])
    assert len(asking.output_tops) == 12 and len(asking.prompt_logprobs) == 2
    assert (other.output_logprobs, other.output_tops, other.prompt_logprobs, other.prompt_tops) == ([], [], [], [])
