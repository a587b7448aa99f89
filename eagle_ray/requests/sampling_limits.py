"""Bounds of bad words, grammars and JSON schemas, beyond which their preparation would take too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_BAD_WORDS_CHARS = 1 << 16  # of all words together, each of which is tokenized twice

# Characters of what an output must be. Real ones are far smaller; at these bounds a compilation takes seconds.
MAX_GRAMMAR_CHARS = {
    "json_schema": 1 << 17,
    "regex": 1 << 16,
    "choice": 1 << 18,  # all texts together, as JSON
    "grammar": 1 << 16,
    "tools": 1 << 17,  # the grammar of their calls, with the tools' schemas
}
MAX_GBNF_RULES = 1000  # their conversion to Lark's syntax takes time with the square of their number

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


def check_schema(schema: Any) -> None:
    """Raise ValueError for a minProperties that a grammar cannot hold.

    A grammar counts the keys that are written, and a key that the schema does not name can be written twice. Required
    keys are written once, and one more key differs from all of them.
    """
    if not isinstance(schema, dict):
        return
    minimum, required = schema.get("minProperties"), schema.get("required")
    num_required = len({str(name) for name in required}) if isinstance(required, list) else 0
    types = schema.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    is_fixed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
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
