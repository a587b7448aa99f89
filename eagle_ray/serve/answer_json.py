"""Answers as clients get them: JSON of any size in small parts, and server-sent events as OpenAI's streams have them.

An answer of megabytes is made in a thread. One call of the encoder holds Python's lock until it returns, so
`json.dumps` of it would stop the event loop all the same; in parts, the loop gets the lock between two of them.

    >>> json_bytes({"tokens": [1, 2]})
    b'{"tokens":[1,2]}'
    >>> event({"choices": []})
    'data: {"choices":[]}\\n\\n'
    >>> without_nulls({"choices": [{"text": "a", "logprobs": None, "finish_reason": None}]})
    {'choices': [{'text': 'a', 'logprobs': None, 'finish_reason': 'length'}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_ray.serve.http_errors import ApiError

MAX_DEPTH = 4  # {"choices": [{"logprobs": {"content": [...]}}]}: the containers around the longest lists
NUM_VALUES = 4096  # numbers or texts that are encoded in one call
NUM_OBJECTS = 32  # the same of objects, each of which has up to 20 alternatives
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DONE = "data: [DONE]\n\n"
TYPED_CLIENT = "x-stainless-lang"  # a header of every library that OpenAI has had generated
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    """Return what Starlette's JSONResponse would send."""
    return "".join(json_parts(value)).encode()


def json_parts(value: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the JSON text in parts. depth: levels of objects and of lists of objects that are taken apart."""
    if isinstance(value, dict) and value and depth:
        for i, (key, inner) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_encode(key)}:"
            yield from json_parts(inner, depth - 1)
        yield "}"
    elif isinstance(value, list) and value:
        yield from _list_parts(value, depth)
    else:
        yield _encode(value)


def _list_parts(values: list[Any], depth: int) -> Iterator[str]:
    holds_objects = any(isinstance(value, (dict, list)) for value in values[:2])
    if holds_objects and depth:
        for i, value in enumerate(values):
            yield "," if i else "["
            yield from json_parts(value, depth - 1)
    else:
        size = NUM_OBJECTS if holds_objects else NUM_VALUES
        for start in range(0, len(values), size):
            yield f"{',' if start else '['}{_encode(values[start : start + size])[1:-1]}"
    yield "]"


def event(body: dict[str, Any]) -> str:
    """Escape the characters at which some clients end a line and that JSON does not escape itself."""
    parts = (part.translate(LINE_ENDS) for part in json_parts(body))
    return f"data: {''.join(parts)}\n\n"


def error_event(error: ApiError) -> str:
    """Return the last event of a stream that failed."""
    return event(error.body())


def is_typed(headers: Mapping[str, str]) -> bool:
    """Return whether a request comes from a library whose types allow no null, by its headers in lower case."""
    return TYPED_CLIENT in headers


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Return a text completion, or a chunk of its stream, as OpenAI's own client libraries can check it.

    OpenAI's servers, and vLLM, say null for the finish_reason of a chunk that is not the last, for the log-probability
    of a prompt's first token and for the alternatives to it. OpenAI's document, from which its libraries' types are
    made, has no null there, so `_strict_response_validation` refuses it. These clients get "length", for that is why a
    chunk ends, a log-probability of 0, for what is given is certain, and no alternatives.
    """
    return body | {"choices": [_choice(choice) for choice in body["choices"]]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice["logprobs"]
    if logprobs is not None:
        logprobs = logprobs | {
            "token_logprobs": [0.0 if logprob is None else logprob for logprob in logprobs["token_logprobs"]],
            "top_logprobs": logprobs["top_logprobs"] and [tops or {} for tops in logprobs["top_logprobs"]],
        }
    return choice | {"logprobs": logprobs, "finish_reason": choice["finish_reason"] or "length"}
