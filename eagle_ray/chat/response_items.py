"""Input items of a response as messages of a chat.

>>> messages_of([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], instructions="Be short.")
[{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': 'Hi'}]

Items are those that a client writes, and those of an earlier response's output that it sends back. A reasoning item and
function calls belong to the assistant's message that is next to them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from eagle_ray.chat.template_messages import template_arguments
from eagle_ray.errors import RequestError
from eagle_ray.strict_json import HalfSurrogate

Json = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant")
LABELS = ("type", "id", "status", "phase")  # of an item of an earlier output: they say nothing of its text
PART_KEYS = ("type", "text", "annotations", "logprobs")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(items: str | list[Json], instructions: str | None) -> list[Json]:
    """Return the messages that the items and the instructions are. Raises RequestError that names the wrong item."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for i, item in enumerate(items):
        _add_item(messages, item, f"input[{i}]")
    if not any(message["role"] != "system" for message in messages):
        raise RequestError("bad_value", "input: must be a text or at least one item, got []")
    return messages


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _ADDERS:
        fix = f"this server reads items of type {', '.join(_ADDERS)}; leave {reprlib.repr(kind)} out"
        raise unsupported(f"{where}.type", fix)
    add, names = _ADDERS[kind]
    refuse_other_keys(item, (*LABELS, *names), where)
    add(messages, item, where)


def refuse_other_keys(values: Json, names: tuple[str, ...], where: str) -> None:
    """Raise RequestError for a key that is not one of the names, unless it is null or off."""
    for name, value in values.items():
        if name not in names and value is not None and value is not False:
            raise unsupported(f"{where}.{name}", "leave it out")


def _add_message(messages: list[Json], item: Json, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"must be {', '.join(ROLES)}", role)
    content = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant_turn(messages, begins="content" in _last_turn(messages))["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_reasoning(messages: list[Json], item: Json, where: str) -> None:
    """Add the text of an earlier answer's reasoning: templates that keep it read reasoning_content."""
    text = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
    if text:
        _assistant_turn(messages, begins=bool(_last_turn(messages)))["reasoning_content"] = text


def _add_call(messages: list[Json], item: Json, where: str) -> None:
    values = {}
    for name in ("call_id", "name", "arguments"):
        is_absent = name == "arguments" and item.get(name) is None
        values[name] = "" if is_absent else item.get(name)
        if not isinstance(values[name], str):
            raise _wrong(f"{where}.{name}", "must be a text", values[name])
    try:
        template_arguments(values["arguments"])
    except HalfSurrogate as error:
        raise RequestError("bad_value", f"{where}.arguments: {error}") from None
    function = {"name": values["name"], "arguments": values["arguments"]}
    call = {"id": values["call_id"], "type": "function", "function": function}
    _assistant_turn(messages).setdefault("tool_calls", []).append(call)


def _add_call_output(messages: list[Json], item: Json, where: str) -> None:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise _wrong(f"{where}.call_id", "must be the call_id of a function_call", call_id)
    content = _text(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


_ADDERS: dict[str, tuple[Callable[[list[Json], Json, str], None], tuple[str, ...]]] = {
    "message": (_add_message, ("role", "content")),
    "reasoning": (_add_reasoning, ("content", "summary")),
    "function_call": (_add_call, ("call_id", "name", "arguments")),
    "function_call_output": (_add_call_output, ("call_id", "output")),
}  # of a type: what adds such an item, and the keys that it reads


def _last_turn(messages: list[Json]) -> Json:
    """Return the last message if it is the assistant's, else an empty one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else {}


def _assistant_turn(messages: list[Json], begins: bool = False) -> Json:
    """Return the assistant's message that an item belongs to. begins: the item is the first of a new one."""
    if begins or not _last_turn(messages):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a text, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a text or a list of text parts", content)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise unsupported(f"{where}[{i}]", f"this server reads text alone; got {reprlib.repr(kind)}")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{i}].text", "must be a text", part.get("text"))
        refuse_other_keys(part, PART_KEYS, f"{where}[{i}]")
    return "".join(part["text"] for part in content)


def unsupported(param: str, fix: str) -> RequestError:
    return RequestError("unsupported_parameter", f"{param} is not supported: {fix}")


def _wrong(param: str, rule: str, value: Any) -> RequestError:
    return RequestError("bad_value", f"{param}: {rule}, got {reprlib.repr(value)}")
