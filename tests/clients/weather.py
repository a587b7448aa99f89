"""The conversation, the tool and the form of answer that clients of tools and structured output are tried with.

Every text and number of the form has an end, so a small target completes it within MAX_TOKENS.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 160
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome", "New York"]
    days: int = Field(ge=1, le=14)
    is_celsius: bool


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "New York"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "is_celsius": {"type": "boolean"},
            },
            "required": ["city", "days", "is_celsius"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "strict": True, "schema": TOOL["function"]["parameters"]},
}


def check_arguments(name: str, arguments: str | dict[str, Any]) -> None:
    """Assert that a call is one of a tool here."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "get_time":
        assert values["zone"] in ("CET", "UTC") and len(values) == 1, values
        return
    assert name == "get_weather", name
    Weather.model_validate(values, strict=True)
