"""The forms in which models write tool calls, by the names that vLLM has for them.

hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                   Hermes 2, Qwen 2.5, Qwen 3
llama3_json   {"name": "add", "parameters": {"a": 1}}; {...}    or after <|python_tag|>       Llama 3.1, 3.2, 3.3
mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {...}]                     Mistral
              [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]...    or without [ARGS]               Mistral since 2025
"""

from __future__ import annotations

import re

from eagle_ray.text.chat_format import PYTHON_TAG, TOOL_CALLS, TOOL_CLOSE, TOOL_OPEN
from eagle_ray.text.incremental_parser import Step
from eagle_ray.text.tool_parser import ToolParser

_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")
_NOT_IN_NAME = re.compile(r"[^\w.\-\[\]\s]")
MAX_NAME_CHARS = 200  # between [TOOL_CALLS] and its arguments; names of tools have at most 64


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
    """Without the tag, calls are read at the beginning of the answer only."""

    def _parse(self) -> Step[None]:
        if (yield from self._next_character()) == "{":
            yield from self._objects()
        else:
            self._pos = 0
        while (yield from self._pass_until(PYTHON_TAG, "content")):
            yield from self._objects()

    def _objects(self) -> Step[None]:
        """Read calls with semicolons between them. The first that is none is content."""
        while True:
            is_object = (yield from self._next_character()) == "{"
            if not (is_object and (yield from self._object_call())):
                self._as_content()
                return
            self._end_call()
            if not (yield from self._skip(";")):
                return


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
        while True:
            is_object = (yield from self._next_character()) == "{"
            if not (is_object and (yield from self._object_call())):
                self._as_content()
                return
            self._end_call()
            if not (yield from self._skip(",")):
                break
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
            found = _NOT_IN_NAME.search(self._text, start)
            end = len(self._text) if found is None else found.start()
            if found is not None or self._is_final or end - start > MAX_NAME_CHARS:
                break
            yield
        if found is None or found[0] != "{" or end - start > MAX_NAME_CHARS:
            return None
        named = _NAME.fullmatch(self._text, start, end)
        if named is None:
            return None
        self._pos = end
        return named["name"]
