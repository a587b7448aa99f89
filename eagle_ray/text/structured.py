"""Normalise parameters of structured output: JSON schemas, choices and OpenAI's response_format.

    >>> schema_text({"type": "object"})
    '{"type": "object"}'
    >>> response_format_text({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}})
    '{"type": "json_schema", "json_schema": {"schema": {}}}'
    >>> response_format_text({"type": "json_object", "schema": {"type": "object"}})
    '{"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}'

    >>> with_own_keys({"structured_outputs": {"json": {"type": "object"}}})
    {'json_schema': {'type': 'object'}}

Schemas are kept as JSON text: the order of their keys is the order in which an object's properties
are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_ray.core.json_text import dump_json
from eagle_ray.text.strict_json import JsonError, check_texts, parse_json

# Characters of a JSON text; what can be compiled has fewer, white space aside (MAX_GRAMMAR_CHARS).
MAX_TEXT_CHARS = 1 << 20
KEY_BY_VLLM_NAME = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
RESPONSE_FORMAT_FORM = (
    "{type: text}, {type: json_object}, {type: json_object, schema: ...} or "
    "{type: json_schema, json_schema: {schema: ...}}"
)
# Types that have a schema, with the keys of the object that it stands in.
KEYS_OF_FORMAT = {
    "json_object": ("schema",),
    "json_schema": ("schema", "name", "description", "strict", "type"),
}

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_SCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_SCHEMA_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_SCHEMA_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def schema_text(value: Any) -> Any:
    """Return a JSON schema as text: from an object, from JSON text, or from a pydantic model.

    Raises ValueError if it is none of them; other errors of a schema are found when it is compiled.
    """
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    value = _parsed(value)
    if not isinstance(value, dict | bool):
        raise ValueError("not a JSON schema")
    return _text_of(value)


def check_schema(schema: Any) -> None:
    """Raise ValueError for a minProperties that a grammar cannot hold.

    A grammar counts the keys that are written, and a key that the schema does not name can be
    written twice. Required keys are written once, and one more key differs from all of them.
    """
    if not isinstance(schema, dict):
        return
    minimum = schema.get("minProperties")
    required = schema.get("required")
    num_required = len({str(name) for name in required}) if isinstance(required, list) else 0
    types = schema.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    is_fixed = schema.get("additionalProperties", True) is False and not schema.get(
        "patternProperties"
    )
    if is_object and not is_fixed and isinstance(minimum, int) and minimum > num_required + 1:
        raise ValueError(
            f"minProperties: {minimum} is not supported where keys are free: one key could be written twice. Name keys "
            "in required, or set additionalProperties to false without patternProperties"
        )
    for inner in _inner_schemas(schema):
        check_schema(inner)


def _inner_schemas(schema: dict[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _SCHEMAS if name in schema)
    for name in _SCHEMA_LISTS:
        yield from schema[name] if isinstance(schema.get(name), list) else ()
    for name in _SCHEMA_OBJECTS:
        yield from schema[name].values() if isinstance(schema.get(name), dict) else ()


def response_format_text(value: Any) -> Any:
    """Return OpenAI's response_format as JSON text: its type, and its schema if it has one.

    The schema stands in json_schema, or next to the type: /v1/responses, llama.cpp and instructor
    write it there, the last two also with the type json_object. Raises ValueError if the format is
    of another form or has another key.
    """
    given = _object(_parsed(value))
    kind = given.pop("type", None)
    inner = _object(given.pop("json_schema", None))
    if inner and (given or kind != "json_schema"):
        raise ValueError("not a response_format")
    given = inner or given
    has_no_schema = not given or (kind == "json_object" and given == {"schema": {}})
    if kind in ("text", "json_object") and has_no_schema:
        return dump_json({"type": kind})

    keys = KEYS_OF_FORMAT.get(kind, ()) if isinstance(kind, str) else ()
    schema = given.get("schema")
    is_schema = isinstance(schema, dict) or (kind == "json_schema" and isinstance(schema, bool))
    if not is_schema or not given.keys() <= {*keys}:
        raise ValueError("not a response_format")
    return _text_of({"type": "json_schema", "json_schema": {"schema": schema}})


def with_own_keys(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's body with vLLM's structured_outputs replaced by the keys of this system.

    The body is returned unchanged if that is missing, or has an option that this system does not
    support, such as disable_any_whitespace, or names a key that the body has, too; then its reader
    refuses it by name.
    """
    given = body.get("structured_outputs")
    if not isinstance(given, dict):
        return body
    requested = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    if not requested.keys() <= KEY_BY_VLLM_NAME.keys():
        return body
    own = {KEY_BY_VLLM_NAME[name]: value for name, value in requested.items()}
    if any(body.get(name) is not None for name in own):
        return body
    return {name: value for name, value in body.items() if name != "structured_outputs"} | own


def _object(value: Any) -> dict[str, Any]:
    """Return an object without its nulls, which Parquet has for absent keys; null is empty. Raises ValueError."""
    if not isinstance(value, dict | None):
        raise ValueError("not an object")
    return {name: inner for name, inner in (value or {}).items() if inner is not None}


def _text_of(value: Any) -> str:
    """Return JSON text, written in parts: json.dumps of megabytes holds Python's lock.

    Raises JsonError for a text that is too long, and ValueError for what JSON lacks, such as dates
    of Parquet files.
    """
    parts: list[str] = []
    num_chars = 0
    try:
        for part in _ENCODER.iterencode(value):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_TEXT_CHARS:
                raise _too_long()
    except TypeError as error:
        raise ValueError(str(error)) from None
    return "".join(parts)


def _too_long() -> JsonError:
    return JsonError(f"it has more than {MAX_TEXT_CHARS} characters")


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text; other values are returned unchanged. Raises ValueError for invalid JSON."""
    if not isinstance(value, str):
        check_texts(value)
        return value
    if len(value) > MAX_TEXT_CHARS:
        raise _too_long()
    return parse_json(value)
