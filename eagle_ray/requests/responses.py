"""OpenAI's /v1/responses: convert its request to a chat request, and a chat's answer to its answer.

>>> messages_of_items([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], instructions="Be short.")
[{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': 'Hi'}]

Items are those that a client writes, and those of an earlier response's output that it sends back.
A reasoning item and function calls belong to the assistant's message that is next to them.

A ResponseObject is OpenAI's response, built item by item from the parts of a chat answer:

    response = ResponseObject(key, fields)
    for delta in deltas:                        # deltas of a chat message: content, reasoning or calls each
        events += response.add(delta)
    events += response.finish("stop", usage, metrics)
    response.json["output"]                     # the items in the order in which they began

A streamed response sends the events; one that is not streamed is the same object at its end.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.answer_models import ChoiceScores, Metrics, ResponseUsage
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
    """Return the messages that the items and the instructions are. Raises RequestError that names the wrong item."""
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
    """Raise RequestError for a key that is not one of the names, unless it is null or off."""
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
    """Return the last message if it is the assistant's, else an empty one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else {}


def _assistant_turn(messages: list[Json], begins: bool = False) -> Json:
    """Return the assistant's message that an item belongs to.

    Args:
        begins: the item is the first of a new one.
    """
    if begins or not _last_turn(messages):
        messages.append({"role": "assistant"})
    return messages[-1]


def _wrong(param: str, rule: str, value: Any) -> RequestError:
    return bad_value(param, f"{rule}, got {reprlib.repr(value)}")


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a text, or a list of parts that are texts."""
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
    """Return the body of a chat completion that answers a response's body; null values are not given.

    Raises RequestError for a parameter of responses alone that is wrong. Others have been checked.
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
    """Raise RequestError for parameters that /v1/responses does not have.

    Args:
        given: values of their kinds. Null is absent.
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
    """Return the values of a chat completion that answers a response of these values. Raises RequestError."""
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
    """Return the response_format of a chat that text.format is, as JSON text, or None."""
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


_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseObject:
    """One response. Methods return the events that tell of a change, without their sequence numbers.

    Args:
        key: what the ids of the response and of its items are made of.
        fields: the response before it has items.
    """

    def __init__(self, key: str, fields: Json):
        self._key = key
        self._open: int | None = None  # index of the item that grows
        self._calls: dict[int, int] = {}  # items by the index of their call
        self.json: Json = {"id": f"resp_{key}"} | fields

    @property
    def reasonings(self) -> list[str]:
        return [
            item["content"][0]["text"]
            for item in self.json["output"]
            if item["type"] == "reasoning"
        ]

    def begin(self) -> list[Json]:
        return [
            {"type": f"response.{name}", "response": _copy(self.json)}
            for name in ("created", "in_progress")
        ]

    def add(self, delta: Json, logprobs: Json | None) -> list[Json]:
        """Add a delta of a chat message, or a whole one.

        Args:
            logprobs: log-probabilities of the chat's choice.
        """
        events: list[Json] = []
        if delta.get("reasoning_content"):
            events += self._grow("reasoning", delta["reasoning_content"], [])
        if delta.get("content"):
            events += self._grow("message", delta["content"], _logprobs(logprobs))
        for number, call in enumerate(delta.get("tool_calls") or ()):
            events += self._add_call(call.get("index", number), call)
        return events

    def finish(
        self, reason: str | None, usage: ResponseUsage, metrics: Metrics, scores: ChoiceScores
    ) -> list[Json]:
        """End the response.

        Args:
            reason: the chat's finish_reason.
            usage: token counts in the form of a response.
            scores: scores of what the answer may be; empty without any.
        """
        is_cut = reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if not self.json["output"]:
            events += [
                *self._open_item("message", {"role": "assistant", "content": []}),
                *self._close("completed"),
            ]
        status = "incomplete" if is_cut else "completed"
        self.json |= {"status": status, "usage": usage, "metrics": metrics, **scores}
        if is_cut:
            self.json["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.json["completed_at"] = int(time.time())
        return [*events, {"type": f"response.{status}", "response": self.json}]

    def _add_call(self, index: int, call: Json) -> list[Json]:
        events: list[Json] = []
        function = call["function"]
        if index not in self._calls:
            values = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            events += self._close()
            events += self._open_item("function_call", values)
            self._calls[index] = len(self.json["output"]) - 1

        arguments = function.get("arguments")
        if arguments:
            output_index = self._calls[index]
            item = self.json["output"][output_index]
            item["arguments"] += arguments
            events.append(
                {
                    "type": "response.function_call_arguments.delta",
                    "delta": arguments,
                    "item_id": item["id"],
                    "output_index": output_index,
                }
            )
        return events

    def _grow(self, kind: str, text: str, logprobs: list[Json]) -> list[Json]:
        """Add to the text of the open item, or of a new one."""
        events: list[Json] = []
        if self._open is None or self.json["output"][self._open]["type"] != kind:
            values: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self._close()
            events += self._open_item(kind, values | {"content": []})
            events += self._open_part(kind)
        assert self._open is not None
        item = self.json["output"][self._open]
        part = item["content"][0]
        part["text"] += text
        event: Json = {"type": f"{_DELTAS[kind]}.delta", "delta": text} | self._position()
        if kind == "message":
            part["logprobs"] += logprobs
            event["logprobs"] = logprobs
        events.append(event)
        return events

    def _open_item(self, kind: str, values: Json) -> list[Json]:
        self._open = len(self.json["output"])
        item = {
            "id": f"{_IDS[kind]}_{self._key}{self._open:02x}",
            "type": kind,
            "status": "in_progress",
        } | values
        self.json["output"].append(item)
        return [
            {"type": "response.output_item.added", "output_index": self._open, "item": _copy(item)}
        ]

    def _open_part(self, kind: str) -> list[Json]:
        part = _PART if kind == "message" else {"type": "reasoning_text", "text": ""}
        assert self._open is not None
        self.json["output"][self._open]["content"].append(_copy(part))
        return [{"type": "response.content_part.added", "part": _copy(part)} | self._position()]

    def _close(self, status: str = "completed") -> list[Json]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        index, item = self._open, self.json["output"][self._open]
        events = list(self._ends(item))
        if item["type"] == "function_call" and not _is_object(item["arguments"]):
            status = "incomplete"
        item["status"] = status
        self._open = None
        return [
            *events,
            {"type": "response.output_item.done", "output_index": index, "item": _copy(item)},
        ]

    def _ends(self, item: Json) -> Iterator[Json]:
        """Yield the events that end the parts of the open item."""
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"], "item_id": item["id"]}
            yield {
                "type": "response.function_call_arguments.done",
                "output_index": self._open,
            } | call
        elif item["content"]:
            part = item["content"][0]
            event = {"type": f"{_DELTAS[item['type']]}.done", "text": part["text"]}
            yield (
                event
                | ({"logprobs": part["logprobs"]} if item["type"] == "message" else {})
                | self._position()
            )
            yield {"type": "response.content_part.done", "part": _copy(part)} | self._position()

    def _position(self) -> Json:
        assert self._open is not None
        item = self.json["output"][self._open]
        return {"item_id": item["id"], "output_index": self._open, "content_index": 0}


def _logprobs(logprobs: Json | None) -> list[Json]:
    """Return a chat choice's log-probabilities as a response has them: bytes is never null."""
    return [
        _with_bytes(token) | {"top_logprobs": [_with_bytes(top) for top in token["top_logprobs"]]}
        for token in (logprobs or {}).get("content", ())
    ]


