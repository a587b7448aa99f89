"""ToolParser: find tool calls in the content of an answer, and pass everything else on as content.

    >>> from eagle_ray.text.tool_forms import HermesParser
    >>> parser = HermesParser({"add"})
    >>> text = 'Adding.\\n<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>'
    >>> [(event.kind, event.text) for event in parser.feed(text) + parser.end()]
    [('content', 'Adding.'), ('call', 'add'), ('arguments', '{"a": 1}')]

A call is an object with the name of one of the request's tools and an object of arguments. It is told as soon as its
name is certain, and its arguments as they come. Anything else that begins like a call is content, character for
character. If only the end shows that a call is none, a broken event takes it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from eagle_ray.text.incremental_parser import IncrementalParser, ObjectScanner, Step

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
MAX_HEAD_CHARS = 1000  # of what stands before the arguments, in a call that is told before it is whole
NO_ARGUMENTS = "{}"


class ToolParser(IncrementalParser):
    """tool_names: the tools that may be called. A call of another one is content."""

    def __init__(self, tool_names: Collection[str]):
        super().__init__()
        self._tool_names = frozenset(tool_names)
        self._num_calls = 0

    def _as_content(self) -> None:
        """Pass the text up to _pos on: it is no call."""
        self._pass("content", self._pos)

    def _end_call(self) -> None:
        """Take a call as read."""
        self._consume()
        self._drops_newlines = True

    def _object_call(self) -> Step[bool]:
        """Read a call that is one JSON object, which begins at _pos. Return whether it is one; _pos is after it."""
        start = self._pos
        scanner = ObjectScanner(start)
        streamed: _StreamedCall | None = None
        is_in_head = True
        while True:
            end = scanner.end(self._text)
            self._pos = len(self._text) if end is None else end
            if is_in_head and (head := _HEAD.match(self._text, start, start + MAX_HEAD_CHARS)):
                streamed = self._begin(_loads(head["name"]), head.end())
            is_in_head = is_in_head and head is None and len(self._text) < start + MAX_HEAD_CHARS
            if streamed is not None:
                self._tell_arguments(streamed)
            if end is not None or self._is_final:
                return self._finish(self._text[start : self._pos], streamed)
            yield

    def _arguments_call(self, name: str) -> Step[bool]:
        """Read the arguments of a call whose name came before them. They begin at _pos; return whether they are any."""
        streamed = self._begin(name, self._pos)
        while True:
            if streamed is not None:
                self._tell_arguments(streamed)
            if streamed is None or streamed.is_whole or self._is_final:
                break
            yield
        if streamed is None:
            return False
        self._pos = streamed.num_told
        if streamed.is_whole and isinstance(_loads(streamed.arguments(self._text)), dict):
            return True
        self._emit("broken", "", streamed.index)
        return False

    def _begin(self, name: Any, start: int) -> _StreamedCall | None:
        """Tell the name of a call whose arguments begin at `start`; None if it is no tool's."""
        if name not in self._tool_names:
            return None
        self._emit("call", name, self._num_calls)
        self._num_calls += 1
        return _StreamedCall(name, start, self._num_calls - 1)

    def _tell_arguments(self, call: _StreamedCall) -> None:
        piece = call.next_piece(self._text)
        if piece:
            self._emit("arguments", piece, call.index)

    def _finish(self, source: str, streamed: _StreamedCall | None) -> bool:
        """Return whether the whole source is a call, and tell it unless it was streamed."""
        call = _loads(source)
        name = call.get("name") if isinstance(call, dict) else None
        arguments = _arguments_in(call) if isinstance(name, str) and name in self._tool_names else None
        if streamed is None:
            if arguments is None or not isinstance(name, str):
                return False
            self._emit("call", name, self._num_calls)
            self._emit("arguments", _arguments_text(arguments), self._num_calls)
            self._num_calls += 1
            return True
        is_told = streamed.is_whole and _loads(streamed.arguments(self._text)) == arguments
        if name == streamed.name and isinstance(arguments, dict) and is_told:
            return True
        self._emit("broken", "", streamed.index)
        return False


class _StreamedCall:
    """A call whose arguments, an object that begins at `start`, are told as they come."""

    def __init__(self, name: str, start: int, index: int):
        self.name, self.index = name, index
        self.num_told = start  # position in the text
        self.is_whole = False
        self._start = start
        self._scanner = ObjectScanner(start)

    def next_piece(self, text: str) -> str:
        if self.is_whole:
            return ""
        end = self._scanner.end(text)
        self.is_whole = end is not None
        start = self.num_told
        self.num_told = len(text) if end is None else end
        return text[start : self.num_told]

    def arguments(self, text: str) -> str:
        return text[self._start : self.num_told]


def _arguments_in(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call: an object, the JSON of one, or {} if it has none; None for anything else."""
    value = call.get("arguments", call.get("parameters", {}))
    if isinstance(value, str):
        value = _loads(value)
    return value if isinstance(value, dict) else None


def _arguments_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return json.dumps(arguments)
    return text


def _loads(text: str) -> Any:
    """Return the value of a JSON text, or None for any other text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
