"""ChatOptions: what a chat request has besides messages: tools, which of them to call, and values for the template.

>>> ChatOptions.of({"tools": [{"type": "function", "function": {"name": "add"}}]}).callable_names
('add',)
>>> ChatOptions.of({"tool_choice": "required"})
Traceback (most recent call last):
...
ValueError: tool_choice: 'required' needs tools: give tools, or leave tool_choice out
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of one request.

    Attributes:
        tools: as the template reads them; empty if tool_choice is none.
        tool_choice: auto, none, required or named.
        named: the tool that must be called, if tool_choice is named.
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
        """Return the options that the values of these names make; absent and null ones are off.

        Raises ValueError that begins with the name of the wrong value.
        """
        tools = check_tools(values.get("tools"))
        choice, named = _choice_of(values.get("tool_choice"), tools)
        is_parallel = values.get("parallel_tool_calls")
        if not isinstance(is_parallel, bool | None):
            raise ValueError(f"parallel_tool_calls: must be true or false, got {reprlib.repr(is_parallel)}")
        kwargs = check_template_kwargs(values.get("chat_template_kwargs"))
        used = () if choice == "none" else tuple(tools)
        return cls(used, choice, named, is_parallel is not False, kwargs)

    @property
    def has_tools(self) -> bool:
        return bool(self.tools)

    @property
    def callable_names(self) -> tuple[str, ...]:
        """Return the tools that an answer may call."""
        return (self.named,) if self.named is not None else tuple(tool["function"]["name"] for tool in self.tools)

    @property
    def has_strict_tools(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call."""
        return self.named is not None or self.tool_choice == "required"


NO_OPTIONS = ChatOptions()


def check_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools, none for null. Raises ValueError naming the place of the first wrong one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tools: must be {TOOLS_FORM}, got {reprlib.repr(value)}")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"tools: must be at most {MAX_TOOLS} tools, got {len(value)}. Leave some out")
    seen: set[str] = set()
    for i, tool in enumerate(value):
        name = _checked_name(tool, f"tools[{i}]")
        if name in seen:
            raise ValueError(f"tools: {name!r} is the name of two tools. Give each tool a name of its own")
        seen.add(name)
    return value


def _checked_name(tool: Any, where: str) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ValueError(f'{where}: must be {{"type": "function", "function": {{...}}}}, got {reprlib.repr(tool)}')
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ValueError(
            f"{where}.function.name: must be 1 to 64 letters, digits, dots, hyphens or underscores, got "
            f"{reprlib.repr(name)}"
        )
    for key, type_, form in (("description", str, "a text"), ("parameters", dict, "a JSON schema, an object")):
        if not isinstance(function.get(key), type_ | None):
            raise ValueError(f"{where}.function.{key}: must be {form}, got {reprlib.repr(function[key])}")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"{where}.function.strict: must be true or false, got {reprlib.repr(function['strict'])}")
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
        raise ValueError(f"tool_choice: there is no tool {named!r}. Name one of tools: {', '.join(names)}")
    return "named", named


def _named_in(value: Any) -> str | None:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Return the values for the template, none for null. Raises ValueError naming a wrong one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise ValueError(f"chat_template_kwargs: must be {KWARGS_FORM}, got {reprlib.repr(value)}")
    if taken := sorted(_NOT_KWARGS & value.keys()):
        raise ValueError(f"chat_template_kwargs: {taken[0]!r} is not a value of the template. Leave it out")
    return value
