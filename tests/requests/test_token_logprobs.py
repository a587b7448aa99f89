"""Log-probabilities that a client's JSON parser can read, and that come back from a row as they were."""

import json

from eagle_ray.requests.answers import (
    Logprob,
    chat_form,
    completion_form,
    python_form,
    row_form,
    row_logprobs,
    token_logprobs,
)

TOPS = [[(5, -0.1), (6, -float("inf"))]]
TOKENS = token_logprobs([5], [-0.1], TOPS)


def test_a_token_of_probability_zero_is_sent_as_openai_sends_it():
    [chat] = json.loads(json.dumps(chat_form(TOKENS, str), allow_nan=False))
    text = json.loads(json.dumps(completion_form(TOKENS, str, True), allow_nan=False))
    assert [top["logprob"] for top in chat["top_logprobs"]] == [-0.1, -9999.0]
    assert text["top_logprobs"] == [{"5": -0.1, "6": -9999.0}]


def test_python_and_rows_have_it_as_it_is():
    assert python_form(TOKENS, None, 2) == [{5: Logprob(-0.1, 1), 6: Logprob(-float("inf"), 2)}]
    columns = {"output_token_ids": [5], "token_logprobs": [-0.1]}
    assert row_logprobs(columns | {"token_top_logprobs": row_form(TOPS)}) == TOKENS
    assert row_logprobs(columns) == token_logprobs([5], [-0.1], None)
    assert row_logprobs(columns | {"output_token_ids": None}) is None


def test_only_requested_alternatives_are_shown_with_their_ranks():
    [token] = python_form(token_logprobs([7], [-3.0], [[(5, -0.1), (7, -3.0)]]), str, 1)
    assert token == {5: Logprob(-0.1, 1, "5"), 7: Logprob(-3.0, 2, "7")}
    assert python_form(token_logprobs([7], [None], [[]]), str, 1) == [None]
