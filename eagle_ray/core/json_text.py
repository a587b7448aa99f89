"""dump_json: write JSON. All JSON of this package is written here.

JSON has no NaN and no infinities, and its readers, such as DuckDB and jq, refuse them. They are
written as null.

    >>> dump_json({"score": float("nan"), "ids": [1, float("-inf")]})
    '{"score": null, "ids": [1, null]}'
"""

from __future__ import annotations

import json
import math
from typing import Any

BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the beginning of a file


def dump_json(value: Any, **options: Any) -> str:
    """Return the JSON text of a value. `options` are those of json.dumps, whose errors this raises."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # a number that JSON lacks, which is rare: only then the value is copied
        return json.dumps(_with_nulls(value), allow_nan=False, **options)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return value if _is_json(value) else None


def _key(key: Any) -> Any:
    return key if _is_json(key) else str(key)


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
