"""Coupled drafts: the target's own noise at the right positions, more accepted, the same output, honest confidences."""

import pytest
import torch

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import MAX_FEEDBACK
from eagle_ray.methods.coupling import Coupling
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import run, table_engine

VOCAB, DEPTH = 40, 4
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
MIXED = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=1.0),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.5, top_k=12),
    dict(temperature=1.5, min_p=0.05),
]


def finished_sequences(
    count: int = 48, kinds: list[dict] = MIXED, **engine: object
) -> list[Sequence]:
    """Sequences of every kind in one batch. engine: see table_engine."""
    kinds = [kinds[i % len(kinds)] for i in range(count)]
    params = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    tree = dict(max_nodes=8, max_depth=DEPTH, top_k=4) | engine
    return run(
        table_engine(TABLE, num_slots=16, **tree), [[1 + i % 30, 2] for i in range(count)], params
    )


def merged_statistics(sequences: list[Sequence]) -> AcceptanceStats:
    stats = AcceptanceStats.empty(DEPTH)
    for sequence in sequences:
        stats = stats.merge(sequence.stats)
    return stats


def test_a_drafter_that_equals_the_target_is_always_accepted():
    """A chain of one guess a level, with weights that trust both logits and noise: every pick is
    predicted, at every level, for every temperature and cut. Noise of any other position, seed or
    token would miss almost every time.
    """
    exact = Coupling(DEPTH)
    exact.fit.parameters[:] = torch.tensor([20.0, 20.0, 0.0, -1e4])
    exact.update = lambda *args: None
    stats = merged_statistics(
        finished_sequences(max_nodes=DEPTH, top_k=1, noise=0.0, coupling=exact)
    )
    assert stats.mean_acceptance_length == DEPTH + 1


def test_an_exact_drafter_is_found_out():
    """From the cautious start, the fit alone must come to trust a drafter that is always right."""
    sequences = finished_sequences(
        count=240, noise=0.0, kinds=[dict(temperature=1.0)], coupling=Coupling(DEPTH)
    )
    assert merged_statistics(sequences[-48:]).mean_acceptance_length > 0.92 * (DEPTH + 1)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [s.output_ids for s in finished_sequences(max_nodes=0, max_depth=0, top_k=0)]


@pytest.mark.parametrize("noise", [0.0, 0.5, 5.0])
def test_outputs_are_those_of_plain_decoding(plain, noise):
    """A table has no near-ties to forgive: one row's logits are the same numbers in every batch."""
    for learning in (
        {},
        dict(coupling=Coupling(DEPTH)),
        dict(calibration=Calibration(DEPTH), coupling=Coupling(DEPTH)),
    ):
        assert [s.output_ids for s in finished_sequences(noise=noise, **learning)] == plain


@pytest.mark.parametrize("count", [1, 3])
def test_paths_longer_than_a_lesson_are_learned_from(count):
    """One sequence's picks are more than MAX_FEEDBACK: it is a lesson of its own, and no lesson is of nobody."""
    deep = dict(max_nodes=MAX_FEEDBACK + 1, max_depth=MAX_FEEDBACK + 1, top_k=1, noise=0.0)
    plain = [
        s.output_ids
        for s in finished_sequences(count, MIXED[1:], max_nodes=0, max_depth=0, top_k=0)
    ]
    coupling = Coupling(MAX_FEEDBACK + 1)
    before = coupling.fit.parameters.clone()
    assert [
        s.output_ids for s in finished_sequences(count, MIXED[1:], coupling=coupling, **deep)
    ] == plain
    assert (coupling.fit.parameters != before).any()


@pytest.mark.parametrize("kind", MIXED[1:])
def test_coupling_is_accepted_more(kind):
    alone = merged_statistics(finished_sequences(noise=0.5, kinds=[kind]))
    coupled = merged_statistics(
        finished_sequences(noise=0.5, kinds=[kind], coupling=Coupling(DEPTH))
    )
    assert (
        coupled.num_draft_tokens / coupled.num_steps
        == alone.num_draft_tokens / alone.num_steps
        == 8
    )
    assert coupled.mean_acceptance_length > alone.mean_acceptance_length + 0.3


@pytest.mark.parametrize("sharpness", [0.4, 3.0])
@pytest.mark.parametrize("kind", [MIXED[0], MIXED[2]])
def test_calibration_makes_confidences_honest(sharpness, kind):
    """A drafter with the target's logits times a constant: too shy or too sure. Short outputs of
    many prompts, as a greedy table soon runs in circles.
    """
    table = 1.5 * torch.randn(600, 600, generator=torch.Generator().manual_seed(0))
    engine = table_engine(
        table, 32, 8, DEPTH, 4, noise=1.0, calibration=Calibration(DEPTH), coupling=Coupling(DEPTH)
    )
    engine.drafter.table *= sharpness
    params = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True, **kind) for i in range(500)]
    stats = merged_statistics(run(engine, [[1 + i] for i in range(500)], params))
    assert stats.drafted.calibration_error > 0.1 and stats.calibrated.calibration_error < 0.04


def test_counts_of_confidences_agree_with_the_acceptance():
    stats = merged_statistics(
        finished_sequences(noise=0.5, calibration=Calibration(DEPTH), coupling=Coupling(DEPTH))
    )
    for counts in (stats.drafted, stats.calibrated):
        assert sum(counts.accepted) == stats.num_accepted_draft_tokens
        assert all(a <= n for a, n in zip(counts.accepted, counts.nodes, strict=True))
    assert sum(stats.drafted.nodes) == sum(stats.calibrated.nodes)