def _with_bytes(token: Json) -> Json:
    return token | {"bytes": token["bytes"] or []}


def stored_response(
    key: str, model: str, created: int, choice: Mapping[str, Any], usage: ResponseUsage
) -> Json:
    """Return the response of a batch's line, made of a chat's choice.

    What the request asked for and a run does not store is empty or null.
    """
    is_cut = choice["finish_reason"] == "length"
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": created,
        "completed_at": None if is_cut else created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": _stored_items(choice, key),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage,
    }


def _stored_items(choice: Mapping[str, Any], key: str) -> list[Json]:
    """Return the items of a stored response: its reasoning, its message and its function calls, in this order."""
    message, status = (
        choice["message"],
        "incomplete" if choice["finish_reason"] == "length" else "completed",
    )
    items: list[Json] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{key}",
                "summary": [],
                "content": content,
                "status": "completed",
            }
        )
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        logprobs = [_with_bytes(token) for token in (choice["logprobs"] or {}).get("content", ())]
        part = _PART | {"text": message["content"] or "", "logprobs": logprobs}
        items.append(
            {
                "type": "message",
                "id": f"msg_{key}",
                "role": "assistant",
                "content": [part],
                "status": status,
            }
        )
    for i, call in enumerate(calls):
        names = {"call_id": call["id"], **call["function"]}
        items.append({"type": "function_call", "id": f"fc_{key}_{i}", "status": status, **names})
    return items


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _copy(value: Json) -> Json:
    """Return the value as it is now: the object that it is part of grows."""
    copied: Json = json.loads(dump_json(value))
    return copied
