"""Log-probabilities of prompts, outputs and alternatives: those of one plain pass over the whole text."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_ray.engine import controlled_sequences, prefill, step
from eagle_ray.models.target import PromptBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling import sampler
from tests.support.toy_models import llama_engine, run

ASKING = SamplingParams(
    max_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=3, prompt_logprobs=True
)


def plain_log_probs(ids):
    """After every token but the last, from one pass over all of them; the same seed makes the same weights."""
    target = llama_engine(1).target
    target.cache.blocks.reserve(0, len(ids))
    with torch.inference_mode():
        return target.logits(target.prefill(PromptBatch.of([0], [ids])).hidden)[:-1].log_softmax(-1)


class WatchRows(TorchDispatchMode):
    """The most rows of logits of which log-probabilities are computed at once."""

    num_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "log_softmax" in func.__name__:
            self.num_rows = max(self.num_rows, len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
def test_few_rows_are_copied_at_a_time(tree, monkeypatch):
    """As many as the slice has, of prompts, of outputs and of sequences with controls, whose tokens stay."""
    params = [replace(ASKING, seed=i, presence_penalty=0.5 * (i > 1)) for i in range(4)]
    prompts = [[5 + i, 9, 33, 7, 21, 40, 2] for i in range(4)]
    whole = run(llama_engine(4, *tree), prompts, params)
    for module in (sampler, step, prefill, controlled_sequences):
        monkeypatch.setattr(module, "SLICE_ROWS", 3)
    applied, apply = [], controlled_sequences.sample
    monkeypatch.setattr(
        controlled_sequences, "sample", lambda x, *rest: applied.append(len(x)) or apply(x, *rest)
    )
    with WatchRows() as watch:
        sliced = run(llama_engine(4, *tree), prompts, params)
    assert [s.output_ids for s in sliced] == [s.output_ids for s in whole]
    for ours, theirs in zip(sliced, whole, strict=True):
        assert ours.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-4)
        pairs = zip(
            ours.output_tops + ours.prompt_tops,
            theirs.output_tops + theirs.prompt_tops,
            strict=True,
        )
        assert all([token for token, _ in a] == [token for token, _ in b] for a, b in pairs)
    assert 1 < max(applied) <= (9 if any(tree) else 3)  # all rows of a tree, which are 9 at most
    assert any(tree) or watch.num_rows == 3  # heads rank their tokens by log-probabilities, too


@pytest.mark.parametrize("tree", [(0, 0, 0), (8, 3, 3)])
@pytest.mark.parametrize("prefill_tokens", [512, 5])
def test_they_are_those_of_one_plain_pass(tree, prefill_tokens):
    prompts = [[5, 9, 33, 7, 21, 40, 2, 3], [8, 9], [5, 9, 33, 7, 21, 40, 2, 3, 11] * 3]
    engine = llama_engine(2, *tree, prefill_tokens=prefill_tokens)
    sequences = run(engine, prompts, [ASKING] * 3) + run(
        engine, prompts[2:], [ASKING]
    )  # the last could reuse blocks
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
        assert [p for top in tops for _, p in top] == pytest.approx(
            best.values.flatten().tolist(), abs=1e-4
        )


def test_who_does_not_ask_has_none_beside_one_who_does():
    quiet = SamplingParams(max_tokens=5, ignore_eos=True)
    asking, other = run(llama_engine(2, 8, 3, 3), [[5, 6], [7, 8]], [ASKING, quiet])
    assert len(asking.output_tops) == 12 and len(asking.prompt_logprobs) == 2
    assert (other.output_logprobs, other.output_tops, other.prompt_logprobs, other.prompt_tops) == (
        [],
        [],
        [],
        [],
    )
