"""Build answers of /v1/responses from the parts of chat answers.

A ResponseObject is OpenAI's response. It grows item by item:

    response = ResponseObject(key, begun)
    for delta in deltas:                        # each adds content, reasoning or tool calls
        events += response.add(delta, logprobs)
    events += response.finish("stop", usage, metrics, scores)
    response.body["output"]                     # the items in the order in which they began

A streamed response sends the events. A response that is not streamed sends the body at the end.
"""

from __future__ import annotations

import json
import time
from typing import TypeVar

from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.answer_models import (
    ChatAnswer,
    ChatChoice,
    ChatFinish,
    ChatLogprobs,
    ChatPlace,
    ChoiceScores,
    Delta,
    DeltaCall,
    FunctionCallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    Metrics,
    OutputItem,
    OutputText,
    PartPlace,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseUsage,
    StoredResponse,
    StreamEvent,
)

Model = TypeVar("Model")


class ResponseObject:
    """A response that grows. Each method returns the events of its change, without sequence numbers.

    Args:
        key: text from which the ids of items are made.
        body: response without items.
    """

    def __init__(self, key: str, body: ResponseBody):
        self._key = key
        self._open: int | None = None  # index of the item that grows
        self._calls: dict[int, int] = {}  # items by the index of their call
        self.body = body

    @property
    def reasonings(self) -> list[str]:
        return [
            item["content"][0]["text"]
            for item in self.body["output"]
            if item["type"] == "reasoning"
        ]

    def begin(self) -> list[StreamEvent]:
        return [
            {"type": "response.created", "response": _copy(self.body)},
            {"type": "response.in_progress", "response": _copy(self.body)},
        ]

    def add_message(self, message: ChatAnswer, logprobs: ChatLogprobs | None) -> None:
        """Add a whole message of a chat.

        Args:
            message: message of the assistant.
            logprobs: log-probabilities of the chat's choice; None without any.
        """
        delta: Delta = {"content": message["content"]}
        if "reasoning_content" in message:
            delta["reasoning_content"] = message["reasoning_content"]
        if "tool_calls" in message:
            delta["tool_calls"] = [
                {
                    "index": index,
                    "id": call["id"],
                    "type": call["type"],
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": call["function"]["arguments"],
                    },
                }
                for index, call in enumerate(message["tool_calls"])
            ]
        self.add(delta, logprobs)

    def add(self, delta: Delta, logprobs: ChatLogprobs | None) -> list[StreamEvent]:
        """Add a delta of a chat message.

        Args:
            delta: content, reasoning or tool calls to add.
            logprobs: log-probabilities of the delta's tokens; None without any.
        """
        events: list[StreamEvent] = []
        reasoning = delta.get("reasoning_content")
        if reasoning:
            events += self._add_reasoning(reasoning)
        content = delta.get("content")
        if content:
            shown = [] if logprobs is None else [_with_bytes(one) for one in logprobs["content"]]
            events += self._add_content(content, shown)
        for call in delta.get("tool_calls", ()):
            events += self._add_call(call)
        return events

    def finish(
        self,
        reason: ChatFinish | None,
        usage: ResponseUsage,
        metrics: Metrics,
        scores: ChoiceScores,
    ) -> list[StreamEvent]:
        """End the response.

        Args:
            reason: finish_reason of the chat.
            usage: token counts.
            metrics: speculation metrics.
            scores: scores of choices or continuations; empty without any.
        """
        is_cut = reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if not self.body["output"]:
            events += [self._open_message(), *self._close("completed")]
        self.body["status"] = "incomplete" if is_cut else "completed"
        self.body["usage"] = usage
        self.body["metrics"] = metrics
        self.body.update(scores)
        if is_cut:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*events, {"type": "response.incomplete", "response": self.body}]
        self.body["completed_at"] = int(time.time())
        return [*events, {"type": "response.completed", "response": self.body}]

    def _add_reasoning(self, text: str) -> list[StreamEvent]:
        """Append to the open reasoning item, or to a new one."""
        events: list[StreamEvent] = []
        item = self._open_item
        if item is None or item["type"] != "reasoning":
            events += self._close()
            index, id = self._next("rs")
            item = {
                "id": id,
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            events.append(self._begin_item(index, item))
            new: ReasoningText = {"type": "reasoning_text", "text": ""}
            item["content"].append(new)
            events.append(
                {"type": "response.content_part.added", "part": _copy(new), **self._place()}
            )
        item["content"][0]["text"] += text
        return [
            *events,
            {"type": "response.reasoning_text.delta", "delta": text, **self._place()},
        ]

    def _add_content(self, text: str, logprobs: list[ChatPlace]) -> list[StreamEvent]:
        """Append to the open message, or to a new one."""
        events: list[StreamEvent] = []
        item = self._open_item
        if item is None or item["type"] != "message":
            events += self._close()
            events.append(self._open_message())
            item = self.body["output"][-1]
            assert item["type"] == "message"
            new = _output_text("", [])
            item["content"].append(new)
            events.append(
                {"type": "response.content_part.added", "part": _copy(new), **self._place()}
            )
        part = item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return [
            *events,
            {
                "type": "response.output_text.delta",
                "delta": text,
                **self._place(),
                "logprobs": logprobs,
            },
        ]

    def _add_call(self, call: DeltaCall) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        function = call["function"]
        if call["index"] not in self._calls:
            events += self._close()
            index, id = self._next("fc")
            new: FunctionCallItem = {
                "id": id,
                "type": "function_call",
                "status": "in_progress",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": "",
            }
            events.append(self._begin_item(index, new))
            self._calls[call["index"]] = index

        arguments = function["arguments"]
        if arguments:
            output_index = self._calls[call["index"]]
            item = self.body["output"][output_index]
            assert item["type"] == "function_call"
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

    @property
    def _open_item(self) -> OutputItem | None:
        return None if self._open is None else self.body["output"][self._open]

    def _next(self, prefix: str) -> tuple[int, str]:
        """Return the index and the id of the next item."""
        index = len(self.body["output"])
        return index, f"{prefix}_{self._key}{index:02x}"

    def _open_message(self) -> ItemEvent:
        index, id = self._next("msg")
        item: MessageItem = {
            "id": id,
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        return self._begin_item(index, item)

    def _begin_item(self, index: int, item: OutputItem) -> ItemEvent:
        self._open = index
        self.body["output"].append(item)
        return {
            "type": "response.output_item.added",
            "output_index": index,
            "item": _copy(item),
        }

    def _close(self, status: ItemStatus = "completed") -> list[StreamEvent]:
        """End the open item, if there is one."""
        index, item = self._open, self._open_item
        if index is None or item is None:
            return []
        events = self._ends(index, item)
        if item["type"] == "function_call" and not _is_object(item["arguments"]):
            status = "incomplete"
        item["status"] = status
        self._open = None
        return [
            *events,
            {"type": "response.output_item.done", "output_index": index, "item": _copy(item)},
        ]

    def _ends(self, index: int, item: OutputItem) -> list[StreamEvent]:
        """Return the events that end the parts of an item."""
        if item["type"] == "function_call":
            return [
                {
                    "type": "response.function_call_arguments.done",
                    "output_index": index,
                    "name": item["name"],
                    "arguments": item["arguments"],
                    "item_id": item["id"],
                }
            ]
        if not item["content"]:
            return []
        place = self._place()
        if item["type"] == "reasoning":
            reasoning = item["content"][0]
            return [
                {"type": "response.reasoning_text.done", "text": reasoning["text"], **place},
                {"type": "response.content_part.done", "part": _copy(reasoning), **place},
            ]
        part = item["content"][0]
        return [
            {
                "type": "response.output_text.done",
                "text": part["text"],
                "logprobs": part["logprobs"],
                **place,
            },
            {"type": "response.content_part.done", "part": _copy(part), **place},
        ]

    def _place(self) -> PartPlace:
        """Return the open item's id and indices, which the events of its text have."""
        item = self._open_item
        assert self._open is not None and item is not None
        return {"item_id": item["id"], "output_index": self._open, "content_index": 0}


def _output_text(text: str, logprobs: list[ChatPlace]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _with_bytes(place: ChatPlace) -> ChatPlace:
    """Return the log-probabilities of a token in the form of responses, where bytes are never null."""
    return {
        "token": place["token"],
        "logprob": place["logprob"],
        "bytes": place["bytes"] or [],
        "top_logprobs": [
            {"token": top["token"], "logprob": top["logprob"], "bytes": top["bytes"] or []}
            for top in place["top_logprobs"]
        ],
    }


def stored_response(
    key: str,
    model: str,
    created: int,
    choice: ChatChoice,
    usage: ResponseUsage,
    scores: ChoiceScores,
) -> StoredResponse:
    """Return the response to a line of a batch file.

    Args:
        key: text that the ids of the response and of its items contain.
        model: name of the target.
        created: Unix time in seconds.
        choice: choice of the chat that answers the line.
        usage: token counts.
        scores: scores of choices or continuations; empty without any.
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
        **scores,
    }


def _stored_items(choice: ChatChoice, key: str) -> list[OutputItem]:
    """Return the items of a stored response in order: reasoning, message, function calls."""
    message = choice["message"]
    status: ItemStatus = "incomplete" if choice["finish_reason"] == "length" else "completed"
    items: list[OutputItem] = []
    reasoning = message.get("reasoning_content")
    if reasoning:
        reasoning_item: ReasoningItem = {
            "type": "reasoning",
            "id": f"rs_{key}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reasoning}],
            "status": "completed",
        }
        items.append(reasoning_item)
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        logprobs = choice["logprobs"]
        shown = [] if logprobs is None else [_with_bytes(one) for one in logprobs["content"]]
        message_item: MessageItem = {
            "type": "message",
            "id": f"msg_{key}",
            "role": "assistant",
            "content": [_output_text(message["content"] or "", shown)],
            "status": status,
        }
        items.append(message_item)
    for i, call in enumerate(calls):
        call_item: FunctionCallItem = {
            "type": "function_call",
            "id": f"fc_{key}_{i}",
            "status": status,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        items.append(call_item)
    return items


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _copy(value: Model) -> Model:
    """Return a copy of a value that later events do not change."""
    copied: Model = json.loads(dump_json(value))
    return copied
