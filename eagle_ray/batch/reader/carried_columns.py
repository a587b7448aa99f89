"""Carried columns: their names in the output, their types, and the conversion of their values.

The types of carried columns are fixed before the job starts. A Parquet column keeps its Arrow type,
and its values are not converted to Python. If files differ, the wider type is used: anything is
wider than null, floats than integers, decimals with more digits than those with fewer, JSON text
than incompatible types, and CSV_TEXT than JSON. Lists and objects of JSONL files have no Arrow type
and are JSON text. In JSON text, bytes are base64, and dates, times and decimals are texts.

    >>> joined_type(pa.int64(), pa.float64())
    DataType(double)
    >>> joined_type(pa.int64(), pa.string()) == JSON
    True
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import pyarrow as pa

from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.row_schema import JSON

RENAME_PREFIX = "input_"  # prefix of a carried column with a name that the output has already
# Texts of a CSV file. Values of other files become texts, as dates do, or else JSON text.
CSV_TEXT = pa.large_string()


@dataclass(frozen=True, slots=True)
class CarriedColumn:
    """A column that goes unchanged from the input to the output.

    Attributes:
        source: its name in the input.
        name: its name in the output.
        type: type of its values, joined over all files; `field_of` gives the output column's type.
    """

    source: str
    name: str
    type: pa.DataType

    @property
    def field(self) -> pa.Field:
        return field_of(self.name, self.type)


def output_names(sources: Iterable[str], reserved: Iterable[str]) -> dict[str, str]:
    """Return the output name of each carried column.

    A name that the job uses itself gets the prefix ``input_``. If the input has a column of that
    name too, a number follows: ``input_text_2``. SQL does not tell names apart that differ by case
    alone, so neither do these: of several such columns the later ones get the prefix.

        >>> output_names(["text", "input_text", "score"], {"text"})
        {'text': 'input_text_2', 'input_text': 'input_text', 'score': 'score'}
        >>> output_names(["Text", "score", "Score"], {"text"})
        {'Text': 'input_Text', 'score': 'score', 'Score': 'input_Score'}
    """
    sources = list(sources)
    taken = {name.casefold() for name in reserved}
    names: dict[str, str] = {}
    for source in sources:
        if source.casefold() not in taken:
            names[source] = source
            taken.add(source.casefold())
    for source in sources:
        if source not in names:
            names[source] = _unused_name(RENAME_PREFIX + source, taken)
            taken.add(names[source].casefold())
    return {source: names[source] for source in sources}


def _unused_name(name: str, taken: Container[str]) -> str:
    candidates = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate.casefold() not in taken)


def type_of(value: Any) -> pa.DataType:
    """Return the carried type of a value parsed from JSON; an unreadable value counts as null."""
    if value is None or isinstance(value, RequestError):
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else JSON
    if isinstance(value, float):
        return pa.float64()
    return pa.string() if isinstance(value, str) else JSON


def type_in_parquet(declared: pa.DataType) -> pa.DataType:
    """Return the carried type of a Parquet column: its own type, with extension types and text widths made plain."""
    if isinstance(declared, pa.BaseExtensionType):
        return type_in_parquet(declared.storage_type)
    if pa.types.is_large_string(declared) or pa.types.is_string_view(declared):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(declared) else declared


def decoded_type(type_: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding, which is applied again when the file is written."""
    if isinstance(type_, pa.BaseExtensionType):
        return decoded_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return decoded_type(type_.value_type)
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    return _decoded_nested(type_) if pa.types.is_nested(type_) else type_


