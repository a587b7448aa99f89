"""Text completions for OpenAI's own client libraries, whose types know no null where its servers send one.

OpenAI's servers, and vLLM, say null for what is not there: the finish_reason of a chunk that is not the last, the
log-probability of a prompt's first token, the alternatives to it. Their document, from which the libraries' types are
made, has no null in these places, so that a client that checks it (`_strict_response_validation` in Python) refuses
them. A client that is such a library by its header gets what the types know: "length", for that is why a chunk ends, a
log-probability of 0, for what is given is certain, and no alternatives. Everybody else gets the nulls.

    >>> without_nulls({"choices": [{"text": "a", "logprobs": None, "finish_reason": None}]})
    {'choices': [{'text': 'a', 'logprobs': None, 'finish_reason': 'length'}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADER = "x-stainless-lang"  # of every library that OpenAI has had generated


def is_typed(headers: Mapping[str, str]) -> bool:
    """headers: a request's, names in lower case."""
    return HEADER in headers


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Return a text completion, or a chunk of its stream, without nulls."""
    return body | {"choices": [_choice(choice) for choice in body["choices"]]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice["logprobs"]
    if logprobs is not None:
        logprobs = logprobs | {
            "token_logprobs": [0.0 if logprob is None else logprob for logprob in logprobs["token_logprobs"]],
            "top_logprobs": logprobs["top_logprobs"] and [tops or {} for tops in logprobs["top_logprobs"]],
        }
    return choice | {"logprobs": logprobs, "finish_reason": choice["finish_reason"] or "length"}
