"""The statistics of steps that are added up as arrays are those that counting sequence by sequence gives."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle_ray.core.counters import CONFIDENCE_BINS, AcceptanceStats, ConfidenceCounts
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine import step as step_module
from eagle_ray.engine.step import (
    NUM_COUNTS,
    StepOutput,
    UnflushedStats,
    contain_any,
    node_counts,
    step_record,
)
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.accepted_path import accept_path
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from tests.support.toy_models import random_tree

SLOTS, DEPTH = 6, 3


def sequence(name: str, slot: int) -> Sequence:
    return Sequence(name, [1], SamplingParams(), slot=slot, stats=AcceptanceStats.empty(DEPTH))


def record(source: np.random.Generator, size: int, depth: int) -> np.ndarray:
    """A step_record with random counts, of a plain step if the depth is 0."""
    columns = [source.integers(0, depth + 1, (size, 1)), source.integers(0, 9, (size, depth + 1))]
    if depth:
        columns += [
            source.integers(0, 3, (size, depth)),
            source.integers(0, 99, (size, NUM_COUNTS)),
        ]
        columns.append(source.integers(0, 99, (size, 1)))
    return np.concatenate(columns, 1)


def count(sequence: Sequence, row: list[int], depth: int, passes: int) -> None:
    """Count one sequence's step as AcceptanceStats counts it."""
    stats = sequence.stats
    stats.add_step(row[0], row[depth + 2 : 2 * depth + 2])
    sequence.target_forwards += 1
    sequence.draft_forwards += passes
    if depth:
        bins = np.reshape(row[2 * depth + 2 : -1], (6, CONFIDENCE_BINS)).tolist()
        stats.drafted.add(ConfidenceCounts(*bins[:3]))
        stats.calibrated.add(ConfidenceCounts(*bins[3:]))


def test_adding_arrays_is_counting_sequence_by_sequence(monkeypatch):
    """Steps of any depth, sequences that come and go, and flushes at any time."""
    monkeypatch.setattr(step_module, "MAX_STEPS", 7)
    choices, source = random.Random(1), np.random.default_rng(1)
    unflushed = UnflushedStats(SLOTS, DEPTH)
    running = {
        slot: (sequence(f"{slot}", slot), sequence(f"{slot}", slot)) for slot in range(SLOTS)
    }
    ended: list[tuple[Sequence, Sequence]] = []
    for step in range(200):
        depth = choices.choice([0, 1, DEPTH])
        rows = sorted(choices.sample(range(SLOTS), choices.randint(1, SLOTS)))
        values, passes = record(source, SLOTS, depth), source.integers(0, 4, len(rows))
        unflushed.add(
            [running[slot][0] for slot in rows], StepOutput.of(values, depth), rows, passes
        )
        for slot, number in zip(rows, passes.tolist(), strict=True):
            count(running[slot][1], values[slot].tolist(), depth, number)
        if choices.random() < 0.3:
            slot = choices.randrange(SLOTS)
            unflushed.flush(running[slot][0])
            ended.append(running[slot])
            running[slot] = sequence(f"{step}", slot), sequence(f"{step}", slot)
    unflushed.flush_all()
    for one, other in [*ended, *running.values()]:
        assert one.stats == other.stats
        assert (one.target_forwards, one.draft_forwards) == (
            other.target_forwards,
            other.draft_forwards,
        )
    assert len(ended) > 40


def test_the_tokens_of_a_step_are_those_up_to_the_bonus_token():
    tokens, nothing = np.array([[7, 8, 9], [8, 7, 7], [5, 6, 7]]), np.zeros((3, 0), dtype=int)
    accepted = np.array([1, 0, 2])
    is_finite = np.ones(3, dtype=bool)
    output = StepOutput(
        accepted, tokens, nothing, nothing, nothing, nothing, accepted + 1, is_finite
    )
    assert output.token_lists() == [[7, 8], [8], [5, 6, 7]]
    assert contain_any(output.token_lists(), {7, 9}) == [True, False, True]
    assert contain_any(output.token_lists(), ()) == [False] * 3


@pytest.mark.parametrize("first", [0, 1, 2])
def test_tokens_behind_a_node_that_is_not_finite_are_left_out(first):
    tree = DraftTree.of_roots(torch.tensor([4, 4]))
    result = VerifyResult(
        torch.tensor([[0, 1, 2], [0, 1, -1]]), torch.tensor([2, 1]), torch.tensor([[5, 6, 7]] * 2)
    )
    is_finite = torch.ones(2, 3, dtype=torch.bool)
    is_finite[0, first] = False
    record = step_record(tree, result, 0, None, is_finite)
    output = StepOutput.of(record.numpy(), 2)
    assert output.is_finite.tolist() == [False, True]
    assert output.token_lists() == [[5, 6, 7][:first], [5, 6]]


def test_the_counts_of_a_record_are_those_of_torch():
    trees = [random_tree(torch.Generator().manual_seed(s), 9, vocab=6) for s in range(40)]
    tree = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
    depth = int(tree.depths.max())
    picks = torch.randint(0, 6, (len(trees) * 9,), generator=torch.Generator().manual_seed(3))
    result = accept_path(
        tree, tree.pack(torch.zeros(len(trees), dtype=torch.int64), len(picks)), picks, depth
    )
    wanted = torch.cat(node_counts(tree, result, depth), 1)
    record = step_record(
        tree, result, depth, None, torch.ones_like(result.tokens, dtype=torch.bool)
    )
    known = torch.cat([result.num_accepted[:, None], result.tokens], 1)
    assert torch.equal(record[:, : depth + 2], known)
    assert torch.equal(record[:, -1], tree.sums())
    found = record[:, depth + 2 : -1]
    assert (found - wanted).abs().max() <= 1  # of a sum of probabilities in units of 2**-20
    assert torch.equal(found[:, :depth], wanted[:, :depth]) and int(found.sum()) > 0


def test_trees_that_differ_in_a_node_have_other_sums():
    """A token, a parent, or two children of one node in another order; what padding holds says nothing."""
    tree = DraftTree(
        tokens=torch.tensor([[4, 7, 9, 5, 0]]),
        parents=torch.tensor([[-1, 0, 0, 1, -1]]),
        depths=torch.tensor([[0, 1, 1, 2, 0]]),
        log_values=torch.zeros(1, 5),
        draft_log_probs=torch.zeros(1, 5),
        valid=torch.tensor([[True, True, True, True, False]]),
    )
    others = [
        {"tokens": [4, 7, 9, 6, 0]},
        {"parents": [-1, 0, 0, 2, -1]},
        {"tokens": [4, 9, 7, 5, 0]},
    ]
    sums = [
        replace(tree, **{k: torch.tensor([v]) for k, v in other.items()}).sums() for other in others
    ]
    assert len({int(s) for s in [tree.sums(), *sums]}) == 4
    assert torch.equal(replace(tree, tokens=torch.tensor([[4, 7, 9, 5, 3]])).sums(), tree.sums())
