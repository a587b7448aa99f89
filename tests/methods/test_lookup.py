"""Drafters that read texts: what they offer, against the texts themselves; what they learn, and from whom."""

from collections import Counter

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.lookup.drafter import LONGEST_NGRAM, LookupDrafter, NgramIndex, interpolate
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.trees import Known, check_laws, paths


def drafted(drafter: LookupDrafter, texts: list[Known], plan: DraftPlan, eos_ids: tuple[int, ...] = ()) -> Draft:
    batch = DecodeSlots.of(list(range(len(texts))), [len(t.token_ids) - 1 for t in texts], "cpu")
    roots = torch.tensor([t.token_ids[-1] for t in texts])
    sampling = SamplingBatch.of([SamplingParams()] * len(texts), eos_ids=eos_ids)
    return drafter.draft(batch, roots, plan, sampling, texts)


def test_the_longest_context_comes_first_and_leaves_the_rest_to_shorter_ones():
    assert interpolate([(3, {7: 1}), (1, {7: 3, 9: 1})], width=2) == [(7, 0.84375), (9, 0.03125)]
    assert interpolate([(3, {7: 1}), (1, {9: 1})], width=1) == [(7, 0.75)]
    assert interpolate([], width=2) == []


def test_ngrams_offer_what_followed_the_same_tokens():
    """Against counting every n-gram of the text anew."""
    ids = [5, 9, 7, 5, 9, 8, 5, 9, 7, 1, 9, 7, 5, 9]
    cursor = NgramIndex().reader()
    cursor.read(ids[:6])
    cursor.read(ids[6:])
    contexts = []
    for n in range(LONGEST_NGRAM, 0, -1):
        follows = Counter(ids[i + n] for i in range(len(ids) - n) if ids[i : i + n] == ids[-n:])
        contexts += [(n, follows)] if follows else []
    assert cursor.cursor().children(3) == interpolate(contexts, 3)
    assert cursor.cursor().after(7).after(5).children(1)[0][0] == 9


def test_trees_are_lawful_and_hold_what_followed():
    drafter = LookupDrafter(NgramIndex())
    texts = [Known([1, 2, 3, 4, 1, 2, 5, 1, 2]), Known([7]), Known([8, 9, 8])]
    draft = drafted(drafter, texts, DraftPlan(max_depth=4, width=2))
    check_laws(draft.tree)
    assert {(3, 4, 1, 2), (5, 1, 2, 5)} < paths(draft, 0).keys()
    assert paths(draft, 1) == {}
    assert paths(draft, 2).keys() == {(9,), (9, 8), (9, 8, 9), (9, 8, 9, 8)}
    assert draft.num_catch_up == sum(len(t.token_ids) for t in texts)
    assert drafted(drafter, texts, DraftPlan(4, 2)).num_catch_up == 0


@pytest.mark.parametrize("members", [None, (1,)])
def test_what_follows_an_end_is_not_offered(members):
    texts = [Known([1, 2, 3, 1]), Known([8, 9, 8, 9, 8])]
    draft = drafted(LookupDrafter(NgramIndex()), texts, DraftPlan(4, 2, members), eos_ids=(9, 3))
    assert paths(draft, 1).keys() == {(9,)}
    assert paths(draft, 0).keys() == ({(2,), (2, 3)} if members is None else set())


def test_where_nothing_follows_nothing_is_drafted():
    draft = drafted(LookupDrafter(NgramIndex()), [Known([1, 2, 3]), Known([4])], DraftPlan(4, 2))
    assert (draft.depth, draft.tree.num_nodes, draft.is_exhausted) == (0, 1, True)
    ended = drafted(LookupDrafter(NgramIndex()), [Known([4, 4])], DraftPlan(4, 2))
    assert (ended.depth, ended.is_exhausted) == (4, False)


def test_a_plan_may_have_enough_and_may_mean_some_sequences_only():
    texts = [Known([1, 2, 1, 2]), Known([3, 4, 3]), Known([5, 6, 5])]
    draft = drafted(LookupDrafter(NgramIndex()), texts, DraftPlan(4, 2, (0, 2), lambda builder: builder.depth == 2))
    assert draft.depth == 2 and not draft.is_exhausted
    assert [len(paths(draft, b)) for b in range(3)] == [2, 0, 2]
    assert len(draft.levels[0]) == 2


@pytest.mark.parametrize(("went_on", "least", "most"), [(5, 0.92, 1.0), (6, 0.0, 0.4)])
def test_calibration_follows_what_the_texts_went_on_with(went_on, least, most):
    """After every pair of tokens stands a 5, once; the second time it is a 5 again, or never."""
    pairs = [(100 + k, 200 + k) for k in range(60)]
    text = Known([i for pair in pairs for i in (*pair, 5)])
    drafter = LookupDrafter(NgramIndex(), Calibration(1))
    said = []
    for pair in pairs:
        text.token_ids = [*text.token_ids, *pair]
        said.append(paths(drafted(drafter, [text], DraftPlan(1, 1)), 0)[(5,)])
        text.token_ids = [*text.token_ids, went_on]
    assert said[0] == pytest.approx(2 / 3 + 1 / 6)
    assert least < said[-1] < most


@pytest.mark.parametrize("slot", [0, 1])
def test_a_sequence_that_moves_to_another_slot_is_not_read_again(slot):
    drafter, text, other = LookupDrafter(NgramIndex()), Known([1, 2, 1]), Known([3, 3])
    drafted(drafter, [text], DraftPlan(2, 2))
    moved = [other, text] if slot else [text, other]
    assert drafted(drafter, moved, DraftPlan(2, 2)).num_catch_up == len(other.token_ids)


def test_what_was_read_and_learned_can_be_forgotten():
    calibration = Calibration(2)
    drafter, text = LookupDrafter(NgramIndex(), calibration), Known([1, 2, 1])
    for _ in range(3):
        drafted(drafter, [text], DraftPlan(2, 2))
        text.token_ids = [*text.token_ids, 2, 1]
    assert calibration.fit.parameters[0, 0].tolist() != [1.0, 0.0, 0.0]
    drafter.reset_learning()
    assert calibration.fit.parameters[0, 0].tolist() == [1.0, 0.0, 0.0]
    assert drafted(drafter, [text], DraftPlan(2, 2)).num_catch_up == len(text.token_ids)
