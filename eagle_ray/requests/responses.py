"""Convert requests of OpenAI's /v1/responses to chat requests.

>>> messages_of_items([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], instructions="Be short.")
[{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': 'Hi'}]

Items are messages that a client writes, and items of an earlier response that it sends back. A
reasoning item and function calls become parts of the adjacent assistant message.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import BODY, LOGPROBS, RESPONSE_CHOICE_FORM, Api
from eagle_ray.requests.refused import fix_of
from eagle_ray.requests.values import Json, bad_value, checked, missing, unsupported
from eagle_ray.text.chat_format import template_arguments
from eagle_ray.text.strict_json import HalfSurrogate, JsonError
from eagle_ray.text.structured import response_format_text

# Parameters of responses alone.
RESPONSES_ONLY = {name: row for name, row in BODY.items() if row.apis == {Api.RESPONSES}}
RESPONSE_LENGTH = "max_output_tokens"  # what a chat calls max_tokens
RESPONSES_ROLES = ("system", "developer", "user", "assistant")
# Keys of an item of an earlier output that say nothing of its text.
ITEM_LABELS = (
    "type",
    "id",
    "status",
    "phase",
)
PART_KEYS = ("type", "text", "annotations", "logprobs")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of_items(items: str | list[Json], instructions: str | None) -> list[Json]:
    """Return the messages that the instructions and items stand for. Raises RequestError naming a wrong item."""
    messages: list[Json] = (
        [] if instructions is None else [{"role": "system", "content": instructions}]
    )
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for i, item in enumerate(items):
        _add_item(messages, item, f"input[{i}]")
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            # An answer that was cut off in its reasoning has none.
            message.setdefault("content", "")
    if not any(message["role"] != "system" for message in messages):
        raise bad_value("input", "must be a text or at least one item, got []")
    return messages


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ADDERS:
        fix = (
            f"this server reads items of type {', '.join(_ADDERS)}; leave {reprlib.repr(kind)} out"
        )
        raise unsupported(f"{where}.type", fix)
    add, names = _ADDERS[kind]
    refuse_other_keys(item, (*ITEM_LABELS, *names), where)
    add(messages, item, where)


def refuse_other_keys(values: Json, names: tuple[str, ...], where: str) -> None:
    """Raise RequestError for a key that is not in `names`, unless its value is null or false."""
    for name, value in values.items():
        if name not in names and value is not None and value is not False:
            raise unsupported(f"{where}.{name}", "leave it out")


def _add_message(messages: list[Json], item: Json, where: str) -> None:
    role = item.get("role")
    if role not in RESPONSES_ROLES:
        raise _wrong(f"{where}.role", f"must be {', '.join(RESPONSES_ROLES)}", role)
    content = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant_turn(messages, begins="content" in _last_turn(messages))["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_reasoning(messages: list[Json], item: Json, where: str) -> None:
    """Add the reasoning of an earlier answer as reasoning_content, which some chat templates read."""
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
        raise bad_value(f"{where}.arguments", str(error)) from None
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
}  # by type: the function that adds such an item, and the keys that it reads


def _last_turn(messages: list[Json]) -> Json:
    """Return the last message if its role is assistant; otherwise an empty one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else {}


def _assistant_turn(messages: list[Json], begins: bool = False) -> Json:
    """Return the assistant message that an item belongs to.

    Args:
        messages: messages so far. A new one may be appended.
        begins: whether the item begins a new message.
    """
    if begins or not _last_turn(messages):
        messages.append({"role": "assistant"})
    return messages[-1]


def _wrong(param: str, rule: str, value: Any) -> RequestError:
    return bad_value(param, f"{rule}, got {reprlib.repr(value)}")


def _text(content: Any, where: str) -> str:
    """Return the text of a content, which is a text or a list of text parts. Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a text or a list of text parts", content)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise unsupported(
                f"{where}[{i}]", f"this server reads text alone; got {reprlib.repr(kind)}"
            )
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{i}].text", "must be a text", part.get("text"))
        refuse_other_keys(part, PART_KEYS, f"{where}[{i}]")
    return "".join(part["text"] for part in content)


def chat_body(body: Mapping[str, Any]) -> Json:
    """Convert the body of a response to the body of a chat completion. A value of null is absent.

    Raises RequestError for a wrong parameter that only responses have. Other parameters must have
    been checked before.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, row in RESPONSES_ONLY.items():
        if name in given:
            given[name] = checked(name, row.kind, given[name])
        elif row.required:
            raise missing(name, row.kind)
    check_response(given)
    length = given.get(RESPONSE_LENGTH)
    min_tokens = given.get("min_tokens", 0)
    if length is not None and min_tokens > length:
        problem = f"must be at most {RESPONSE_LENGTH} ({length}), got {min_tokens}"
        raise bad_value("min_tokens", problem)
    return chat_values(given)


def check_response(given: Mapping[str, Any]) -> None:
    """Raise RequestError for values that /v1/responses does not support.

    Args:
        given: checked values by parameter; null is absent.
    """
    for name, value in (given.get("reasoning") or {}).items():
        if value is not None:
            raise unsupported(f"reasoning.{name}", fix_of("reasoning", Api.RESPONSES))
    include = given.get("include") or []
    if other := [name for name in include if name != LOGPROBS]:
        raise unsupported("include", f"{other[0]!r} is not made here; leave it out")
    if given.get("top_logprobs") and not include:
        raise bad_value("top_logprobs", f"only with include: [{LOGPROBS!r}]")


def chat_values(given: Json) -> Json:
    """Return the parameters of the chat completion that answers a response. Raises RequestError."""
    chat = {name: value for name, value in given.items() if name not in RESPONSES_ONLY}
    chat["messages"] = messages_of_items(given["input"], given.get("instructions"))
    if RESPONSE_LENGTH in given:
        chat["max_tokens"] = given[RESPONSE_LENGTH]
    tools = given.get("tools")
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        chat["tools"] = [chat_tool(tool, i) for i, tool in enumerate(tools)]
    if "tool_choice" in given:
        chat["tool_choice"] = chat_tool_choice(given["tool_choice"])
    response_format = _response_format(given.get("text", {}))
    if response_format is not None:
        chat["response_format"] = response_format
    if given.get("include"):
        chat["logprobs"] = True
    return chat


def chat_tool(tool: Json, index: int) -> Json:
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(
            f"tools[{index}].type",
            f"this server runs no tools of its own; got {reprlib.repr(kind)}",
        )
    names = ("name", "description", "parameters", "strict")
    refuse_other_keys(tool, ("type", *names), f"tools[{index}]")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def chat_tool_choice(choice: str | Json | None) -> str | Json | None:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise _wrong("tool_choice", f"must be {RESPONSE_CHOICE_FORM}", choice)
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: Json) -> str | None:
    """Return text.format as a chat's response_format, as JSON text; None if it is absent."""
    for name, value in text.items():
        if name != "format" and not (name == "verbosity" and value in (None, "medium")):
            raise unsupported(f"text.{name}", "leave it out")
    form = text.get("format")
    if form is None:
        return None
    is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
    try:
        return str(
            response_format_text(
                {"type": "json_schema", "json_schema": form} if is_schema else form
            )
        )
    except ValueError as error:
        rule = "must be {type: text}, {type: json_object} or {type: json_schema, name, schema}"
        why = f" ({error})" if isinstance(error, JsonError) else ""
        raise bad_value("text.format", f"{rule}, got {reprlib.repr(form)}{why}") from None
