"""Answer: the parts of an assistant's message: content, reasoning and tool calls, put together from a parser's events.

>>> answer_of([ChatEvent("call", "add", 0), ChatEvent("arguments", '{"a": 1}', 0)])
Answer(content='', reasoning='', calls=(ToolCall(name='add', arguments='{"a": 1}'),))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["content", "reasoning", "call", "arguments", "broken"]


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """A piece of an answer.

    Attributes:
        kind: content and reasoning add to a text. call begins a tool call, arguments add to its arguments. broken takes
            a begun call back: its arguments turned out not to be JSON, and the next content has its whole text.
        text: the piece; for call, the tool's name; for broken, empty.
        index: of the tool call in its answer, from 0.
    """

    kind: EventKind
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool. arguments: a JSON object, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why the answer ended, by why its sequence did: stop, length or None."""
        return "tool_calls" if self.calls and reason == "stop" else reason


def answer_of(events: Iterable[ChatEvent]) -> Answer:
    """Return the answer that all events of an output make."""
    texts = {"content": "", "reasoning": ""}
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if event.kind in texts:
            texts[event.kind] += event.text
        elif event.kind == "call":
            names[event.index] = event.text
        elif event.kind == "arguments":
            arguments[event.index] = arguments.get(event.index, "") + event.text
        else:
            del names[event.index]
    calls = tuple(ToolCall(name, arguments.get(index, "")) for index, name in names.items())
    return Answer(texts["content"], texts["reasoning"], calls)


def merged(events: Iterable[ChatEvent]) -> Iterator[ChatEvent]:
    """Yield the events with neighbours of one kind joined, so that they do not depend on how a text was cut."""
    last: ChatEvent | None = None
    for event in events:
        is_more = last is not None and (last.kind, last.index) == (event.kind, event.index)
        if last is not None and is_more and event.kind in ("content", "reasoning", "arguments"):
            last = ChatEvent(last.kind, last.text + event.text, last.index)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
