"""Messages as chat templates read them.

A template gets each content as one text, and the arguments of a tool call as an object, as transformers documents it;
OpenAI's format has text parts, and arguments as JSON.

    >>> template_message({"role": "user", "content": [{"type": "text", "text": "Hi"}]})
    {'role': 'user', 'content': 'Hi'}
"""

from __future__ import annotations

import json
from typing import Any


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message with its content as one text and the arguments of its tool calls as objects."""
    content, calls = message.get("content"), message.get("tool_calls")
    written = dict(message)
    if isinstance(content, list):
        written["content"] = "".join(part["text"] for part in content)
    if isinstance(calls, list):
        written["tool_calls"] = [_template_call(call) for call in calls]
    return written


def _template_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they are the JSON of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
