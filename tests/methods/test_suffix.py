"""The suffix automaton against counting every run of tokens by hand, and what its source forgets."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.methods.lookup.suffix import ROOT, SuffixAutomaton, SuffixIndex


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), num_texts=st.integers(1, 3), num_tokens=st.integers(1, 3))
def test_it_knows_every_run_and_what_followed_it_however_the_texts_grow(seed, num_texts, num_tokens):
    rng, automaton = random.Random(seed), SuffixAutomaton()
    texts, states = [[] for _ in range(num_texts)], [ROOT] * num_texts
    for _ in range(24):
        i, token = rng.randrange(num_texts), rng.randrange(num_tokens)
        states[i] = automaton.append(states[i], token)
        texts[i].append(token)
        assert automaton.longest[states[i]] == len(texts[i])
    assert automaton.num_tokens == 24
    runs = Counter(tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1))
    for run in runs:
        state = ROOT
        for token in run:
            state = automaton.step(state, token)
        assert automaton.follows(state) == {t: runs[(*run, t)] for t in range(num_tokens) if runs[(*run, t)]}
    assert automaton.step(ROOT, num_tokens) is None


def test_a_link_leads_to_the_longest_run_that_was_there_before():
    automaton, state = SuffixAutomaton(), ROOT
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


def test_a_full_source_begins_anew_and_its_readers_with_it():
    source = SuffixIndex(capacity=8)
    old, young = source.reader(), source.reader()
    old.read([1, 2, 3, 1, 2, 3, 1, 2])
    young.read([4, 5, 4])
    assert source.automaton.num_tokens == 3 and young.cursor().children(1) == [(5, 0.5)]
    old.read([3, 1])
    assert source.automaton.num_tokens == 5 and 2 not in dict(old.cursor().children(4))
    source.reset()
    reader = source.reader()
    reader.read([4])
    assert reader.cursor().children(1) == []
