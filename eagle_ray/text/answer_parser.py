"""AnswerParser: split the text of an answer into reasoning, content and tool calls, as it grows or at once.

    >>> from eagle_ray.text.chat_options import NO_OPTIONS
    >>> chat_format = ChatFormat("hermes", "qwen3")
    >>> parse_answer("<think>\\nHm.\\n</think>\\n\\nFour.", AnswerParser.of(chat_format, NO_OPTIONS, ""))
    Answer(content='Four.', reasoning='Hm.', calls=())

Newlines right before and after a marker belong to it. A text that ends within the reasoning has no
content.

A call is an object with the name of one of the request's tools and an object of arguments. Its
event is emitted as soon as its name is certain, and its arguments as they grow. Other text that
begins like a call is content, character for character. If only its end shows that a begun call is
none, a broken event cancels it.

The forms in which models write tool calls have the names that vLLM has for them:

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>             Hermes 2, Qwen 2.5, Qwen 3
    llama3_json   {"name": "add", "parameters": {"a": 1}}; {...}    or after <|python_tag|> Llama 3.1, 3.2, 3.3
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {...}]               Mistral
                  [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]...    or without [ARGS]         Mistral since 2025
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from eagle_ray.core.json_text import dump_json
from eagle_ray.text.answer import (
    Answer,
    ChatEvent,
    IncrementalParser,
    ObjectScanner,
    Step,
    answer_of,
)
from eagle_ray.text.chat_format import (
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALLS,
    TOOL_CLOSE,
    TOOL_OPEN,
    ChatFormat,
    reasoning_at,
)
from eagle_ray.text.chat_options import ChatOptions

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
# Characters before the arguments, in a call that is sent before it is whole.
MAX_HEAD_CHARS = 1000
_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")
_NOT_IN_NAME = re.compile(r"[^\w.\-\[\]\s]")
# Characters between [TOOL_CALLS] and its arguments; names of tools have at most 64.
MAX_TOOL_NAME_CHARS = 200


class ReasoningParser(IncrementalParser):
    """Splits the reasoning of an answer from what follows it.

    Args:
        starts_inside: whether the answer begins within the reasoning, because the prompt ends with
            the opening marker or the model writes none.
    """

    def __init__(self, starts_inside: bool):
        super().__init__()
        self._starts_inside = starts_inside

    def _parse(self) -> Step[None]:
        is_marked = yield from self._begins_with_marker()
        if is_marked or self._starts_inside:
            self._consume()
            self._drops_newlines = True
            if (yield from self._pass_until(THINK_CLOSE, "reasoning")):
                self._consume()
                self._drops_newlines = True
        while True:
            self._pass("content", len(self._text))
            yield

    def _begins_with_marker(self) -> Step[bool]:
        """Return whether the text begins with the marker, after white space. _pos is after it then."""
        start = yield from self._next_character()
        if start == THINK_OPEN[0] and (yield from self._skip(THINK_OPEN)):
            return True
        self._pos = 0
        return False


class ToolParser(IncrementalParser):
    """Finds the tool calls in the content of an answer. Each subclass parses one form of calls.

    Args:
        tool_names: names of the tools that may be called. A call of another tool is content.
    """

    def __init__(self, tool_names: Collection[str]):
        super().__init__()
        self._tool_names = frozenset(tool_names)
        self._num_calls = 0

    def _as_content(self) -> None:
        """Emit the text up to _pos as content: it is no call."""
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

    def _object_calls(self, separator: str) -> Step[bool]:
        """Read calls that are JSON objects with separators between them. The first object that is none is content.

        Return whether all were calls.
        """
        while True:
            is_object = (yield from self._next_character()) == "{"
            if not (is_object and (yield from self._object_call())):
                self._as_content()
                return False
            self._end_call()
            if not (yield from self._skip(separator)):
                return True

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
        self._pos = streamed.num_sent
        if streamed.is_whole and isinstance(_loads(streamed.arguments(self._text)), dict):
            return True
        self._emit("broken", "", streamed.index)
        return False

    def _begin(self, name: Any, start: int) -> _StreamedCall | None:
        """Emit the call event of a call whose arguments begin at `start`; return None if no tool has this name."""
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
        """Return whether the whole source is a call, and emit its events unless it was streamed."""
        call = _loads(source)
        name = call.get("name") if isinstance(call, dict) else None
        arguments = (
            _arguments_in(call) if isinstance(name, str) and name in self._tool_names else None
        )
        if streamed is None:
            if arguments is None or not isinstance(name, str):
                return False
            self._emit("call", name, self._num_calls)
            self._emit("arguments", _arguments_text(arguments), self._num_calls)
            self._num_calls += 1
            return True
        is_complete = streamed.is_whole and _loads(streamed.arguments(self._text)) == arguments
        if name == streamed.name and isinstance(arguments, dict) and is_complete:
            return True
        self._emit("broken", "", streamed.index)
        return False


class _StreamedCall:
    """A tool call whose arguments are streamed; they are an object that begins at `start`."""

    def __init__(self, name: str, start: int, index: int):
        self.name = name
        self.index = index
        self.num_sent = start  # position in the text
        self.is_whole = False
        self._start = start
        self._scanner = ObjectScanner(start)

    def next_piece(self, text: str) -> str:
        if self.is_whole:
            return ""
        end = self._scanner.end(text)
        self.is_whole = end is not None
        start = self.num_sent
        self.num_sent = len(text) if end is None else end
        return text[start : self.num_sent]

    def arguments(self, text: str) -> str:
        return text[self._start : self.num_sent]


def _arguments_in(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call: an object, the JSON of one, or {} if it has none; None for anything else."""
    value = call.get("arguments", call.get("parameters", {}))
    if isinstance(value, str):
        value = _loads(value)
    return value if isinstance(value, dict) else None


