"""Drafters that read texts: what they offer, against the texts themselves; what they learn, and from whom."""

import math
import random
from collections import Counter

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence as EngineSequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.lookup.best_first import MIN_LOG_VALUE, GrowthRequest, grow_trees
from eagle_ray.methods.lookup.drafter import (
    LONGEST_NGRAM,
    LookupDrafter,
    NgramIndex,
    interpolate,
    newest_texts,
)
from eagle_ray.methods.lookup.native_index import native_index
from eagle_ray.methods.lookup.suffix import SuffixIndex
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import DraftPlan
from tests.support.trees import TokenSequence, check_tree, paths

BOUNDS = TreeBounds(max_nodes=20, max_depth=6, top_k=2)


def draft_of(
    drafter: LookupDrafter,
    texts: list[TokenSequence],
    plan: DraftPlan,
    eos_ids: tuple[int, ...] = (),
) -> Draft:
    batch = DecodeSlots.of(list(range(len(texts))), [len(t.token_ids) - 1 for t in texts], "cpu")
    roots = torch.tensor([t.token_ids[-1] for t in texts])
    sampling = SamplingBatch.of([SamplingParams()] * len(texts), eos_ids=eos_ids)
    return drafter.draft(batch, roots, plan, sampling, texts)


def test_interpolation_weights_the_longest_context_first():
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
    drafter = LookupDrafter(NgramIndex(), BOUNDS)
    texts = [
        TokenSequence([1, 2, 3, 4, 1, 2, 5, 1, 2]),
        TokenSequence([7]),
        TokenSequence([8, 9, 8]),
    ]
    draft = draft_of(drafter, texts, DraftPlan(max_depth=4, width=2))
    check_tree(draft.tree)
    assert {(3, 4, 1, 2), (5, 1, 2, 5)} < paths(draft, 0).keys()
    assert paths(draft, 1) == {}
    assert paths(draft, 2).keys() == {(9,), (9, 8), (9, 8, 9), (9, 8, 9, 8)}
    assert draft.num_catch_up == sum(len(t.token_ids) for t in texts)
    assert draft_of(drafter, texts, DraftPlan(4, 2)).num_catch_up == 0


@pytest.mark.parametrize("members", [None, (1,)])
def test_what_follows_an_end_is_not_offered(members):
    texts = [TokenSequence([1, 2, 3, 1]), TokenSequence([8, 9, 8, 9, 8])]
    draft = draft_of(
        LookupDrafter(NgramIndex(), BOUNDS), texts, DraftPlan(4, 2, members), eos_ids=(9, 3)
    )
    assert paths(draft, 1).keys() == {(9,)}
    assert paths(draft, 0).keys() == ({(2,), (2, 3)} if members is None else set())


def test_where_nothing_follows_nothing_is_drafted():
    draft = draft_of(
        LookupDrafter(NgramIndex(), BOUNDS),
        [TokenSequence([1, 2, 3]), TokenSequence([4])],
        DraftPlan(4, 2),
    )
    assert (draft.depth, draft.tree.num_nodes, draft.is_exhausted) == (0, 1, True)
    ended = draft_of(LookupDrafter(NgramIndex(), BOUNDS), [TokenSequence([4, 4])], DraftPlan(4, 2))
    assert (ended.depth, ended.is_exhausted) == (4, True)


def test_a_plan_may_mean_some_sequences_only():
    texts = [TokenSequence([1, 2, 1, 2]), TokenSequence([3, 4, 3]), TokenSequence([5, 6, 5])]
    draft = draft_of(LookupDrafter(NgramIndex(), BOUNDS), texts, DraftPlan(2, 4, (0, 2)))
    assert [len(paths(draft, b)) for b in range(3)] == [2, 0, 2]
    assert [level.shape for level in draft.levels] == [(2, 1, 1)] * 2
    torch.testing.assert_close(draft.levels[1][:, 0, 0], draft.tree.log_values[[0, 2], 2])


class HashedCursor:
    """A cursor whose children depend on the path alone, by a hash of it."""

    def __init__(self, seed: int, path: tuple[int, ...] = ()):
        self.seed, self.path = seed, path

    def children(self, width: int) -> list[tuple[int, float]]:
        rng = random.Random(hash((self.seed, self.path)))
        shares = sorted(
            (rng.choice([0.05, 0.2, 0.3]) for _ in range(rng.randint(0, 4))), reverse=True
        )
        return [(token, share) for token, share in enumerate(shares)][:width]

    def after(self, token: int) -> "HashedCursor":
        return HashedCursor(self.seed, (*self.path, token))


