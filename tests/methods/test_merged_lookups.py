"""Looked-up trees that move on with the tokens of a step in flight, against dictionaries of paths."""

import random
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.combine.merged_lookups import AheadLookups, LookedUp
from eagle_ray.methods.lookup.drafter import LookupDrafter, NgramIndex
from eagle_ray.methods.lookup.suffix import SuffixIndex
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.tree_merge import Merged
from tests.support.operations import WatchCopies, WatchOperations, device_operations
from tests.support.trees import (
    TokenSequence,
    as_paths,
    check_tree,
    conditional_log_probs,
    grown_trees,
    some_trees,
)

Paths = dict[tuple[int, ...], list[float]]
DEPTH = 3
SINCE = 4


def candidates(seed: int, batch: int, has_model: bool) -> DraftTree:
    """A model's tree as its drafter hands it on, padding between the nodes; or its roots."""
    tree = grown_trees(seed, batch, DEPTH, 3, ties=False)
    tree.tokens[:] = torch.where(tree.parents < 0, 5, tree.tokens % 50)
    tree.tokens[:, 1:4] = torch.arange(3)
    if not has_model:
        return DraftTree.of_roots(tree.tokens[:, 0])
    gone = (torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.2) & (
        tree.depths == DEPTH
    )
    values = tree.log_values.masked_fill(gone, -torch.inf)
    return replace(tree, log_values=values, valid=values > -torch.inf)


def looked_up_trees(seed: int, batch: int) -> tuple[DraftTree, torch.Tensor]:
    """Deep trees of two drafters as one."""
    trees = some_trees(seed + 1, 2, batch, ties=False)
    blended = EnsembleCalibration(1, 2).merge(trees, DEPTH, torch.zeros(batch).long())
    return blended.tree, blended.log_probs


def tokens_since(trees: DraftTree, b: int, rng: random.Random) -> list[int]:
    """Tokens along a path of the tree, some of them past its end or aside of it."""
    path = list(rng.choice([(), *as_paths(trees, b, trees.log_values)]))
    return (path + [rng.randrange(4)] * rng.randint(0, 1))[:SINCE]


def expected_paths(
    tree: DraftTree, trees: DraftTree, log_probs: torch.Tensor, b: int, since: list[int]
) -> Paths:
    """Slow and obvious: what each of three drafters says of each path below the new root."""
    paths: Paths = {
        path: [said, -torch.inf, -torch.inf]
        for path, said in as_paths(tree, b, conditional_log_probs(tree)).items()
    }
    for i in range(2):
        for path, said in as_paths(trees, b, log_probs[..., i]).items():
            below = path[len(since) :]
            if path[: len(since)] == tuple(since) and 0 < len(below) <= DEPTH:
                paths.setdefault(below, [-torch.inf] * 3)[i + 1] = said
    return paths


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3), has_model=st.booleans())
def test_a_root_moves_on_and_what_is_left_is_merged(seed, batch, has_model):
    rng = random.Random(seed)
    tree, (trees, log_probs) = candidates(seed, batch, has_model), looked_up_trees(seed, batch)
    since = [tokens_since(trees, b, rng) for b in range(batch)]
    looked_up = LookedUp.of(
        trees, log_probs, [9] * batch, trees.num_nodes + 3, 2 * DEPTH + 1, torch.device("cpu")
    )
    padded = torch.tensor([tokens + [rng.randrange(4)] * (SINCE - len(tokens)) for tokens in since])
    merged = looked_up.merge(
        tree, padded, torch.tensor([len(tokens) for tokens in since]), DEPTH, has_model=True
    )
    valued = EnsembleCalibration(DEPTH, 3).value(
        merged, DEPTH, torch.zeros(batch).long(), 0, merged.tree.num_nodes
    )
    check_tree(valued.tree)
    for b in range(batch):
        expected = expected_paths(tree, trees, log_probs, b, since[b])
        for found, said in (
            (merged.tree, merged.log_probs_by_drafter),
            (valued.tree, valued.log_probs),
        ):
            each = [as_paths(found, b, said[..., i]) for i in range(3)]
            assert each[0].keys() == expected.keys()
            for path, values in expected.items():
                assert [one[path] for one in each] == pytest.approx(values, abs=1e-5)


def test_best_nodes_remain_if_there_are_more_than_a_pass_takes():
    tree, (trees, log_probs) = candidates(3, 2, True), looked_up_trees(3, 2)
    looked_up = LookedUp.of(
        trees, log_probs, [9] * 2, trees.num_nodes, 2 * DEPTH + 1, torch.device("cpu")
    )
    merged = looked_up.merge(
        tree, torch.zeros(2, SINCE).long(), torch.zeros(2).long(), DEPTH, has_model=True
    )
    blend, sets = EnsembleCalibration(DEPTH, 3), torch.zeros(2).long()
    every, best = (
        blend.value(merged, DEPTH, sets, 0, number) for number in (merged.tree.num_nodes, 9)
    )
    check_tree(best.tree)
    assert best.tree.tokens.shape == (2, 9) and best.extra.shape == (DEPTH, 2, 9)
    for b in range(2):
        values = as_paths(every.tree, b, every.tree.log_values)
        ranked = sorted(values, key=values.__getitem__, reverse=True)[:8]
        assert as_paths(best.tree, b, best.tree.log_values).keys() == set(ranked)


