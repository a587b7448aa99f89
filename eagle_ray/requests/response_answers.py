"""Answers of /v1/responses, made of a chat's answers.

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
import time
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.answer_models import ChoiceScores, Metrics, ResponseUsage
from eagle_ray.requests.values import Json

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
