"""JSON schemas in the manner of JSONSchemaBench: those written by hand, and more by a seeded generator.

    schemas = some_schemas(300)         # those of HAND_WRITTEN first
    check_schema(text, schema)

They share the vocabulary of the schemas in `tests/support/json_schemas.py`.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

from tests.support.json_schemas import HAND_WRITTEN, WORDS, Schema, closed

KEYS = [
    "name",
    "age",
    "kind",
    "size",
    "tags",
    "price",
    "next",
    "ok",
    "unit",
    "city",
    "note",
    "x-ray",
    "größe",
    'a"b',
]
PATTERNS = [
    "^[a-z]{2,5}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(red|green)( fox)?$",
    "^v[0-9]+\\.[0-9]{1,2}$",
    "^#[0-9a-f]{6}$",
]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email"]


def some_schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return the hand-written schemas and drawn ones after them."""
    rng = random.Random(seed)
    drawn = (random_schema(rng) for _ in range(max(0, count - len(HAND_WRITTEN))))
    return [*HAND_WRITTEN[:count], *drawn]


def random_schema(rng: random.Random) -> Schema:
    """Return an object, an array or a union, at most four levels deep; every third one has recursive definitions."""
    if rng.random() < 1 / 3:
        node = _object(rng, 2)
        name = rng.choice(["next", "parent", "left"])
        again = {"$ref": "#/$defs/node"}
        node["properties"][name] = rng.choice(
            [
                {"anyOf": [{"type": "null"}, again]},
                {"type": "array", "items": again, "maxItems": rng.randint(1, 2)},
                again,
            ]
        )
        node["required"] = [key for key in node["required"] if key != name]
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    make = rng.choice([_object, _object, _object, _array, _union])
    return make(rng, 3)


def _any(rng: random.Random, depth: int) -> Schema:
    if depth and rng.random() < 0.4:
        return rng.choice([_object, _array, _union])(rng, depth - 1)
    return _leaf(rng)


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    high = low + rng.randint(0, 100)
    longest = rng.randint(1, 16)
    return rng.choice(
        [
            {"type": "string", "maxLength": longest, "minLength": rng.randint(0, longest)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randint(1, 6))},
            {"const": rng.choice([*WORDS, 17, [1, "two"], {"three": 3}])},
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
            {"type": "integer", "minimum": 0, "maximum": 200, "multipleOf": rng.choice([2, 5, 10])},
            {"type": "number", "minimum": low, "maximum": high},
            {"type": "boolean"},
            {"type": ["null", rng.choice(["integer", "boolean"])]},
        ]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {key: _any(rng, depth) for key in keys},
        "required": rng.sample(keys, rng.randint(0, len(keys))),
    }
    schema["additionalProperties"] = False if rng.random() < 0.8 else _leaf(rng)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0 if least else 1, 2),
    }
    if rng.random() < 0.2:
        schema["prefixItems"] = [_leaf(rng)]
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    """Return anyOf over different kinds, or oneOf over objects that a constant tells apart."""
    if rng.random() < 0.5:
        return {"anyOf": [_leaf(rng), _any(rng, depth), {"type": "null"}][rng.randint(0, 1) :]}
    kinds = rng.sample(WORDS, 2)
    return {
        "oneOf": [closed({"kind": {"const": kind}, "value": _any(rng, depth)}) for kind in kinds]
    }


def check_schema(text: str, schema: Schema) -> None:
    """Raise jsonschema's ValidationError or json's if the text is not a value of the schema, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


class LimitedMatcher:
    """Passes all calls on to the real matcher until it has failed. Subclasses set `failed`."""

    def __init__(self, real: Any, failed: bool = False):
        self.real, self.failed = real, failed

    def deep_copy(self) -> LimitedMatcher:
        return type(self)(self.real.deep_copy(), self.failed)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "too many items"

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0 if self.failed else self.real.try_consume_tokens(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["fox", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}
