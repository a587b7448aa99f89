"""ChatOptions: a chat request's tools, tool choice and values for the template.

    >>> ChatOptions.of({"tools": [{"type": "function", "function": {"name": "add"}}]}).callable_names
    ('add',)
    >>> ChatOptions.of({"tool_choice": "required"})
    Traceback (most recent call last):
    ...
    ValueError: tool_choice: 'required' needs tools: give tools, or leave tool_choice out

Answers that must call a tool, or whose calls of strict tools must fit their schemas, are
constrained by a grammar. It is written in llguidance's Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), and allows exactly what the
parser of the form reads:

    >>> add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    >>> print(tool_grammar(ChatOptions.of({"tools": [add], "tool_choice": "required"}), "llama3_json", {}))
    start: SPACE answer
    calls: "<|python_tag|>"? call ("; " call)*
    call: object_0
    object_0: "{\\"name\\": \\"add\\", \\"parameters\\": " %json {"type": "object", ...} "}"
    ...
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.text.chat_format import (
    ARGS,
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALLS,
    TOOL_CLOSE,
    TOOL_OPEN,
    ReasoningStart,
)
from eagle_ray.text.structured import check_schema

MODES = ("none", "auto", "required")
MAX_TOOLS = 1024  # eight times OpenAI's bound
TOOLS_FORM = 'a list of tools {"type": "function", "function": {"name", "description", "parameters", "strict"}}'
CHOICE_FORM = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
KWARGS_FORM = "an object of names and values that the chat template reads, such as enable_thinking"
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# Arguments of transformers' apply_chat_template, and of what it calls, that are not the template's.
_NOT_KWARGS = frozenset(
    [
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    ]
)
Tool = dict[str, Any]
_JSON_OPTIONS = {"whitespace_pattern": " ?"}  # a model may write white space without an end
_NO_OBJECT = r"/[^{\s](.|\n)*/"  # a text that does not begin like a call


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of one request.

    Attributes:
        tools: tools for the template; empty if tool_choice is none.
        tool_choice: auto, none, required or named.
        named: name of the tool that must be called, if tool_choice is named.
        parallel_tool_calls: whether an answer may have several calls; otherwise the first is kept.
        template_kwargs: further values for the chat template.
    """

    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    named: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ChatOptions:
        """Build the options from a request's values; absent and null ones are off.

        Raises ValueError that begins with the name of the wrong value.
        """
        tools = check_tools(values.get("tools"))
        choice, named = _choice_of(values.get("tool_choice"), tools)
        is_parallel = values.get("parallel_tool_calls")
        if not isinstance(is_parallel, bool | None):
            raise ValueError(
                f"parallel_tool_calls: must be true or false, got {reprlib.repr(is_parallel)}"
            )
        kwargs = check_template_kwargs(values.get("chat_template_kwargs"))
        used = () if choice == "none" else tuple(tools)
        return cls(used, choice, named, is_parallel is not False, kwargs)

    @property
    def has_tools(self) -> bool:
        return bool(self.tools)

    @property
    def callable_names(self) -> tuple[str, ...]:
        """Return the names of the tools that an answer may call."""
        return (
            (self.named,)
            if self.named is not None
            else tuple(tool["function"]["name"] for tool in self.tools)
        )

    @property
    def has_strict_tools(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call."""
        return self.named is not None or self.tool_choice == "required"


NO_OPTIONS = ChatOptions()


def check_tools(value: Any) -> list[dict[str, Any]]:
    """Check and return the tools, an empty list for null. Raises ValueError naming the location of
    the first wrong one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tools: must be {TOOLS_FORM}, got {reprlib.repr(value)}")
    if len(value) > MAX_TOOLS:
        raise ValueError(
            f"tools: must be at most {MAX_TOOLS} tools, got {len(value)}. Leave some out"
        )
    seen: set[str] = set()
    for i, tool in enumerate(value):
        name = _checked_name(tool, f"tools[{i}]")
        if name in seen:
            raise ValueError(
                f"tools: {name!r} is the name of two tools. Give each tool a name of its own"
            )
        seen.add(name)
    return value


def _checked_name(tool: Any, where: str) -> str:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise ValueError(
            f'{where}: must be {{"type": "function", "function": {{...}}}}, got {reprlib.repr(tool)}'
        )
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ValueError(
            f"{where}.function.name: must be 1 to 64 letters, digits, dots, hyphens or underscores, got "
            f"{reprlib.repr(name)}"
        )
    for key, type_, form in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema, an object"),
    ):
        if not isinstance(function.get(key), type_ | None):
            raise ValueError(
                f"{where}.function.{key}: must be {form}, got {reprlib.repr(function[key])}"
            )
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(
            f"{where}.function.strict: must be true or false, got {reprlib.repr(function['strict'])}"
        )
    return name


