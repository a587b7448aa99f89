"""Each law is noticed when it is broken."""

import pytest

from tests.support.row_invariants import STATISTICS, broken_invariants

GOOD = {
    "status": "ok",
    "method": "eagle2",
    "finish_reason": "stop",
    "error_code": None,
    "error_message": None,
    "text": "a",
    "output_token_ids": [3] * 6,
    "token_logprobs": [-0.5] * 6,
    "cumulative_logprob": -3.0,
    "completion_tokens": 6,  # the prefill's, 3 bonus tokens and 3 accepted ones, one cut off
    "num_spec_steps": 3,
    "num_draft_tokens": 12,
    "num_accepted_draft_tokens": 3,
    "num_spec_tokens": 2,
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.25,
    "acceptance_histogram": [1, 1, 1],
    "num_plain_steps": 0,
    "num_discarded_tokens": 1,
    "target_forwards": 4,
    "draft_forwards": 9,
    "proposed_by_depth": [7, 5],
    "accepted_by_depth": [2, 1],
    "confidence_nodes": [4, 2],
    "confidence_accepted": [2, 1],
    "confidence_expected": [1.5, 1.25],
    "calibrated_nodes": [3, 3],
    "calibrated_accepted": [1, 2],
    "calibrated_expected": [0.75, 2.25],
    "per_step_budget": [5, 5, 5],
    "per_step_accepted": [0, 1, 2],
}
ERROR = dict.fromkeys(GOOD) | {
    "status": "error",
    "error_code": "bad_json",
    "error_message": "line 3",
    "method": "x",
}
BROKEN = {
    "completion_tokens": 7,
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_spec_tokens": 3,
    "acceptance_histogram": [0, 2, 1],
    "accepted_by_depth": [1, 1],
    "num_draft_tokens": 13,
    "proposed_by_depth": [7, 4],
    "confidence_nodes": [1, 2],
    "confidence_accepted": [2, 0],
    "confidence_expected": [2.5, 1.25],
    "calibrated_nodes": [3, 4],
    "calibrated_accepted": [3, 1],
    "calibrated_expected": [0.75, 1.25],
    "mean_acceptance_length": None,
    "draft_acceptance_rate": 0.5,
    "num_plain_steps": 4,
    "per_step_budget": [5, 5],
    "per_step_accepted": [0, 1, 1],
    "output_token_ids": [3] * 5,
    "token_logprobs": [-0.5],
    "finish_reason": None,
    "error_code": "x",
    "method": "none",
}


def test_good_rows_break_no_law():
    assert broken_invariants(GOOD) == [] and broken_invariants(ERROR) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_count_is_noticed(name):
    assert broken_invariants(GOOD | {name: BROKEN[name]})


@pytest.mark.parametrize("name", STATISTICS)
def test_error_rows_have_no_statistics(name):
    assert broken_invariants(ERROR | {name: GOOD[name]}) == [
        f"an error row has {name} {GOOD[name]!r}, not null"
    ]


def test_a_row_without_steps_has_no_acceptance_length():
    nothing = {
        "output_token_ids": [3],
        "token_logprobs": None,
        "completion_tokens": 1,
        "mean_acceptance_length": None,
        "draft_acceptance_rate": None,
        "acceptance_histogram": [0, 0, 0],
        "num_discarded_tokens": 0,
        "proposed_by_depth": [0, 0],
        "accepted_by_depth": [0, 0],
        "confidence_nodes": [0, 0],
        "confidence_accepted": [0, 0],
        "confidence_expected": [0.0, 0.0],
        "calibrated_nodes": [0, 0],
        "calibrated_accepted": [0, 0],
        "calibrated_expected": [0.0, 0.0],
        "per_step_budget": [],
        "per_step_accepted": [],
        "num_spec_steps": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
    }
    assert broken_invariants(GOOD | nothing) == []
    assert broken_invariants(GOOD | nothing | {"mean_acceptance_length": 1.0})
