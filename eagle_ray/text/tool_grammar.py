"""The grammar of answers that must call a tool, or whose calls of strict tools must fit their schemas.

It is in llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), and what it allows is
what the parser of the form reads:

    tool_grammar(ChatOptions.of({"tools": [add], "tool_choice": "required"}), "llama3_json", {})
    # start: SPACE answer
    # calls: "<|python_tag|>"? call ("; " call)*
    # call: object_0
    # object_0: "{\\"name\\": \\"add\\", \\"parameters\\": " %json {"type": "object", ...} "}"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.sampling_limits import check_schema
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.reasoning_parser import CLOSE, OPEN, ReasoningStart
from eagle_ray.text.tool_forms import ARGS, PYTHON_TAG, TOOL_CALLS, TOOL_CLOSE, TOOL_OPEN

Tool = dict[str, Any]
JSON_OPTIONS = {"whitespace_pattern": " ?"}  # a model may write white space without an end
_NO_OBJECT = r"/[^{\s](.|\n)*/"  # a text that does not begin like a call


def needs_grammar(options: ChatOptions) -> bool:
    """Return whether answers must be held to the grammar."""
    return options.must_call or options.has_strict_tools


def tool_grammar(
    options: ChatOptions, form: str, special_ids: Mapping[str, int], reasoning: ReasoningStart = "none"
) -> str:
    """Return the grammar of an answer.

    A text never holds special tokens, so markers that are such tokens stand in the grammar by their ids.

    Args:
        form: one of TOOL_PARSERS.
        special_ids: token ids of the markers that are special tokens.
        reasoning: whether the answer begins with free reasoning: none, inside (the prompt has opened it), or optional
            (it may open it).
    """
    writer = _FORMS[form](options, special_ids)
    rules = writer.calls()
    rules |= {"answer": "calls"} if options.must_call else writer.free()
    start = "SPACE answer"
    if reasoning != "none":
        rules |= _until("reasoning", CLOSE, special_ids)
        opened = f"(SPACE {_written(OPEN, special_ids)} reasoning)?" if reasoning == "optional" else "reasoning"
        start = f"{opened} {start}"
    terminals = {"TEXT": r"/(.|\n)*/", "NO_OBJECT": _NO_OBJECT, "SPACE": r"/\n{0,2}/"}
    return "\n".join(f"{name}: {body}" for name, body in ({"start": start} | rules | terminals).items())


class _HermesWriter:
    def __init__(self, options: ChatOptions, special_ids: Mapping[str, int]):
        self._options, self._special_ids = options, special_ids

    def calls(self) -> dict[str, str]:
        more = r' ("\n" call)*' if self._options.parallel_tool_calls else ""
        return {"calls": f"call{more}", "call": f"{self._marker(TOOL_OPEN)} rest"} | self._rest()

    def free(self) -> dict[str, str]:
        begin = _until("until_call", TOOL_OPEN, self._special_ids)
        number = "*" if self._options.parallel_tool_calls else "?"
        return begin | {"answer": f"(until_call rest){number} TEXT"}

    def _rest(self) -> dict[str, str]:
        """Return the rules of what follows the opening marker."""
        close = f'"\\n" {self._marker(TOOL_CLOSE)}'
        tools = _callable(self._options)
        objects = {f"object_{i}": _object(tool, "arguments") for i, tool in enumerate(tools)}
        return {"rest": f'"\\n" ({" | ".join(objects)}) {close}', **objects}

    def _marker(self, marker: str) -> str:
        return _written(marker, self._special_ids)


class _Llama3JsonWriter:
    def __init__(self, options: ChatOptions, special_ids: Mapping[str, int]):
        self._options, self._special_ids = options, special_ids

    def calls(self) -> dict[str, str]:
        objects = {f"object_{i}": _object(tool, "parameters") for i, tool in enumerate(_callable(self._options))}
        more = ' ("; " call)*' if self._options.parallel_tool_calls else ""
        tag = _written(PYTHON_TAG, self._special_ids)
        return {"calls": f"{tag}? call{more}", "call": " | ".join(objects), **objects}

    def free(self) -> dict[str, str]:
        return {"answer": 'calls | NO_OBJECT | ""'}


class _MistralWriter:
    """Calls in a list, or each after its name: the target chooses."""

    def __init__(self, options: ChatOptions, special_ids: Mapping[str, int]):
        self._options, self._special_ids = options, special_ids

    def calls(self) -> dict[str, str]:
        begin = _written(TOOL_CALLS, self._special_ids)
        return {"calls": f"{begin} rest"} | self._rest()

    def free(self) -> dict[str, str]:
        return _until("until_call", TOOL_CALLS, self._special_ids) | {"answer": "until_call rest | TEXT"}

    def _rest(self) -> dict[str, str]:
        tools = _callable(self._options)
        objects = {f"object_{i}": _object(tool, "arguments") for i, tool in enumerate(tools)}
        args = _written(ARGS, self._special_ids)
        named = {f"named_{i}": f"{_literal(_name(tool))} {args}? {_arguments(tool)}" for i, tool in enumerate(tools)}
        begin = _written(TOOL_CALLS, self._special_ids)
        is_parallel = self._options.parallel_tool_calls
        more_objects = ' (", " object)*' if is_parallel else ""
        more_named = f" ({begin} named)*" if is_parallel else ""
        return {
            "rest": f'"[" object{more_objects} "]" | named{more_named}',
            "object": " | ".join(objects),
            "named": " | ".join(named),
            **objects,
            **named,
        }


class _FormWriter(Protocol):
    """Writes the rules of one form."""

    def calls(self) -> dict[str, str]:
        """Return the rule `calls`, of an answer that is calls alone, and the rules that it needs."""

    def free(self) -> dict[str, str]:
        """Return the rule `answer`, of an answer that may call or not, and the rules that only it needs."""


_FORMS: dict[str, Callable[[ChatOptions, Mapping[str, int]], _FormWriter]] = {
    "hermes": _HermesWriter,
    "llama3_json": _Llama3JsonWriter,
    "mistral": _MistralWriter,
}


def _callable(options: ChatOptions) -> list[Tool]:
    names = frozenset(options.callable_names)
    return [tool for tool in options.tools if _name(tool) in names]


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _object(tool: Tool, key: str) -> str:
    """Return the rule of a call as an object, written as templates show it."""
    head = f'{{"name": {json.dumps(_name(tool))}, "{key}": '
    return f'{_literal(head)} {_arguments(tool)} "}}"'


def _arguments(tool: Tool) -> str:
    """Return the rule of a tool's arguments: an object that fits its schema, if it has one."""
    parameters = tool["function"].get("parameters") or {}
    try:
        check_schema(parameters)
    except ValueError as error:
        raise RequestError("bad_grammar", f"tools: the parameters of {_name(tool)!r}: {error}") from None
    schema = {"type": "object"} | parameters | {"x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _until(rule: str, marker: str, special_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the rule of a free text up to and with the first marker."""
    if marker in special_ids:
        return {rule: f"TEXT {_written(marker, special_ids)}"}
    return {f"{rule}[lazy]": f"TEXT {_literal(marker)}"}


def _written(marker: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[marker]}]>" if marker in special_ids else _literal(marker)


def _literal(text: str) -> str:
    return json.dumps(text)