def _choice_of(value: Any, tools: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Return the mode, and the tool that must be called if there is one."""
    named = _named_in(value)
    if named is None and value is not None and value not in MODES:
        raise ValueError(f"tool_choice: must be {CHOICE_FORM}, got {reprlib.repr(value)}")
    if value in (None, "auto", "none"):
        return value or "auto", None
    if not tools:
        shown = repr(value) if named is None else repr(named)
        raise ValueError(f"tool_choice: {shown} needs tools: give tools, or leave tool_choice out")
    if named is None:
        return "required", None
    names = [tool["function"]["name"] for tool in tools]
    if named not in names:
        raise ValueError(
            f"tool_choice: there is no tool {named!r}. Name one of tools: {', '.join(names)}"
        )
    return "named", named


def _named_in(value: Any) -> str | None:
    function = (
        value.get("function")
        if isinstance(value, dict) and value.get("type") == "function"
        else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Check and return the values for the template, empty for null. Raises ValueError naming a wrong one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and name.isidentifier() for name in value
    ):
        raise ValueError(f"chat_template_kwargs: must be {KWARGS_FORM}, got {reprlib.repr(value)}")
    if taken := sorted(_NOT_KWARGS & value.keys()):
        raise ValueError(
            f"chat_template_kwargs: {taken[0]!r} is not a value of the template. Leave it out"
        )
    return value


def needs_grammar(options: ChatOptions) -> bool:
    """Return whether answers with these options must be constrained by the tools' grammar."""
    return options.must_call or options.has_strict_tools


def tool_grammar(
    options: ChatOptions,
    form: str,
    special_ids: Mapping[str, int],
    reasoning: ReasoningStart = "none",
) -> str:
    """Return the grammar that constrains an answer's tool calls.

    Text in a grammar never matches special tokens, so markers that are special tokens are written
    by their ids.

    Args:
        form: one of TOOL_PARSERS.
        special_ids: token ids of the markers that are special tokens.
        reasoning: whether the answer begins with free reasoning: none, inside (the prompt has
            opened it), or optional (it may open it).
    """
    writer = _WRITERS[form](options, special_ids)
    rules = writer.calls()
    rules |= {"answer": "calls"} if options.must_call else writer.free()
    start = "SPACE answer"
    if reasoning != "none":
        rules |= _until("reasoning", THINK_CLOSE, special_ids)
        opened = (
            f"(SPACE {_written(THINK_OPEN, special_ids)} reasoning)?"
            if reasoning == "optional"
            else "reasoning"
        )
        start = f"{opened} {start}"
    terminals = {"TEXT": r"/(.|\n)*/", "NO_OBJECT": _NO_OBJECT, "SPACE": r"/\n{0,2}/"}
    return "\n".join(
        f"{name}: {body}" for name, body in ({"start": start} | rules | terminals).items()
    )


class _FormWriter(ABC):
    """Writes the rules of one form."""

    def __init__(self, options: ChatOptions, special_ids: Mapping[str, int]):
        names = frozenset(options.callable_names)
        self._tools = [tool for tool in options.tools if _name(tool) in names]
        self._is_parallel = options.parallel_tool_calls
        self._special_ids = special_ids

    @abstractmethod
    def calls(self) -> dict[str, str]:
        """Return the rule `calls`, of an answer that is calls alone, and the rules that it needs."""

    @abstractmethod
    def free(self) -> dict[str, str]:
        """Return the rule `answer`, of an answer that may call or not, and the rules that only it needs."""

    def _objects(self, key: str) -> dict[str, str]:
        """Return a rule for each tool: its call as an object."""
        return {f"object_{i}": _object(tool, key) for i, tool in enumerate(self._tools)}

    def _marker(self, marker: str) -> str:
        return _written(marker, self._special_ids)


class _HermesWriter(_FormWriter):
    def calls(self) -> dict[str, str]:
        more = r' ("\n" call)*' if self._is_parallel else ""
        return {"calls": f"call{more}", "call": f"{self._marker(TOOL_OPEN)} rest"} | self._rest()

    def free(self) -> dict[str, str]:
        begin = _until("until_call", TOOL_OPEN, self._special_ids)
        number = "*" if self._is_parallel else "?"
        return begin | {"answer": f"(until_call rest){number} TEXT"}

    def _rest(self) -> dict[str, str]:
        """Return the grammar rules for the text after the opening marker."""
        close = f'"\\n" {self._marker(TOOL_CLOSE)}'
        objects = self._objects("arguments")
        return {"rest": f'"\\n" ({" | ".join(objects)}) {close}', **objects}


class _Llama3JsonWriter(_FormWriter):
    def calls(self) -> dict[str, str]:
        objects = self._objects("parameters")
        more = ' ("; " call)*' if self._is_parallel else ""
        tag = self._marker(PYTHON_TAG)
        return {"calls": f"{tag}? call{more}", "call": " | ".join(objects), **objects}

    def free(self) -> dict[str, str]:
        return {"answer": 'calls | NO_OBJECT | ""'}


class _MistralWriter(_FormWriter):
    """Calls in a list, or each after its name: the target chooses."""

    def calls(self) -> dict[str, str]:
        return {"calls": f"{self._marker(TOOL_CALLS)} rest"} | self._rest()

    def free(self) -> dict[str, str]:
        return _until("until_call", TOOL_CALLS, self._special_ids) | {
            "answer": "until_call rest | TEXT"
        }

    def _rest(self) -> dict[str, str]:
        objects = self._objects("arguments")
        args = self._marker(ARGS)
        named = {
            f"named_{i}": f"{_literal(_name(tool))} {args}? {_arguments(tool)}"
            for i, tool in enumerate(self._tools)
        }
        more_objects = ' (", " object)*' if self._is_parallel else ""
        more_named = f" ({self._marker(TOOL_CALLS)} named)*" if self._is_parallel else ""
        return {
            "rest": f'"[" object{more_objects} "]" | named{more_named}',
            "object": " | ".join(objects),
            "named": " | ".join(named),
            **objects,
            **named,
        }


_WRITERS: dict[str, type[_FormWriter]] = {
    "hermes": _HermesWriter,
    "llama3_json": _Llama3JsonWriter,
    "mistral": _MistralWriter,
}


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _object(tool: Tool, key: str) -> str:
    """Return the rule of a call as an object, written as templates show it."""
    head = f'{{"name": {dump_json(_name(tool))}, "{key}": '
    return f'{_literal(head)} {_arguments(tool)} "}}"'


def _arguments(tool: Tool) -> str:
    """Return the rule of a tool's arguments: an object that fits its schema, if it has one."""
    parameters = tool["function"].get("parameters") or {}
    try:
        check_schema(parameters)
    except ValueError as error:
        raise RequestError(
            "bad_grammar", f"tools: the parameters of {_name(tool)!r}: {error}"
        ) from None
    schema = {"type": "object"} | parameters | {"x-guidance": _JSON_OPTIONS}
    return f"%json {dump_json(schema)}"


def _until(rule: str, marker: str, special_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the rule of a free text up to and with the first marker."""
    if marker in special_ids:
        return {rule: f"TEXT {_written(marker, special_ids)}"}
    return {f"{rule}[lazy]": f"TEXT {_literal(marker)}"}


def _written(marker: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[marker]}]>" if marker in special_ids else _literal(marker)


def _literal(text: str) -> str:
    return dump_json(text)
