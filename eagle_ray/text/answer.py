"""Answer: the content, reasoning and tool calls of an assistant's message.

    >>> answer_of([ChatEvent("call", "add", 0), ChatEvent("arguments", '{"a": 1}', 0)])
    Answer(content='', reasoning='', calls=(ToolCall(name='add', arguments='{"a": 1}'),))

IncrementalParser is the base of parsers that read a growing text and yield events as soon as they
are certain. Such a parser is a generator, `_parse`, that reads `_text` from `_pos` on and yields
where it needs more text:

    class Words(IncrementalParser):
        def _parse(self):
            while (yield from self._pass_until("<mark>", "content")):
                self._consume()

Its events depend on the text alone, not on how the text was cut.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

EventKind = Literal["content", "reasoning", "call", "arguments", "broken"]
Result = TypeVar("Result")
Step = Generator[None, None, Result]
"""A part of a parser that yields where it needs more text, and returns its result."""
_SPACE = re.compile(r"\s*")
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """A piece of an answer.

    Attributes:
        kind: kind of the event. content and reasoning append to a text; call begins a tool call;
            arguments append to its arguments; broken cancels a begun call, whose arguments turned
            out not to be JSON. Then the next content has its whole text.
        text: appended text; for call the tool's name, for broken empty.
        index: index of the tool call in its answer, from 0.
    """

    kind: EventKind
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool in an answer.

    Attributes:
        arguments: JSON text of an object, as the model wrote it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the answer's finish reason: tool_calls if a stopped sequence has calls, else the sequence's own."""
        return "tool_calls" if self.calls and reason == "stop" else reason


def answer_of(events: Iterable[ChatEvent]) -> Answer:
    """Return the answer that results from all events of an output."""
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


def num_begun(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of the text that may be the beginning of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    for num_chars in range(min(longest, len(text)), 0, -1):
        end = text[-num_chars:]
        if any(string.startswith(end) for string in strings):
            return num_chars
    return 0


class ObjectScanner:
    """Finds where a JSON object or list ends in a growing text, by its brackets and strings alone."""

    def __init__(self, start: int):
        self._at = start
        self._depth = 0
        self._is_in_string = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Return the position after the object's last bracket, or None if the text does not have it yet."""
        while self._end is None and self._at < len(text):
            match = (_INSIDE_STRING if self._is_in_string else _OUTSIDE_STRING).search(
                text, self._at
            )
            if match is None:
                self._at = len(text)
                return None
            if match[0] == "\\":
                if match.end() == len(text):
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if match[0] == '"':
                self._is_in_string = not self._is_in_string
                continue
            self._depth += 1 if match[0] in "{[" else -1
            if self._depth <= 0:
                self._end = self._at
        return self._end


class IncrementalParser(ABC):
    """Base of parsers that read a growing text: call `feed` with each piece of it, then `end` once."""

    def __init__(self) -> None:
        self._text = ""  # text that is not consumed yet
        self._pos = 0  # position in _text
        self._is_final = False
        self._drops_newlines = False
        self._events: list[ChatEvent] = []
        self._steps = self._parse()

    def feed(self, text: str) -> list[ChatEvent]:
        """Return the events that are certain after a further piece of the text."""
        self._text += text
        return self._advance()

    def end(self) -> list[ChatEvent]:
        """Return the remaining events, once the text is whole."""
        self._is_final = True
        return self._advance()

    @abstractmethod
    def _parse(self) -> Step[None]:
        """Emit events for the text."""

    def _advance(self) -> list[ChatEvent]:
        next(self._steps, None)
        events = self._events
        self._events = []
        return events

    def _emit(self, kind: EventKind, text: str, index: int = 0) -> None:
        self._events.append(ChatEvent(kind, text, index))

    def _consume(self) -> None:
        """Take the text up to _pos as read."""
        self._text = self._text[self._pos :]
        self._pos = 0

    def _pass(self, kind: EventKind, end: int) -> None:
        """Emit and consume the text up to `end`. Newlines right after a marker belong to the marker."""
        piece = self._text[:end]
        if self._drops_newlines:
            piece = piece.lstrip("\n")
            self._drops_newlines = not piece
        if piece:
            self._emit(kind, piece)
        self._pos = end
        self._consume()

    def _pass_until(self, marker: str, kind: EventKind) -> Step[bool]:
        """Pass the text before the marker on. Return whether the marker came.

        Then _text begins with the newlines before the marker, which belong to it, and _pos is after
        the marker.
        """
        while True:
            at = self._text.find(marker)
            if at >= 0:
                end = len(self._text[:at].rstrip("\n"))
                self._pass(kind, end)
                self._pos = at - end + len(marker)
                return True
            if self._is_final:
                self._pass(kind, len(self._text))
                return False
            certain = self._text[: len(self._text) - num_begun(self._text, [marker])]
            self._pass(kind, len(certain.rstrip("\n")))
            yield

    def _next_character(self) -> Step[str]:
        """Skip white space and return the character after it, which stays; "" at the end of the text."""
        while True:
            self._pos = _after_space(self._text, self._pos)
            if self._pos < len(self._text):
                return self._text[self._pos]
            if self._is_final:
                return ""
            yield

    def _skip(self, literal: str) -> Step[bool]:
        """Skip white space and the literal, or nothing if other text follows. The text may end within the literal."""
        while True:
            start = _after_space(self._text, self._pos)
            next_text = self._text[start : start + len(literal)]
            if next_text == literal or (self._is_final and literal.startswith(next_text)):
                self._pos = start + len(next_text)
                return next_text == literal
            if self._is_final or not literal.startswith(next_text):
                return False
            yield


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return start if match is None else match.end()
