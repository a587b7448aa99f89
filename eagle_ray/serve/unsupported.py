"""Parameters that are not built: each is refused by name unless its value asks for nothing; none is ever ignored.

Which values ask for nothing says one table, that of rows and batch files (``requests/refused.py``).

>>> refuse_unbuilt({"user": "me", "length_penalty": 1, "ebnf": ""}, Door.CHAT)
>>> refuse_unbuilt({"length_penalty": 0.5}, Door.CHAT)
Traceback (most recent call last):
...
eagle_ray.serve.http_errors.ApiError: length_penalty is not supported: 0.5 asks for what this server does not do; ...
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from eagle_ray.requests.parameters import Door
from eagle_ray.requests.refused import fix_of, is_no_op
from eagle_ray.serve.http_errors import unsupported

NO_TEXT: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": (), "refusal": ("",)}  # keys of a message


def refuse_unbuilt(extra: Mapping[str, Any], door: Door) -> None:
    """Raise ApiError for the first parameter that asks for what is not built. extra: parameters that are not read."""
    for name, value in extra.items():
        if not is_no_op(name, value, door):
            raise unsupported(name, f"{reprlib.repr(value)} asks for what this server does not do; {fix_of(name)}")


def refuse_in_message(extra: Mapping[str, Any], where: str) -> None:
    """Raise ApiError for message keys other than role and content. where: the message's place in the request."""
    for name, values in NO_TEXT.items():
        if extra.get(name) is not None and extra[name] not in values:
            raise unsupported(f"{where}.{name}", "this server reads and writes text alone; leave it out")