def every_path(cursor: HashedCursor, bounds: TreeBounds) -> dict[tuple[int, ...], float]:
    """Every path of the index within the depth, with its log value."""
    found, last = {}, {(): 0.0}
    for _ in range(bounds.max_depth):
        last = {
            (*path, token): value + math.log(p)
            for path, value in last.items()
            for token, p in HashedCursor(cursor.seed, path).children(bounds.top_k)
            if 4 not in path
        }
        found |= last
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_the_most_valuable_paths_within_its_bounds(seed):
    """Against listing every path of the index."""
    bounds = TreeBounds(max_nodes=1 + seed, max_depth=1 + seed % 5, top_k=1 + seed % 4)
    cursors = [HashedCursor(seed), HashedCursor(seed + 100)]
    request = GrowthRequest(bounds, torch.tensor([[4], [4]]))
    grown = grow_trees(cursors, [7, 8], request)
    check_tree(grown.tree)
    assert grown.tree.tokens[:, 0].tolist() == [7, 8]
    for b, cursor in enumerate(cursors):
        every = every_path(cursor, bounds)
        best = sorted((v for v in every.values() if v >= MIN_LOG_VALUE), reverse=True)[
            : bounds.max_nodes
        ]
        values = sorted(
            grown.tree.log_values[b, 1:][grown.tree.valid[b, 1:]].tolist(), reverse=True
        )
        assert values == pytest.approx(best, abs=1e-5)
        by_level = sorted(
            v for level in grown.levels for v in level[b, 0].tolist() if v > -torch.inf
        )
        assert by_level == sorted(values)
        found = paths(Draft(grown.tree, grown.levels, 0, 0), b)
        assert {path: pytest.approx(math.exp(every[path]), rel=1e-5) for path in found} == found


def test_trees_looked_up_ahead_have_one_shape_and_no_calibration():
    calibration = Calibration(4)
    drafter = LookupDrafter(NgramIndex(), BOUNDS, calibration)
    texts = [TokenSequence([1, 2, 3, 1, 2, 4, 1]), TokenSequence([5, 6])]
    calibration.fit.parameters[...] = torch.tensor([2.0, 1.0, 0.5])
    ahead = drafter.look_up([0, 1], texts, max_depth=5, max_nodes=12)
    assert (
        ahead.tokens.shape == (2, 13)
        and int(ahead.valid[0].sum()) > 8
        and int(ahead.valid[1].sum()) == 1
    )
    check_tree(ahead)
    assert int(ahead.depths.max()) == 5
    uncalibrated = LookupDrafter(NgramIndex(), BOUNDS).look_up([0, 1], texts, 5, 12)
    assert all(torch.equal(a, b) for a, b in zip(ahead.tensors, uncalibrated.tensors, strict=True))
    again = drafter.look_up([0, 1], texts, 5, 12)
    assert all(torch.equal(a, b) for a, b in zip(ahead.tensors, again.tensors, strict=True))


def test_calibrated_values_match_calibration_by_level_and_kind():
    calibration = Calibration(3)
    generator = torch.Generator().manual_seed(0)
    calibration.fit.parameters[...] = torch.rand(3, 2, 3, generator=generator) + torch.tensor(
        [0.5, 0.0, 0.0]
    )
    grown = grow_trees(
        [HashedCursor(3), HashedCursor(3)],
        [1, 1],
        GrowthRequest(TreeBounds(30, 3, 3), None, calibration.fit.parameters, [0, 1]),
    )
    tree = grown.tree
    assert not torch.equal(tree.log_values[0], tree.log_values[1])
    for b in range(2):
        for node in range(1, int(tree.valid[b].sum())):
            parent, level = int(tree.parents[b, node]), int(tree.depths[b, node]) - 1
            siblings = tree.draft_log_probs[b][(tree.parents[b] == parent)]
            expected = calibration.apply(level, torch.tensor([b]), siblings[None, None])[0, 0]
            values = (tree.log_values[b] - tree.log_values[b, parent])[tree.parents[b] == parent]
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("went_on", "least", "most"), [(5, 0.92, 1.0), (6, 0.0, 0.4)])
def test_calibration_follows_what_the_texts_went_on_with(went_on, least, most):
    """After every pair of tokens stands a 5, once; the second time it is a 5 again, or never."""
    pairs = [(100 + k, 200 + k) for k in range(60)]
    text = TokenSequence([i for pair in pairs for i in (*pair, 5)])
    drafter = LookupDrafter(NgramIndex(), BOUNDS, Calibration(1))
    said = []
    for pair in pairs:
        text.token_ids = [*text.token_ids, *pair]
        said.append(paths(draft_of(drafter, [text], DraftPlan(1, 1)), 0)[(5,)])
        text.token_ids = [*text.token_ids, went_on]
    assert said[0] == pytest.approx(2 / 3 + 1 / 6)
    assert least < said[-1] < most


