"""HeadCheck: a head that is hardly ever right is named once, and a healthy one never."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.hub import download
from eagle_ray.engine.head_check import (
    MAX_DRAFTS,
    MIN_SHARE,
    STANDARD_ERRORS,
    HeadCheck,
    first_taken,
    upper_bound,
)
from eagle_ray.tree.draft_tree import DraftTree
from jobs.bench.simulated_costs import flat
from tests.support.checkpoints import write_shuffled

QUESTIONS = ["Hi", "What is 2 + 2?", "Tell me about Rome.", "Hi there", "Where is Paris?", "Tea?"]
PROMPTS = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
TREE = {"max_nodes": 8, "max_depth": 3, "top_k": 4, "slots": 4}


def test_a_head_that_is_never_right_is_named_after_some_drafts():
    check = HeadCheck()
    said = [check.add([False], [0]) for _ in range(30)]
    first = next(i for i, text in enumerate(said) if text is not None)
    assert 15 < first < 30
    assert (
        f"of its first {first + 1} drafts the target took the first token of 0 (0%)" in said[first]
    )
    for cause in ("base model", "chat template", "dtype", "reasoning mode"):
        assert cause in said[first]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_head_that_is_right_often_enough_is_not_named(share):
    check = HeadCheck()
    generator = torch.Generator().manual_seed(0)
    while not check.is_over:
        taken = [bool(torch.rand((), generator=generator) < share) for _ in range(4)]
        assert check.add(taken, [1] * 4) is None


def test_a_record_raises_what_is_expected_and_never_lowers_it():
    promised, poor = HeadCheck(0.9), HeadCheck(0.01)
    assert (promised.min_share, poor.min_share) == (0.45, MIN_SHARE)
    taken = [i % 5 == 0 for i in range(MAX_DRAFTS)]
    assert HeadCheck().add(taken, [0] * MAX_DRAFTS) is None
    assert "its record says 90%" in (promised.add(taken, [0] * MAX_DRAFTS) or "")


@pytest.mark.parametrize(
    "taken, drafts", [(0, 22), (0, 100), (3, 40), (20, 100), (99, 100), (100, 100)]
)
def test_the_bound_is_wilsons(taken, drafts):
    """The largest share p with |taken / drafts - p| <= z sqrt(p (1 - p) / drafts), found step by step."""
    shares = [i / 100_000 for i in range(100_001)]
    z = STANDARD_ERRORS
    inside = [
        p for p in shares if abs(taken / drafts - p) <= z * math.sqrt(p * (1 - p) / drafts) + 1e-12
    ]
    assert upper_bound(taken, drafts) == pytest.approx(max(inside), abs=2e-5)


def test_the_first_token_is_looked_for_among_the_roots_children():
    tree = DraftTree(
        tokens=torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 4, 0, 0]]),
        parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 1], [-1, 0, -1, -1]]),
        depths=torch.tensor([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 0, 0]]),
        log_values=torch.zeros(3, 4),
        draft_log_probs=torch.zeros(3, 4),
        valid=torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]]),
    )
    tokens = torch.tensor([[2, 5], [3, 5], [0, 5]])  # 3 is a grandchild, and 0 is padding
    assert first_taken(tree, tokens, torch.tensor([0, 1, 2])).tolist() == [True, False, False]
    assert first_taken(tree, tokens, torch.tensor([2, 0])).tolist() == [False, True]


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    return write_shuffled(download("embedded:tiny", "draft"), tmp_path_factory.mktemp("h") / "head")


def answered(draft, messages, **settings):
    """Return the log's lines about the head, its engine's counters, and the tokens."""
    messages.clear()
    with LLM("embedded:tiny", draft=draft, **TREE | settings) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=48, ignore_eos=True))
        assert all(len(output.outputs[0].token_ids) == 48 for output in outputs)
        lines = [line for line in messages if "does not fit its target" in line]
        return lines, llm.counters(), [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("settings", [{}, {"method": "eagle2", "budget": "uniform"}])
def test_an_llm_names_a_shuffled_head_once_and_answers_the_same(
    shuffled, messages, monkeypatch, settings
):
    """Steps have costs at which drafts pay; where they do not, too few are made to judge a head."""
    monkeypatch.setattr(
        "eagle_ray.assembly.costs.cached_costs", lambda *_: flat(free_rows=64, head_share=0.001)
    )
    lines, counters, tokens = answered(shuffled, messages, **settings)
    assert lines == [counters.draft_warning] and counters.draft_warning is not None
    healthy, own, same = answered("embedded:tiny", messages, **settings)
    assert healthy == [] and own.draft_warning is None
    assert tokens == same


def test_what_is_looked_up_does_not_hide_a_head(shuffled, messages):
    """Each answer repeats its prompt's text, so look-ups are right, and the head in the same tree is not."""
    lines, *_ = answered(shuffled, messages, method="eagle2+suffix", budget="uniform")
    assert len(lines) == 1


def test_hot_sampling_is_not_counted(shuffled, messages):
    messages.clear()
    with LLM("embedded:tiny", draft=shuffled, method="eagle2", budget="uniform", **TREE) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=48, temperature=3.0, ignore_eos=True))
        assert llm.counters().draft_warning is None
