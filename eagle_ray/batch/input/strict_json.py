"""JSON text as Python values, or why it is none: the same answer in every process.

Python's own limit on lists in lists counts the calls above it too: the driver would read a row that a worker, which
stands deeper, refuses, and the row's id with it. So there is a limit that all of them are far from.

    >>> value_of('{"prompt": "Hi"}')
    {'prompt': 'Hi'}
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 200  # lists and objects in each other


def value_of(text: str) -> Any:
    """Raises ValueError where the text is no JSON, or where its lists and objects stand more than DEEPEST deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deeper(value):
        raise _too_deep()
    return value


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [x for container in level for x in _held(container) if isinstance(x, list | dict)]
    return bool(level)


def _held(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"its lists and objects stand more than {DEEPEST} deep in each other: flatten it")
