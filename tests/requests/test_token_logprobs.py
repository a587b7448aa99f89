"""Log-probabilities that a client's JSON parser can read, and that come back from a row as they were."""

import json

import pytest

from eagle_ray.assembly.hub import ASSETS
from eagle_ray.requests.answers import (
    Logprob,
    TextOffsets,
    chat_form,
    completion_form,
    python_form,
    row_form,
    row_logprobs,
    token_logprobs,
)
from eagle_ray.text.tokenizer import Tokenizer

TOPS = [[(5, -0.1), (6, -float("inf"))]]
TOKENS = token_logprobs([5], [-0.1], TOPS)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(ASSETS / "tiny" / "target")


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


def test_half_characters_carry_their_bytes(tokenizer):
    """A tokenizer of bytes: clients join the bytes, and offsets count the characters of the text."""
    text = "é🙂!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    tokens = token_logprobs(
        ids, [-0.5] * len(ids), [[(i, -0.5), (ids[0], -1.0), (ids[1], -2.0)] for i in ids]
    )
    chat = json.loads(json.dumps(chat_form(tokens, tokenizer.token_text)))
    assert bytes(byte for token in chat for byte in token["bytes"]).decode() == text
    completion = completion_form(tokens, tokenizer.token_text, True)
    assert completion["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    assert (
        completion["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
        and completion["tokens"][-1] == "!"
    )
    assert all(len(tops) >= 2 for tops in completion["top_logprobs"])
    offsets = TextOffsets()  # of a stream, whose chunks may cut a character
    parts = [completion_form([token], tokenizer.token_text, True, offsets) for token in tokens]
    assert [offset for part in parts for offset in part["text_offset"]] == completion["text_offset"]
    assert python_form(tokens, tokenizer.token_text, 1)[0][ids[0]].decoded_token == "\ufffd"


def test_only_requested_alternatives_are_shown_with_their_ranks():
    [token] = python_form(token_logprobs([7], [-3.0], [[(5, -0.1), (7, -3.0)]]), str, 1)
    assert token == {5: Logprob(-0.1, 1, "5"), 7: Logprob(-3.0, 2, "7")}
    assert python_form(token_logprobs([7], [None], [[]]), str, 1) == [None]