def look_ahead(num_slots: int, texts: list[list[int]], end: int) -> tuple[AheadLookups, LookedUp]:
    parts = [LookupDrafter(index, TreeBounds(20, 4, 3)) for index in (SuffixIndex(), NgramIndex())]
    lookups = AheadLookups(parts, num_slots, 4, torch.device("cpu"))
    at = DecodeSlots.of(list(range(len(texts))), [len(text) - 1 for text in texts])
    sampling = replace(SamplingBatch.of([SamplingParams()] * len(texts)), end_ids=frozenset([end]))
    return lookups, lookups.look_up(
        at, [TokenSequence(text) for text in texts], DraftPlan(4, 2), sampling
    )


def test_what_a_step_in_flight_commits_moves_the_root():
    """1 2 3 4 ... repeats, of which the step in flight commits 5 6; another commits what was never seen."""
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]]
    lookups, looked_up = look_ahead(2, texts, end=99)
    at = DecodeSlots.of([0, 1], [13, 13])
    result = VerifyResult(
        torch.zeros(2, 5).long(),
        torch.tensor([1, 1]),
        torch.tensor([[5, 6, 7, 0, 0], [5, 9, 0, 0, 0]]),
    )
    lookups.extend(at, result)
    merged = lookups.merge(
        looked_up, DraftTree.of_roots(torch.tensor([6, 9])), at, 4, has_model=False
    )
    assert max(as_paths(merged.tree, 0, merged.tree.draft_log_probs), key=len) == (7, 8, 1, 2)
    assert as_paths(merged.tree, 1, merged.tree.draft_log_probs) == {}
    at = DecodeSlots.of(
        [0, 1], [12, 11]
    )  # its first token after a prompt is the root; the other's root is known
    merged = lookups.merge(
        looked_up, DraftTree.of_roots(torch.tensor([5, 4])), at, 4, has_model=False
    )
    assert [
        max(as_paths(merged.tree, b, merged.tree.draft_log_probs), key=len) for b in (0, 1)
    ] == [
        (6, 7, 8, 1),
        (5, 6, 7, 8),
    ]


def test_lookups_without_compiled_kernels_are_the_same(monkeypatch):
    """The portable merge keeps a place for each part's root, which the merged tree has once."""
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [1, 2, 9, 1, 2, 5, 1, 2]]
    _, compiled = look_ahead(2, texts, end=99)
    monkeypatch.setattr(cpu_ops, "available", lambda device, dtype: False)
    _, portable = look_ahead(2, texts, end=99)
    real = compiled.depths > 0
    assert torch.equal(portable.depths, compiled.depths)
    for name in ("tokens", "parents", "paths", "log_probs"):
        assert torch.equal(getattr(portable, name)[real], getattr(compiled, name)[real]), name


def to_device(device: str, value: object) -> object:
    return type(value)(*(getattr(value, field.name).to(device) for field in fields(value)))


def test_moving_and_merging_need_few_launches_and_no_host_sync():
    lookups, looked_up = look_ahead(2, [[1, 2, 3, 1, 2]] * 2, end=99)
    at, sets = DecodeSlots.of([0, 1], [5, 5]), torch.zeros(2).long()
    tree, blend = candidates(3, 2, True), EnsembleCalibration(4, 3)

    def step(looked_up: LookedUp, tree: DraftTree, at: DecodeSlots, sets: torch.Tensor) -> Merged:
        merged = lookups.merge(looked_up, tree, at, 4, has_model=True)
        return blend.value(merged, 4, sets, 0, 32)

    with WatchOperations() as operations, WatchCopies() as copies:
        step(looked_up, tree, at, sets)
    assert (operations.seen, copies.seen) == ([], [])
    launches = device_operations(lambda: step(looked_up, tree, at, sets))
    assert launches.total() <= 170


def test_no_number_of_the_host_is_needed_on_the_device():
    """On device meta, which has shapes alone, a tensor of the host is refused."""
    lookups, looked_up = look_ahead(2, [[1, 2, 3, 1, 2]] * 2, end=99)
    lookups = AheadLookups(
        [LookupDrafter(NgramIndex(), TreeBounds(20, 4, 3))], 2, 4, torch.device("meta")
    )
    blend = EnsembleCalibration(4, 3, "meta")
    slots = torch.zeros(2, dtype=torch.int64, device="meta")
    at, tree = DecodeSlots(slots, slots, [0, 1], [5, 5]), to_device("meta", candidates(3, 2, True))
    merged = lookups.merge(to_device("meta", looked_up), tree, at, 4, has_model=True)
    assert blend.value(merged, 4, slots, 0, 32).tree.tokens.shape == (2, 32)
