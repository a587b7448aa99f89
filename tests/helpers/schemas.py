"""JSON schemas in the manner of JSONSchemaBench: written by hand, and drawn by a seeded generator.

    schemas = some_schemas(300)         # those of HAND_WRITTEN first
    check_format_and_schema(text, schema)

Strings, arrays and recursion are mostly bounded, so that a small model can complete them; `loosen` of them are not.
Only keywords that llguidance compiles are used.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

Schema = dict[str, Any]
WORDS = ["fox", "red", "moon", "tea", "lake", "stone", "green", "north"]
KEYS = ["name", "age", "kind", "size", "tags", "price", "next", "ok", "unit", "city", "note", "x-ray", "größe", 'a"b']
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z]{2}-[0-9]{3}$", "^(red|green)( fox)?$", "^v[0-9]+\\.[0-9]{1,2}$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email"]
SHORT = {"type": "string", "maxLength": 12}


def closed(properties: Schema, *required: str, **rest: Any) -> Schema:
    """An object without other keys; without `required` all of them are."""
    needed = list(required) or list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
        **rest,
    }


ADDRESS = closed({"street": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": {"enum": WORDS}})
LINKED_LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            }
        )
    },
}
TREE = closed(
    {"name": SHORT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "name",
)
EXPRESSION = {
    "$defs": {
        "number": closed({"kind": {"const": "number"}, "value": {"type": "integer", "minimum": -99, "maximum": 99}}),
        "sum": closed({"kind": {"const": "sum"}, "left": {"$ref": "#/$defs/any"}, "right": {"$ref": "#/$defs/any"}}),
        "any": {"anyOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/sum"}]},
    },
    "$ref": "#/$defs/any",
}
HAND_WRITTEN: list[Schema] = [
    closed({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    closed({"name": SHORT, "home": ADDRESS, "work": {"anyOf": [ADDRESS, {"type": "null"}]}}, "name", "home"),
    LINKED_LIST,
    TREE,
    EXPRESSION,
    closed(
        {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": closed({"item": {"enum": WORDS}, "count": {"type": "integer", "minimum": 1, "maximum": 20}}),
            },
            "paid": {"type": "boolean"},
        }
    ),
    closed({"title": SHORT, "start": {"type": "string", "format": "date-time"}, "days": {"enum": [1, 2, 3, 7]}}),
    closed({"id": {"type": "string", "format": "uuid"}, "address": {"type": "string", "format": "ipv4"}}),
    {
        "oneOf": [
            closed({"shape": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1, "maximum": 100}}),
            closed(
                {
                    "shape": {"const": "box"},
                    "sides": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2},
                }
            ),
        ]
    },
    {"type": "array", "prefixItems": [{"enum": ["lat", "lon"]}, {"type": "integer"}], "items": False, "minItems": 2},
    {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "minItems": 2,
        "maxItems": 2,
    },
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "required": ["total"]},
    {
        "type": "object",
        "properties": {"mood": {"enum": ["glad", "sad", None, 3, True]}},
        "required": ["mood"],
        "additionalProperties": {"type": "null"},
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}},
        ],
        "additionalProperties": False,
        "properties": {"a": True},
    },
    {
        "type": "object",
        "patternProperties": {"^s_[a-z]{1,3}$": SHORT},
        "additionalProperties": False,
        "required": ["s_a"],
    },
    {"type": ["integer", "null", "boolean"]},
    {"enum": ["a", "an apple", {"b": [1, 2]}, [None]]},
    {"const": {"fixed": [1, 2.5, "three", None, {"four": False}]}},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    closed(
        {
            "": {"type": "null"},
            "größe": {"enum": ["klein", "groß"]},
            'say "hi"': {"type": "boolean"},
            "back\\slash": {"const": "\n"},
        }
    ),
    closed(
        {
            "function": {"const": "search"},
            "arguments": closed({"query": SHORT, "limit": {"type": "integer", "minimum": 1, "maximum": 50}}, "query"),
        }
    ),
    closed(
        {"a": {"$ref": "#/$defs/a~1b"}, "b": {"$ref": "#/$defs/c%20d"}},
        **{"$defs": {"a/b": {"enum": [1]}, "c d": {"enum": ["x"]}}},
    ),
    closed({f"key_{i}": {"enum": [i, None]} for i in range(8)}, "key_0", "key_7"),
    closed(
        {"deep": closed({"deep": closed({"deep": closed({"deep": {"type": "array", "maxItems": 1, "items": SHORT}})})})}
    ),
    {
        "$defs": {
            "json": {
                "anyOf": [
                    {"type": "null"},
                    {"type": "boolean"},
                    {"type": "array", "items": {"$ref": "#/$defs/json"}, "maxItems": 2},
                ]
            }
        },
        "$ref": "#/$defs/json",
    },
    {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },  # free strings and further keys
    {"type": "array", "items": {"type": "number"}, "minItems": 1},
]


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
    return {"oneOf": [closed({"kind": {"const": kind}, "value": _any(rng, depth)}) for kind in kinds]}


def check_schema(text: str, schema: Schema) -> None:
    """Raise jsonschema's ValidationError or json's if the text is not a value of the schema, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
