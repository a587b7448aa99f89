"""The suffix automaton against counting every run by hand, the compiled index against it, and what is discarded."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.lookup.best_first import GrownTrees, GrowthRequest
from eagle_ray.methods.lookup.drafter import NgramIndex
from eagle_ray.methods.lookup.native_index import native_index
from eagle_ray.methods.lookup.suffix import ROOT_NODE, SuffixAutomaton, SuffixIndex


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), num_texts=st.integers(1, 3), num_tokens=st.integers(1, 3))
def test_automaton_has_every_run_and_its_followers_as_texts_grow(seed, num_texts, num_tokens):
    rng, automaton = random.Random(seed), SuffixAutomaton()
    texts, states = [[] for _ in range(num_texts)], [ROOT_NODE] * num_texts
    for _ in range(24):
        i, token = rng.randrange(num_texts), rng.randrange(num_tokens)
        states[i] = automaton.append(states[i], token)
        texts[i].append(token)
        assert automaton.longest[states[i]] == len(texts[i])
    assert automaton.num_tokens == 24
    runs = Counter(
        tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1)
    )
    for run in runs:
        state = ROOT_NODE
        for token in run:
            state = automaton.step(state, token)
        assert automaton.follows(state) == {
            t: runs[(*run, t)] for t in range(num_tokens) if runs[(*run, t)]
        }
    assert automaton.step(ROOT_NODE, num_tokens) is None


def test_a_link_leads_to_the_longest_run_that_was_there_before():
    automaton, state = SuffixAutomaton(), ROOT_NODE
    for token in (5, 9, 7, 5, 9):
        state = automaton.append(state, token)
    before = automaton.link[state]
    assert automaton.longest[before] == 2 and automaton.follows(before) == {7: 1}
    assert automaton.follows(state) == {}


def test_one_sequence_drafts_from_another():
    source = SuffixIndex()
    first, second = source.reader(), source.reader()
    first.read([1, 2, 3, 4, 5, 6])
    second.read([9, 9, 3, 4])
    cursor = second.cursor()
    for token in (5, 6):
        [(child, probability)] = cursor.children(1)
        assert child == token and 0.5 < probability < 1
        cursor = cursor.after(token)
    assert cursor.children(3) == []


def test_longer_runs_are_surer():
    source = SuffixIndex()
    source.reader().read([1, 2, 3, 4, 5, 6, 7])
    said = []
    for seen in ([6], [5, 6], [3, 4, 5, 6]):
        reader = source.reader()
        reader.read([8, *seen])
        said.append(dict(reader.cursor().children(2))[7])
    assert said == sorted(said) and said[0] < said[-1]


def test_full_source_drops_its_older_half_and_readers_continue():
    source = SuffixIndex(capacity=12)
    old, young = source.reader(), source.reader()
    old.read([1, 2, 3, 1, 2, 3, 1, 2])
    assert dict(old.cursor().children(1)).keys() == {3}
    young.read([4, 5, 4])
    assert source.texts()[0].tolist() == [8, 3] and young.cursor().children(1) == [(5, 0.5)]
    assert dict(old.cursor().children(1)).keys() == {3}  # from the older half
    old.read([3, 1, 2, 6])
    assert [lengths.tolist() for lengths in source.texts()[:1]] == [[8, 3, 4]]
    young.read([9])
    assert source.texts()[1].tolist() == [4, 5, 4, 3, 1, 2, 6, 9]
    reader = source.reader()
    reader.read([1, 2])
    assert dict(reader.cursor().children(2)).keys() == {6}
    source.reset()
    reader = source.reader()
    reader.read([4])
    assert reader.cursor().children(1) == []


def trees_are_equal(a: GrownTrees, b: GrownTrees) -> bool:
    pairs = [
        *zip(a.tree.tensors, b.tree.tensors, strict=True),
        *zip(a.levels, b.levels, strict=True),
    ]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.skipif(
    native_index("suffix") is None, reason="no compiled library: install with a C++ compiler"
)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.sampled_from([1, 2, 4, 30]),
    num_texts=st.integers(1, 4),
    capacity=st.sampled_from([20, 60, 10**6]),
    is_suffix=st.booleans(),
)
def test_the_compiled_index_grows_equal_trees(seed, num_tokens, num_texts, capacity, is_suffix):
    """Texts that grow by turns and are replaced, through rotations; with ends, calibration and any bounds."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    portable = SuffixIndex(capacity) if is_suffix else NgramIndex()
    compiled = native_index("suffix" if is_suffix else "ngram", capacity)
    readers = [(portable.reader(), compiled.reader(), [0]) for _ in range(num_texts)]
    for _ in range(12):
        if rng.random() < 0.3:
            readers[rng.randrange(num_texts)] = portable.reader(), compiled.reader(), [0]
        news = [
            [rng.randrange(num_tokens) for _ in range(rng.choice([0, 1, 3, 12]))] for _ in readers
        ]
        slow, fast, last = zip(*readers, strict=True)
        portable.read(slow, news)
        compiled.read(fast, news)
        for tail, tokens in zip(last, news, strict=True):
            tail += tokens
        bounds = TreeBounds(rng.choice([1, 8, 40]), rng.randint(1, 9), rng.randint(1, 5))
        parameters = torch.rand(3, 2, 3, generator=generator) + torch.tensor([0.5, -0.5, 0.0])
        kinds = [rng.randrange(2) for _ in readers]
        ends = torch.tensor([[rng.randrange(-1, num_tokens), -1] for _ in readers])
        plain = GrowthRequest(bounds, is_padded=True)
        for request in (plain, GrowthRequest(bounds, ends, parameters, kinds)):
            roots = [tail[-1] for tail in last]
            assert trees_are_equal(
                portable.grow(slow, roots, request), compiled.grow(fast, roots, request)
            )
    assert portable.lookup_hits() == compiled.lookup_hits()
    if is_suffix:
        assert all(
            torch.equal(a, b) for a, b in zip(portable.texts(), compiled.texts(), strict=True)
        )
