"""Parameters that are not built: each is refused by name unless its value asks for nothing; none is ever ignored.

Which values ask for nothing says one table, that of rows and batch files (``requests/parameters.py``).

>>> refuse_unbuilt({"user": "me", "length_penalty": 1, "ebnf": ""}, own={})
>>> refuse_unbuilt({"length_penalty": 0.5}, own={})
Traceback (most recent call last):
...
eagle_ray.serve.http_errors.ApiError: length_penalty is not supported: 0.5 asks for what this server does not do; ...
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_ray.requests.parameters import (
    EMPTY,
    HINTS,
    NO_OP_VALUES,
    PARAMETER_ALIASES,
    REQUEST_PARAMETERS,
    UNSUPPORTED_PARAMETERS,
    NoOpValues,
    is_no_op,
)
from eagle_ray.serve.http_errors import unsupported

Json = dict[str, Any]
NO_TEXT: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": (), "refusal": ("",)}  # keys of a message
STATELESS = "this server keeps no responses; send the whole conversation"
TEMPLATE = "give chat_template_kwargs, which the target's template reads"
FIXES = {
    "background": "the response comes with this request; for work without a client use /v1/batches",
    "conversation": STATELESS,
    "previous_response_id": STATELESS,
    "reasoning": TEMPLATE,
    "reasoning_effort": TEMPLATE,
    "service_tier": "all requests are served alike; leave it out",
    "store": STATELESS,
    "structured_outputs": "give one of json, json_object, regex, choice and grammar, or json_schema in place of it",
} | {name: f"use {own}" for name, own in PARAMETER_ALIASES.items()}  # what to do; else to leave it out


def refuse_unbuilt(extra: Mapping[str, Any], own: NoOpValues) -> None:
    """Raise ApiError for the first parameter that asks for what is not built.

    Args:
        extra: the request's other parameters.
        own: the values that ask for nothing of the endpoint's own parameters.
    """
    for name, value in extra.items():
        if name not in HINTS and not is_no_op(name, value, own):
            fix = FIXES.get(name, "leave it out")
            raise unsupported(name, f"{reprlib.repr(value)} asks for what this server does not do; {fix}")


def no_op_schemas(built: Iterable[str], own: NoOpValues) -> dict[str, Json]:
    """Return the JSON schemas of the parameters that are not built, for the OpenAPI document."""
    names = (UNSUPPORTED_PARAMETERS | REQUEST_PARAMETERS | own.keys()) - {*built}
    nulls = {"type": "object", "additionalProperties": {"type": "null"}}
    found: dict[str, Json] = {}
    for name in sorted(names):
        values = [value for value in (*own.get(name, NO_OP_VALUES.get(name, ())), *EMPTY) if is_no_op(name, value, own)]
        found[name] = {"enum": [None, *values]}
        if {} in values:
            found[name] = {"anyOf": [{"enum": [None, *(value for value in values if value != {})]}, nulls]}
    return found | {name: {} for name in HINTS if name not in built}


def refuse_in_message(extra: Mapping[str, Any], where: str) -> None:
    """Raise ApiError for message keys other than role and content. where: the message's place in the request."""
    for name, values in NO_TEXT.items():
        if extra.get(name) is not None and extra[name] not in values:
            raise unsupported(f"{where}.{name}", "this server reads and writes text alone; leave it out")
