"""JSON schemas written by hand in the manner of JSONSchemaBench: HAND_WRITTEN, with nested and recursive ones.

Strings, arrays and recursion are mostly bounded, so that a small model can complete them. Only
keywords that llguidance compiles are used.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
WORDS = ["fox", "red", "moon", "tea", "lake", "stone", "green", "north"]
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


ADDRESS = closed(
    {"street": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": {"enum": WORDS}}
)
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
        "number": closed(
            {
                "kind": {"const": "number"},
                "value": {"type": "integer", "minimum": -99, "maximum": 99},
            }
        ),
        "sum": closed(
            {
                "kind": {"const": "sum"},
                "left": {"$ref": "#/$defs/any"},
                "right": {"$ref": "#/$defs/any"},
            }
        ),
        "any": {"anyOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/sum"}]},
    },
    "$ref": "#/$defs/any",
}
HAND_WRITTEN: list[Schema] = [
    closed({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    closed(
        {"name": SHORT, "home": ADDRESS, "work": {"anyOf": [ADDRESS, {"type": "null"}]}},
        "name",
        "home",
    ),
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
                "items": closed(
                    {
                        "item": {"enum": WORDS},
                        "count": {"type": "integer", "minimum": 1, "maximum": 20},
                    }
                ),
            },
            "paid": {"type": "boolean"},
        }
    ),
    closed(
        {
            "title": SHORT,
            "start": {"type": "string", "format": "date-time"},
            "days": {"enum": [1, 2, 3, 7]},
        }
    ),
    closed(
        {
            "id": {"type": "string", "format": "uuid"},
            "address": {"type": "string", "format": "ipv4"},
        }
    ),
    {
        "oneOf": [
            closed(
                {
                    "shape": {"const": "circle"},
                    "radius": {"type": "integer", "minimum": 1, "maximum": 100},
                }
            ),
            closed(
                {
                    "shape": {"const": "box"},
                    "sides": {
                        "type": "array",
                        "items": {"enum": [1, 2, 3]},
                        "minItems": 2,
                        "maxItems": 2,
                    },
                }
            ),
        ]
    },
    {
        "type": "array",
        "prefixItems": [{"enum": ["lat", "lon"]}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "minItems": 2,
        "maxItems": 2,
    },
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "required": ["total"],
    },
    {
        "type": "object",
        "properties": {"mood": {"enum": ["glad", "sad", None, 3, True]}},
        "required": ["mood"],
        "additionalProperties": {"type": "null"},
    },
    {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 5}},
                "required": ["a"],
            },
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
            "arguments": closed(
                {"query": SHORT, "limit": {"type": "integer", "minimum": 1, "maximum": 50}}, "query"
            ),
        }
    ),
    closed(
        {"a": {"$ref": "#/$defs/a~1b"}, "b": {"$ref": "#/$defs/c%20d"}},
        **{"$defs": {"a/b": {"enum": [1]}, "c d": {"enum": ["x"]}}},
    ),
    closed({f"key_{i}": {"enum": [i, None]} for i in range(8)}, "key_0", "key_7"),
    closed(
        {
            "deep": closed(
                {
                    "deep": closed(
                        {"deep": closed({"deep": {"type": "array", "maxItems": 1, "items": SHORT}})}
                    )
                }
            )
        }
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
