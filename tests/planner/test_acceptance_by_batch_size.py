"""What is learnt at one size of batch is not believed of another, but for where nothing else is known."""

import pytest
import torch

from eagle_ray.planner.acceptance_model import AcceptanceModel
from eagle_ray.planner.calibrated_acceptance import AcceptanceByBatchSize, CalibratedAcceptance


def new_acceptance() -> AcceptanceByBatchSize:
    return AcceptanceByBatchSize(AcceptanceModel((1,), 1))


def observe(acceptance: CalibratedAcceptance, num_sequences: int, probability: float) -> None:
    acceptance.model.observe([torch.full((num_sequences, 1, 1), probability).log()], width=1)


def expected_tokens(acceptance: CalibratedAcceptance) -> float:
    """Draft tokens of a sequence with one node."""
    return acceptance.model.expected([1])[0, 0, 0]


def test_sizes_of_one_octave_share_what_is_known():
    by_size = new_acceptance()
    assert by_size.of(9) is by_size.of(16)
    assert by_size.of(3) is by_size.of(4)
    assert len({id(by_size.of(size)) for size in (1, 2, 3, 5, 9, 17)}) == 6


def test_small_last_batches_do_not_change_full_batch_acceptance():
    by_size = new_acceptance()
    observe(by_size.of(16), 16, 0.8)
    by_size.of(16).update(8, 10)
    trust = by_size.of(16).accuracy
    for _ in range(100):
        observe(by_size.of(2), 2, 0.1)
        by_size.of(2).update(0, 1)
    assert expected_tokens(by_size.of(2)) == pytest.approx(0.1, abs=0.01)
    assert expected_tokens(by_size.of(16)) == pytest.approx(0.8)
    assert by_size.of(2).accuracy < 0.2 < trust == by_size.of(16).accuracy


def test_a_new_size_begins_with_what_was_used_last():
    by_size = new_acceptance()
    observe(by_size.of(16), 16, 0.8)
    observe(by_size.of(2), 2, 0.1)  # sent, and not heard of yet
    by_size.of(2).update(1, 9)
    assert expected_tokens(by_size.of(4)) == expected_tokens(by_size.of(2)) < 0.8
    assert by_size.of(4).accuracy == by_size.of(2).accuracy < 1


def test_batch_size_without_drafts_has_no_acceptance_of_its_own():
    """What the first drafts taught, before anything was calibrated, is not what one sequence begins with later."""
    by_size = new_acceptance()
    observe(by_size.last, 16, 0.1)
    observe(by_size.of(16), 16, 0.8)
    assert expected_tokens(by_size.of(1)) == expected_tokens(by_size.of(16)) > 0.1