@pytest.mark.parametrize("slot", [0, 1])
def test_a_sequence_that_moves_to_another_slot_is_not_read_again(slot):
    drafter, text, other = (
        LookupDrafter(NgramIndex(), BOUNDS),
        TokenSequence([1, 2, 1]),
        TokenSequence([3, 3]),
    )
    draft_of(drafter, [text], DraftPlan(2, 2))
    moved = [other, text] if slot else [text, other]
    assert draft_of(drafter, moved, DraftPlan(2, 2)).num_catch_up == len(other.token_ids)


def test_what_was_read_and_learned_can_be_forgotten():
    calibration = Calibration(2)
    drafter, text = LookupDrafter(NgramIndex(), BOUNDS, calibration), TokenSequence([1, 2, 1])
    for _ in range(3):
        draft_of(drafter, [text], DraftPlan(2, 2))
        text.token_ids = [*text.token_ids, 2, 1]
    assert calibration.fit.parameters[0, 0].tolist() != [1.0, 0.0, 0.0]
    drafter.reset_learning()
    assert calibration.fit.parameters[0, 0].tolist() == [1.0, 0.0, 0.0]
    assert draft_of(drafter, [text], DraftPlan(2, 2)).num_catch_up == len(text.token_ids)


def test_what_was_learned_goes_on_in_another_drafter():
    texts = [TokenSequence([1, 2, 3, 4, 5, 6]), TokenSequence([7, 8, 1, 2])]
    first = LookupDrafter(SuffixIndex(), BOUNDS, Calibration(2), vocab_size=10)
    draft_of(first, texts, DraftPlan(2, 2))
    texts[1].token_ids = [7, 8, 1, 2, 3]
    draft_of(first, texts, DraftPlan(2, 2))
    state = first.state()
    assert state["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    calibration = Calibration(2)
    second = LookupDrafter(
        native_index("suffix") or SuffixIndex(), BOUNDS, calibration, vocab_size=10
    )
    second.load_state(state)
    assert torch.equal(calibration.fit.parameters, state["parameters"])
    assert not torch.equal(calibration.fit.parameters, Calibration(2).fit.parameters)
    assert (4, 5) in paths(draft_of(second, [TokenSequence([9, 2, 3])], DraftPlan(2, 2)), 0)
    assert newest_texts(SuffixIndex().texts(), 5)["tokens"].tolist() == []
    lengths = torch.tensor([2, 3, 1])
    assert newest_texts((lengths, torch.arange(6, dtype=torch.int32)), 5)["tokens"].tolist() == [
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    "damage",
    [
        dict(tokens=torch.tensor([1, 2, 10, 4, 5, 6], dtype=torch.int32)),
        dict(tokens=torch.tensor([1, 2, -1, 4, 5, 6], dtype=torch.int32)),
        dict(lengths=torch.tensor([7])),
        dict(lengths=torch.tensor([0, 6])),
        dict(tokens=torch.ones(6)),
        dict(parameters=torch.ones(3, 2, 3)),
        dict(information=torch.full((2, 2, 3, 3), torch.nan)),
        dict(lengths=None),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(damage):
    first = LookupDrafter(SuffixIndex(), BOUNDS, Calibration(2), vocab_size=10)
    draft_of(first, [TokenSequence([1, 2, 3, 4, 5, 6])], DraftPlan(2, 2))
    state = {
        name: tensor for name, tensor in (first.state() | damage).items() if tensor is not None
    }
    second = LookupDrafter(SuffixIndex(), BOUNDS, Calibration(2), vocab_size=10)
    with pytest.raises(ValueError):
        second.load_state(state)
    assert len(second.source.texts()[1]) == 0


@pytest.mark.parametrize("start", range(6))
def test_a_sequence_gives_its_tokens_from_any_position(start):
    sequence = EngineSequence("a", [5, 6, 7], SamplingParams())
    sequence.output_ids = [8, 9]
    assert sequence.token_ids_from(start) == sequence.token_ids[start:]