def _decoded_nested(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([_decoded_field(field) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(
            decoded_type(type_.key_type), _decoded_field(type_.item_field), type_.keys_sorted
        )
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_decoded_field(type_.value_field), type_.list_size)
    if pa.types.is_large_list(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(_decoded_field(type_.value_field))
    if pa.types.is_list(type_) or pa.types.is_list_view(type_):
        return pa.list_(_decoded_field(type_.value_field))
    return type_


def _decoded_field(field: pa.Field) -> pa.Field:
    return field.with_type(decoded_type(field.type))


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def _is_binary(type_: pa.DataType) -> bool:
    return (
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
    )


# kinds of types that are joined; Arrow would join others, too, such as texts with bytes and numbers with
# decimals
JOINED_KINDS = (_is_number, _is_binary, pa.types.is_nested, pa.types.is_decimal)


def joined_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the narrowest type that holds both."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    for above in (CSV_TEXT, JSON):
        if above in (a, b):
            return above
    if pa.types.is_dictionary(a) or pa.types.is_dictionary(b):
        return joined_type(decoded_type(a), decoded_type(b))
    if not any(is_kind(a) and is_kind(b) for is_kind in JOINED_KINDS) or _overflow(a, b):
        return JSON
    both = [pa.schema([("x", a)]), pa.schema([("x", b)])]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return JSON


def join_into(types: dict[str, pa.DataType], more: Mapping[str, pa.DataType]) -> None:
    """Update `types` with further columns: new ones are added, known ones get the joined type."""
    for name, type_ in more.items():
        types[name] = joined_type(types.get(name, type_), type_)


def field_of(name: str, type_: pa.DataType) -> pa.Field:
    """Return the output column of a joined type: JSON, CSV_TEXT and null are stored as strings."""
    return pa.field(
        name, pa.string() if type_ in (JSON, CSV_TEXT) or pa.types.is_null(type_) else type_
    )


def column_of(values: Iterable[Any], type_: pa.DataType) -> pa.Array:
    """Convert Python values to a column of a carried type, without dictionary encoding; CSV values are still texts."""
    as_type = _converter(type_)
    absent = (type(None), RequestError)
    decoded = decoded_type(field_of("", type_).type)
    return pa.array([None if isinstance(v, absent) else as_type(v) for v in values], decoded)


def carry(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert a Parquet column to a carried type, without dictionary encoding."""
    if type_ not in (JSON, CSV_TEXT):
        try:
            return column.cast(decoded_type(field_of("", type_).type))
        except pa.ArrowException:
            # For example integers from 2**53 to floats, or a struct that lacks a field.
            pass
    return column_of(_python_values(column), type_)


def _python_values(column: pa.Array) -> list[Any]:
    """Return a column's values. Nested values that Python cannot hold become texts or numbers."""
    try:
        return column.to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowException, OverflowError, ValueError, KeyError):
        pass

    # A nested column has such values in some of its parts.
    if pa.types.is_struct(column.type):
        parts = [_python_values(part) for part in column.flatten()]
        is_valid = column.is_valid().to_pylist()
        objects: list[Any] = []
        for valid, *values in zip(is_valid, *parts, strict=True):
            objects.append(dict(zip(column.type.names, values, strict=True)) if valid else None)
        return objects
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lists: list[Any] = []
        for i in range(len(column)):
            one = column.slice(i, 1)
            lists.append(_python_values(one.flatten()) if one.null_count == 0 else None)
        return lists

    for type_ in (pa.string(), pa.int64()):
        try:
            return column.cast(type_).to_pylist()
        except pa.ArrowException:
            pass
    return column.to_pylist()  # raises: for instance of text that is not UTF-8


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, as texts if Python cannot hold them, such as times in nanoseconds."""
    try:
        return _python_values(column.combine_chunks())
    except (pa.ArrowException, OverflowError, ValueError, KeyError):
        return [
            f"a value of type {column.type}" if valid else None
            for valid in column.is_valid().to_pylist()
        ]


def _converter(type_: pa.DataType) -> Callable[[Any], Any]:
    if type_ == JSON:
        return _as_json
    if type_ == CSV_TEXT:
        return _as_text
    if pa.types.is_floating(type_):
        return float  # Arrow refuses integers from 2**53
    if pa.types.is_integer(type_):
        return int
    return _as_boolean if pa.types.is_boolean(type_) else lambda value: value


def _as_json(value: Any) -> str:
    try:
        return dump_json(value, ensure_ascii=False, default=_json_form)
    except TypeError:  # a map's keys that are no texts
        return dump_json(_with_text_keys(value), ensure_ascii=False, default=_json_form)


def _as_text(value: Any) -> str:
    return (
        _as_json(value)
        if isinstance(value, bool | int | float | list | dict)
        else _json_form(value)
    )


def _json_form(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else _json_form(key): _with_text_keys(x)
            for key, x in value.items()
        }
    return [_with_text_keys(x) for x in value] if isinstance(value, list) else value


def _as_boolean(value: bool | str) -> bool:
    return value.lower() == "true" if isinstance(value, str) else value


def _overflow(a: pa.DataType, b: pa.DataType) -> bool:
    """Return whether the types are unsigned 64-bit and signed integers, which have no common integer type."""
    return pa.uint64() in (a, b) and (
        pa.types.is_signed_integer(a) or pa.types.is_signed_integer(b)
    )
