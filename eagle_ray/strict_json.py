"""Parse JSON strictly, with equal results in every process.

Python's own nesting limit counts the calls above it: the driver would accept a row that a worker, with a deeper
stack, refuses. So nesting is limited far below that.

    >>> parse_json('{"prompt": "Hi"}')
    {'prompt': 'Hi'}
"""

from __future__ import annotations

import json
from typing import Any

MAX_JSON_DEPTH = 200  # lists and objects in each other


def parse_json(text: str) -> Any:
    """Return the value. Raises ValueError if the text is not JSON or is nested more than DEEPEST levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _depth_error() from None
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deeper(value):
        raise _depth_error()
    return value


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [x for container in level for x in _children(container) if isinstance(x, list | dict)]
    return bool(level)


def _children(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()


def _depth_error() -> ValueError:
    return ValueError(f"its lists and objects stand more than {MAX_JSON_DEPTH} deep in each other: flatten it")
