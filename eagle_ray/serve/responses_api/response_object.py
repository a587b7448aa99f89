"""ResponseObject: OpenAI's response, built item by item from the parts of a chat answer.

    response = ResponseObject(asked, body, num_reasoning_tokens)
    for part in message_parts(choice):          # deltas of a chat message, one of content, reasoning or calls each
        events += response.add(part)
    events += response.finish("stop")
    response.json["output"]                     # the items in the order in which they began

A streamed response sends the events; one that is not streamed is the same object at its end.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from eagle_ray.requests.openai_bodies import ResponsesRequest
from eagle_ray.serve.generation_request import GenerationRequest
from eagle_ray.serve.responses import Json, metrics_of, usage_of

_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseObject:
    """One response. Methods return the events that tell of a change, without their sequence numbers.

    count_tokens: the number of tokens of a text, for usage.
    """

    def __init__(self, asked: GenerationRequest, body: ResponsesRequest, count_tokens: Callable[[str], int]):
        self._asked, self._count_tokens = asked, count_tokens
        self._key = secrets.token_hex(12)
        self._open: int | None = None  # index of the item that grows
        self._calls: dict[int, int] = {}  # items by the index of their call
        self.json = _begun(asked, body, f"resp_{self._key}")

    def begin(self) -> list[Json]:
        return [{"type": f"response.{name}", "response": _copy(self.json)} for name in ("created", "in_progress")]

    def add(self, delta: Json, logprobs: list[Json] | None = None) -> list[Json]:
        """Add a delta of a chat message. logprobs: of content, as a chat has them."""
        events: list[Json] = []
        if delta.get("reasoning_content"):
            events += self._grow("reasoning", delta["reasoning_content"], [])
        if delta.get("content"):
            events += self._grow("message", delta["content"], [_logprob(one) for one in logprobs or ()])
        for number, call in enumerate(delta.get("tool_calls") or ()):
            events += self._add_call(call.get("index", number), call)
        return events

    def finish(self, reason: str | None) -> list[Json]:
        """End the response. reason: the chat's finish_reason."""
        is_cut = reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if not self.json["output"]:
            events += [*self._open_item("message", {"role": "assistant", "content": []}), *self._close("completed")]
        status = "incomplete" if is_cut else "completed"
        self.json |= {"status": status, "usage": self._usage(), "metrics": metrics_of(self._asked)}
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
            events += self._close() + self._open_item("function_call", values)
            self._calls[index] = len(self.json["output"]) - 1
        place = self._calls[index]
        if function.get("arguments"):
            item = self.json["output"][place]
            item["arguments"] += function["arguments"]
            told = {"type": "response.function_call_arguments.delta", "delta": function["arguments"]}
            events.append(told | {"item_id": item["id"], "output_index": place})
        return events

    def _grow(self, kind: str, text: str, logprobs: list[Json]) -> list[Json]:
        """Add to the text of the open item, or of a new one."""
        events: list[Json] = []
        if self._open is None or self.json["output"][self._open]["type"] != kind:
            values: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self._close() + self._open_item(kind, values | {"content": []})
            events += self._open_part(kind)
        assert self._open is not None
        part = self.json["output"][self._open]["content"][0]
        part["text"] += text
        told: Json = {"type": f"{_DELTAS[kind]}.delta", "delta": text} | self._place()
        if kind == "message":
            part["logprobs"] += logprobs
            told["logprobs"] = logprobs
        return [*events, told]

    def _open_item(self, kind: str, values: Json) -> list[Json]:
        self._open = len(self.json["output"])
        item = {"id": f"{_IDS[kind]}_{self._key}{self._open:02x}", "type": kind, "status": "in_progress"} | values
        self.json["output"].append(item)
        return [{"type": "response.output_item.added", "output_index": self._open, "item": _copy(item)}]

    def _open_part(self, kind: str) -> list[Json]:
        part = _PART if kind == "message" else {"type": "reasoning_text", "text": ""}
        assert self._open is not None
        self.json["output"][self._open]["content"].append(_copy(part))
        return [{"type": "response.content_part.added", "part": _copy(part)} | self._place()]

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
        return [*events, {"type": "response.output_item.done", "output_index": index, "item": _copy(item)}]

    def _ends(self, item: Json) -> Iterator[Json]:
        """Yield the events that end the parts of the open item."""
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"], "item_id": item["id"]}
            yield {"type": "response.function_call_arguments.done", "output_index": self._open} | told
        elif item["content"]:
            part = item["content"][0]
            told = {"type": f"{_DELTAS[item['type']]}.done", "text": part["text"]}
            yield told | ({"logprobs": part["logprobs"]} if item["type"] == "message" else {}) | self._place()
            yield {"type": "response.content_part.done", "part": _copy(part)} | self._place()

    def _place(self) -> Json:
        assert self._open is not None
        item = self.json["output"][self._open]
        return {"item_id": item["id"], "output_index": self._open, "content_index": 0}

    def _usage(self) -> Json:
        thoughts = [item["content"][0]["text"] for item in self.json["output"] if item["type"] == "reasoning"]
        usage = usage_of(self._asked, sum(map(self._count_tokens, thoughts)))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _begun(asked: GenerationRequest, body: ResponsesRequest, id: str) -> Json:
    """Return the object of a response that has begun: what was requested, with the values in force."""
    sampling = asked.choices[0].sequence.sampling
    options = asked.chat_options
    choice: Any = options.tool_choice
    if options.named is not None:
        choice = {"type": "function", "name": options.named}
    return {
        "id": id,
        "object": "response",
        "created_at": asked.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": options.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": choice,
        "tools": [_tool(tool) for tool in options.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _tool(tool: Json) -> Json:
    usual = {"description": None, "parameters": None, "strict": False}
    return {"type": "function"} | usual | tool["function"]


def _logprob(place: Json) -> Json:
    return place | {
        "bytes": place["bytes"] or [],
        "top_logprobs": [one | {"bytes": one["bytes"] or []} for one in place["top_logprobs"]],
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _copy(value: Json) -> Json:
    """Return the value as it is now: the object that it is part of grows."""
    copied: Json = json.loads(json.dumps(value))
    return copied
