"""A model of a few lines behind the scripted endpoint, which tells the log-probabilities of prompts in each dialect.

endpoint.script = scored
log_prob([1, 5], 7), is_likeliest([1, 5], 7)      # what it tells of token 7 behind 1 and 5
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.scripted_endpoint import MODEL, PROMPT_TOKENS, Asked, Reply

OTHER = 0  # the token that is told besides the prompt's


def log_prob(before: Sequence[int], token: int) -> float:
    return -0.25 - (7 * len(before) + 13 * token + 3 * before[-1]) % 50 / 8


def is_likeliest(before: Sequence[int], token: int) -> bool:
    return (len(before) + token) % 2 == 0


def alternative(before: Sequence[int], token: int) -> float:
    """The log-probability of the likeliest token: above the prompt's own, or equal to it."""
    own = log_prob(before, token)
    return own if is_likeliest(before, token) else own / 2


def scored(asked: Asked) -> Reply:
    """The answer, in the form of the dialect that the body is of."""
    body = asked.body
    ids = body.get("prompt", body.get("input_ids"))
    assert all(isinstance(token, int) for token in ids)
    values = [None, *(log_prob(ids[:i], ids[i]) for i in range(1, len(ids)))]
    tops = [None, *(alternative(ids[:i], ids[i]) for i in range(1, len(ids)))]
    if asked.path == "/generate":
        return _sglang(body, ids, values, tops)
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
    if body.get("prompt_logprobs"):
        choice["prompt_logprobs"] = [None] + [
            {str(token): {"logprob": value, "rank": 1}, str(OTHER): {"logprob": top}}
            for token, value, top in zip(ids[1:], values[1:], tops[1:], strict=True)
        ]
    if body.get("echo"):
        output = [-1.0] * body["max_tokens"]
        texts = [None if top is None else {"x": top, "y": -9.0} for top in tops]
        choice["logprobs"] = {
            "token_logprobs": values + output,
            "top_logprobs": texts + [{"x": -1.0} for _ in output],
        }
    return _reply({"id": "r", "model": MODEL, "choices": [choice], "usage": _USAGE})


_USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1}


def _sglang(
    body: dict[str, Any], ids: list[int], values: list[float | None], tops: list[float | None]
) -> Reply:
    """The places from `logprob_start_len` on, of which the first has no log-probability."""
    first = body["logprob_start_len"]
    own = [[value, token, None] for value, token in zip(values, ids, strict=True)][first:]
    others = [[[top, OTHER, None]] for top in tops][first:]
    own[0][0] = None
    meta = {"id": "r", "prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "cached_tokens": 0}
    meta |= {"input_token_logprobs": own, "input_top_logprobs": [None, *others[1:]]}
    return _reply({"text": "", "meta_info": meta, "usage": None})


def _reply(body: dict[str, Any]) -> Reply:
    return Reply(content=json.dumps(body).encode())
