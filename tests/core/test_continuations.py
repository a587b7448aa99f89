"""The trie of continuations, and its rows divided into passes: each finds what it needs in the cache."""

import random

import numpy as np
import pytest

from eagle_ray.core.continuations import (
    ROOT,
    Continuation,
    ContinuationScores,
    ScorePass,
    TokenTrie,
)


def random_paths(rng: random.Random) -> list[list[int]]:
    """Sequences over few tokens, so that they share prefixes; some empty, some equal, some long."""
    kind = rng.choice(["short", "long", "legs"])
    if kind == "legs":  # a long path with short ones at every place of it
        trunk = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        return [[*trunk[:i], 9, 9, rng.randrange(3)] for i in range(len(trunk))] + [trunk]
    longest = 4 if kind == "short" else 60
    return [
        [rng.randrange(3) for _ in range(rng.randint(0, longest))]
        for _ in range(rng.randint(1, 30))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_trie_has_each_prefix_once(seed):
    paths = random_paths(random.Random(seed))
    trie = TokenTrie(paths)
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert len(trie.tokens) == 1 + len(prefixes)
    for path, end in zip(paths, trie.ends, strict=True):
        nodes = trie.path(end)
        assert [trie.tokens[node] for node in nodes] == path
        assert [trie.depths[node] for node in nodes] == list(range(1, len(path) + 1))
    with_more = {prefix[:-1] for prefix in prefixes if len(prefix) > 1}
    assert trie.num_rows == len(with_more)  # no row for a sequence's last token


def check_passes(trie: TokenTrie, passes: list[ScorePass]) -> None:
    """Follow what the cache holds: the path to the base of each pass, from runs before it."""
    cached = {0: ROOT}  # depth -> the node whose keys and values are there
    computed = []
    for each in passes:
        path = [ROOT, *trie.path(each.base)]
        assert [cached[depth] for depth in range(len(path))] == path
        known = {each.base}
        for node in each.nodes:
            assert trie.parents[node] in known  # an ancestor in this pass, or the base
            known.add(node)
        depth = trie.depths[each.base] + 1
        for i, node in enumerate(each.nodes):  # rows are written one behind the other
            cached[depth + i] = node if each.is_run else -1
        computed += each.nodes
    assert sorted(computed) == sorted(node for node in trie.children if node != ROOT)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("max_tree", [1, 3, 16, 512])
def test_a_pass_finds_its_context_in_the_cache(seed, max_tree):
    trie = TokenTrie(random_paths(random.Random(seed)))
    passes = list(trie.passes(20, max_tree))
    check_passes(trie, passes)
    # A tree without branches is a run of at most max_tree rows.
    assert all(len(each.nodes) <= max(20, max_tree) for each in passes if each.is_run)
    assert all(len(each.nodes) <= max_tree for each in passes if not each.is_run)


@pytest.mark.parametrize("seed", range(30))
def test_passes_fit_the_room_behind_the_prompt(seed):
    rng = random.Random(seed)
    scores = ContinuationScores([Continuation(path) for path in random_paths(rng)])
    for room in (max(scores.longest, 1), scores.longest + 5, 10_000):
        scores.plan(room, 512, 512)
        assert scores.num_positions <= room


def test_results_are_sums_of_what_was_recorded():
    given = [
        Continuation([5, 7, 9], num_bytes=6),
        Continuation([5, 8], 1, 2),
        Continuation([]),
        Continuation([5, 7, 9], num_bytes=6),
    ]
    scores = ContinuationScores(given)
    scores.plan(100, 512, 512)
    rng = np.random.default_rng(0)
    by_prefix = {}
    nodes = [ROOT]
    while True:
        _, tokens, children = scores.children_of(nodes)
        values = -rng.random(len(children)).astype(np.float32)
        for child, value in zip(children, values, strict=True):
            by_prefix[tuple(scores.trie.tokens[n] for n in scores.trie.path(child))] = float(value)
        scores.record(nodes, children, values, np.array([t != 8 for t in tokens], dtype=bool))
        if scores.is_complete:
            break
        nodes = scores.next_pass.nodes
    first, second, empty, equal = scores.results()
    assert first.score == pytest.approx(
        by_prefix[5,] + by_prefix[5, 7] + by_prefix[5, 7, 9], abs=1e-12
    )
    assert second.score == by_prefix[5, 8] and second.num_tokens == 1 and not second.is_greedy
    assert empty.score == 0.0 and empty.num_tokens == 0 and empty.is_greedy
    assert equal == first
    assert scores.num_verified == 2  # 5 and 7: leaves are no rows
    assert scores.label_mass() is None  # contexts differ: one continuation has a token of context
    scores.restart()
    assert scores.num_verified == 0 and not scores.is_complete


def test_label_mass_counts_a_first_token_once():
    scores = ContinuationScores([Continuation([5, 7]), Continuation([5, 8]), Continuation([6])])
    scores.plan(10, 512, 512)
    _, tokens, children = scores.children_of([ROOT])
    assert tokens == [5, 6]
    values = np.log(np.array([0.5, 0.25], dtype=np.float32))
    scores.record([ROOT], children, values, np.array([True, False]))
    assert scores.label_mass() == pytest.approx(0.75)


def test_label_mass_is_that_of_tokens_behind_the_context():
    scores = ContinuationScores([Continuation([5, token], num_context=1) for token in (7, 8)])
    scores.plan(10, 512, 512)
    nodes = [ROOT]
    for log_probs in ([-3.0], np.log([0.5, 0.25])):
        _, _, children = scores.children_of(nodes)
        scores.record(
            nodes, children, np.array(log_probs, np.float32), np.ones(len(children), bool)
        )
        if not scores.is_complete:
            nodes = scores.next_pass.nodes
    assert scores.is_complete and scores.label_mass() == pytest.approx(0.75)


def test_a_hundred_thousand_continuations_are_few_passes():
    rng = random.Random(0)
    paths = [[rng.randrange(1000), rng.randrange(1000), 7] for _ in range(100_000)]
    trie = TokenTrie(paths)
    passes = list(trie.passes(512, 512))
    assert trie.num_rows > 90_000
    assert len(passes) <= 1.6 * trie.num_rows / 512
