"""Lookahead: a window's tree, what its picks make of it, and the pool that drafts are drawn from."""

from itertools import pairwise

import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.drafter import VerifyOutput
from eagle_ray.methods.lookup.lookahead import FIRST_EARNED, FIRST_GUESSES, LookaheadDrafter
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.accepted_path import accept_path
from eagle_ray.tree.expand import DraftPlan
from tests.support.trees import TokenSequence, check_tree, paths

PERIOD = 7


def logits_after(tokens: torch.Tensor) -> torch.Tensor:
    """A target that counts in circles: its logits by the last token alone."""
    return torch.nn.functional.one_hot((tokens + 1) % PERIOD, PERIOD).float()


def step(drafter: LookaheadDrafter, texts: list[TokenSequence], plan: DraftPlan):
    """Draft, verify everything, commit what the target accepts."""
    lengths = [len(t.token_ids) - 1 for t in texts]
    batch = DecodeSlots.of(list(range(len(texts))), lengths, "cpu")
    roots = torch.tensor([t.token_ids[-1] for t in texts])
    draft = drafter.draft(
        batch, roots, plan, SamplingBatch.of([SamplingParams()] * len(texts)), texts
    )
    tree = draft.tree.rerank(draft.tree.valid, draft.tree.num_nodes)
    rows = tree.pack(batch.lengths, tree.tokens.numel())
    result = accept_path(tree, rows, logits_after(rows.tokens).argmax(-1), draft.depth)
    drafter.extend(
        batch,
        VerifyOutput(tree, rows, logits_after(rows.tokens), rows.tokens[:, None].float(), result),
    )
    for text, count, tokens in zip(
        texts, result.num_accepted.tolist(), result.tokens.tolist(), strict=True
    ):
        text.token_ids = text.token_ids + tokens[: count + 1]
    return draft


def test_the_first_window_is_a_tree_of_guesses_of_one_value():
    drafter, text = LookaheadDrafter(TreeBounds(20, 4, 3)), TokenSequence([1, 2, 3, 4, 5, 6])
    draft = step(drafter, [text], DraftPlan(4, 3))
    check_tree(draft.tree)
    found = paths(draft, 0)
    assert drafter.cost_key == {"window": [3, 2]}
    assert max(map(len, found)) == draft.depth == 4
    assert {round(value, 6) for value in found.values()} == {FIRST_EARNED / FIRST_GUESSES}
    assert all(token in text.token_ids for path in found for token in path)


def test_guesses_become_ngrams_that_are_drafted_and_accepted():
    """After a few steps the pool knows the circle, and every draft of it is accepted whole."""
    drafter, texts = (
        LookaheadDrafter(TreeBounds(20, 4, 3)),
        [TokenSequence([1, 2, 3]), TokenSequence([5, 6, 0, 1])],
    )
    for _ in range(12):
        before = [len(t.token_ids) for t in texts]
        draft = step(drafter, texts, DraftPlan(4, 3))
        check_tree(draft.tree)
    assert [len(t.token_ids) - n for t, n in zip(texts, before, strict=True)] == [5, 5]
    for text in texts:
        ids = text.token_ids[3:]
        assert {(b - a) % PERIOD for a, b in pairwise(ids)} == {1}


def test_shallow_plans_and_some_members_are_drafted_for_too():
    drafter, texts = (
        LookaheadDrafter(TreeBounds(20, 4, 3)),
        [TokenSequence([1, 2, 3]), TokenSequence([5, 6, 0])],
    )
    draft = step(drafter, texts, DraftPlan(4, 3, (1,)))
    assert paths(draft, 0) == {} and paths(draft, 1)
    shallow = step(drafter, texts, DraftPlan(3, 3))
    assert shallow.depth == 3 and max(map(len, paths(shallow, 0))) == 3
    drafter.reset_learning()
    assert (
        step(drafter, texts, DraftPlan(1, 3)).depth == 0
    )  # no column ends there, and the pool knows nothing yet
