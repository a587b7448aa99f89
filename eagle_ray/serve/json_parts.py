"""JSON of any size, written in small parts: one call of the encoder holds Python's lock until it returns.

An answer of megabytes is made in a thread. `json.dumps` of it in one call would stop the event loop all the same; in
parts, the loop gets the lock between two of them.

    >>> json_bytes({"tokens": [1, 2]})
    b'{"tokens":[1,2]}'
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 4  # {"choices": [{"logprobs": {"content": [...]}}]}: the containers around the longest lists
NUM_VALUES = 4096  # numbers or texts that are encoded in one call
NUM_OBJECTS = 32  # the same of objects, each of which has up to 20 alternatives
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
