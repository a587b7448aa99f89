"""Messages as chat templates read them.

A template gets each content as one text, and the arguments of a tool call as an object, as transformers documents it;
OpenAI's format has text parts, and arguments as JSON. A call without arguments has an empty object.

    >>> template_message({"role": "user", "content": [{"type": "text", "text": "Hi"}]})
    {'role': 'user', 'content': 'Hi'}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eagle_ray.text.strict_json import HalfSurrogate, parse_json

NO_ARGUMENTS = ("", "null")  # texts that clients send for a call without arguments
MAX_ARGUMENTS_CHARS = 1 << 20  # of a tool call; json holds Python's lock while it reads them


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message with its content as one text and the arguments of its tool calls as objects."""
    content, calls = message.get("content"), message.get("tool_calls")
    written = dict(message)
    if isinstance(content, list):
        written["content"] = "".join(part["text"] for part in content)
    if isinstance(calls, list):
        written["tool_calls"] = [_template_call(call) for call in calls]
    return written


def template_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object; a text that is not the JSON of one unchanged.

    Raises HalfSurrogate for a text that holds half a surrogate pair.
    """
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in NO_ARGUMENTS):
        return {}
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENTS_CHARS:
        return arguments
    try:
        value = parse_json(arguments)
    except HalfSurrogate:
        raise
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def unread_arguments(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the place of the first arguments, in messages as a template reads them, that are not an object."""
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and not isinstance(function.get("arguments"), dict):
                return f"messages[{i}].tool_calls[{j}].function.arguments"
    return None


def _template_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they are one or the JSON of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": template_arguments(function.get("arguments"))}}
