"""Passthrough columns: their types, fixed before the job starts.

Types are joined upwards: null below everything, integers below floats, JSON text above incompatible or nested types,
and CSV_TEXT above JSON.

    >>> join(pa.int64(), pa.float64())
    DataType(double)
    >>> join(pa.int64(), pa.string()) == JSON
    True
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from eagle_ray.errors import RequestError

JSON = pa.json_()  # values of this column are written as JSON text
CSV_TEXT = pa.large_string()  # texts of a CSV file: a text stays what it is, what other files hold becomes JSON text
NANOSECONDS = pa.time64("ns")  # carried as text: Python's times end at microseconds


def type_of(value: Any) -> pa.DataType:
    """Return the type of a value parsed from JSON; an unreadable value has none."""
    if value is None or isinstance(value, RequestError):
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else JSON
    return pa.float64() if isinstance(value, float) else pa.string() if isinstance(value, str) else JSON


def type_in_parquet(declared: pa.DataType) -> pa.DataType:
    """Return the passthrough type of a Parquet column: plain types stay, nested ones become JSON."""
    if isinstance(declared, pa.BaseExtensionType):
        return type_in_parquet(declared.storage_type)
    if pa.types.is_dictionary(declared):
        return type_in_parquet(declared.value_type)
    if pa.types.is_large_string(declared) or pa.types.is_string_view(declared) or declared == NANOSECONDS:
        return pa.string()
    return JSON if pa.types.is_nested(declared) else declared


def join(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the narrowest type that holds both."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if CSV_TEXT in (a, b):
        return CSV_TEXT
    if _is_number(a) and _is_number(b) and not _overflow(a, b):
        both = [pa.schema([("x", a)]), pa.schema([("x", b)])]
        return pa.unify_schemas(both, promote_options="permissive").field("x").type
    return JSON


def join_into(types: dict[str, pa.DataType], more: Mapping[str, pa.DataType]) -> None:
    """Add columns, and widen the types of those already there."""
    for name, type_ in more.items():
        types[name] = join(types.get(name, type_), type_)


def field_of(name: str, type_: pa.DataType) -> pa.Field:
    """Return the output column of a joined type: JSON, CSV_TEXT and null are stored as strings."""
    return pa.field(name, pa.string() if type_ in (JSON, CSV_TEXT) or pa.types.is_null(type_) else type_)


def column_of(values: Iterable[Any], type_: pa.DataType) -> pa.Array:
    """Return the values of one passthrough column in the type of its field_of; CSV numbers are texts before."""
    as_type = _converter(type_)
    absent = (type(None), RequestError)
    return pa.array([None if isinstance(v, absent) else as_type(v) for v in values], field_of("", type_).type)


def _converter(type_: pa.DataType) -> Callable[[Any], Any]:
    if type_ == JSON:
        return _as_json
    if type_ == CSV_TEXT:
        return lambda value: value if isinstance(value, str) else _as_json(value)
    if pa.types.is_floating(type_):
        return float  # Arrow refuses integers from 2**53
    if pa.types.is_integer(type_):
        return int
    return _as_boolean if pa.types.is_boolean(type_) else lambda value: value


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _as_boolean(value: bool | str) -> bool:
    return value.lower() == "true" if isinstance(value, str) else value


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def _overflow(a: pa.DataType, b: pa.DataType) -> bool:
    """Return whether the types are unsigned 64-bit and signed integers, which have no common integer type."""
    return pa.uint64() in (a, b) and (pa.types.is_signed_integer(a) or pa.types.is_signed_integer(b))