def _arguments_text(arguments: dict[str, Any]) -> str:
    text = dump_json(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return dump_json(arguments)
    return text


def _loads(text: str) -> Any:
    """Return the value of a JSON text, or None for any other text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class HermesParser(ToolParser):
    def _parse(self) -> Step[None]:
        while (yield from self._pass_until(TOOL_OPEN, "content")):
            is_object = (yield from self._next_character()) == "{"
            if not (is_object and (yield from self._object_call())):
                self._as_content()
                continue
            yield from self._skip(TOOL_CLOSE)
            self._end_call()


class Llama3JsonParser(ToolParser):
    """Parses calls in Llama 3's form. Without <|python_tag|> a call must be at the beginning of the answer."""

    def _parse(self) -> Step[None]:
        if (yield from self._next_character()) == "{":
            yield from self._object_calls(";")
        else:
            self._pos = 0
        while (yield from self._pass_until(PYTHON_TAG, "content")):
            yield from self._object_calls(";")


class MistralParser(ToolParser):
    def _parse(self) -> Step[None]:
        while (yield from self._pass_until(TOOL_CALLS, "content")):
            if (yield from self._next_character()) == "[":
                self._pos += 1
                yield from self._list()
            else:
                yield from self._named_call()

    def _list(self) -> Step[None]:
        """Read a list of calls, after its bracket. The first that is none is content, and the rest with it."""
        if (yield from self._object_calls(",")):
            yield from self._skip("]")
            self._end_call()

    def _named_call(self) -> Step[None]:
        name = yield from self._name()
        if name is None or not (yield from self._arguments_call(name)):
            self._as_content()
            return
        self._end_call()

    def _name(self) -> Step[str | None]:
        """Return the name before an object of arguments, which begins at _pos then; None if no such name follows."""
        start = self._pos
        while True:
            match = _NOT_IN_NAME.search(self._text, start)
            end = len(self._text) if match is None else match.start()
            if match is not None or self._is_final or end - start > MAX_TOOL_NAME_CHARS:
                break
            yield
        if match is None or match[0] != "{" or end - start > MAX_TOOL_NAME_CHARS:
            return None
        named = _NAME.fullmatch(self._text, start, end)
        if named is None:
            return None
        self._pos = end
        return named["name"]


_TOOL_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


class AnswerParser:
    """Parses one answer: reasoning first, then tool calls.

    Args:
        is_parallel: whether to keep every call, not only the first.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, is_parallel: bool = True
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._is_parallel = is_parallel
        self._only_call: int | None = None

    @classmethod
    def of(cls, chat_format: ChatFormat, options: ChatOptions, prompt_end: str) -> AnswerParser:
        """Return a new parser for one answer.

        Args:
            prompt_end: last characters of the prompt, markers included, which show whether
                reasoning is open.
        """
        reasoning = tools = None
        if chat_format.reasoning_parser is not None:
            is_inside = reasoning_at(chat_format.reasoning_parser, prompt_end) == "inside"
            reasoning = ReasoningParser(is_inside)
        if options.has_tools and chat_format.tool_parser is not None:
            tools = _TOOL_PARSERS[chat_format.tool_parser](options.callable_names)
        return cls(reasoning, tools, options.parallel_tool_calls)

    def feed(self, text: str) -> list[ChatEvent]:
        """Return the events that are certain after a further piece of the text."""
        events = (
            [ChatEvent("content", text)] if self._reasoning is None else self._reasoning.feed(text)
        )
        return list(self._allowed(self._with_calls(events)))

    def end(self) -> list[ChatEvent]:
        """Return the remaining events, once the text is whole."""
        events = self._with_calls([] if self._reasoning is None else self._reasoning.end())
        if self._tools is not None:
            events += self._tools.end()
        return list(self._allowed(events))

    def _with_calls(self, events: list[ChatEvent]) -> list[ChatEvent]:
        if self._tools is None:
            return events
        parts = [
            self._tools.feed(event.text) if event.kind == "content" else [event] for event in events
        ]
        return [event for part in parts for event in part]

    def _allowed(self, events: Iterable[ChatEvent]) -> Iterable[ChatEvent]:
        for event in events:
            if (
                self._is_parallel
                or event.kind in ("content", "reasoning")
                or self._is_only_call(event)
            ):
                yield event

    def _is_only_call(self, event: ChatEvent) -> bool:
        if self._only_call is None:
            self._only_call = event.index
        is_only = event.index == self._only_call
        if is_only and event.kind == "broken":
            self._only_call = None
        return is_only


def parse_answer(text: str, parser: AnswerParser) -> Answer:
    """Return the content, reasoning and tool calls of a whole text."""
    return answer_of([*parser.feed(text), *parser.end()])
