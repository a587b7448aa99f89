"""Check the messages of a conversation, and convert them for chat templates.

A message holds a text, text parts (``[{"type": "text", "text": "Hi"}]``) or, if its role is
assistant, ``tool_calls`` without a text. Its other keys go to the template. Messages are stored as
the row has them, without nulls. A template gets each content as one text, and the arguments of a
tool call as an object, as transformers documents. OpenAI's format has the arguments as JSON text.

    >>> parse_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "messages")
    '[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]'
    >>> template_messages(_)
    [{'role': 'user', 'content': 'Hi'}]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.values import (
    AnyObject,
    CallArguments,
    Either,
    ListOf,
    Object,
    OneOf,
    Text,
    WrongValue,
    describe_value,
    json_error,
    json_text,
)
from eagle_ray.text.chat_format import template_message
from eagle_ray.text.strict_json import HalfSurrogate, parse_json, place_text

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}
_CONTENT = Text(can_be_empty=True)
TEXT_PART = Object(
    "TextPart",
    {
        "type": OneOf(("text",)),
        "text": _CONTENT,
        "cache_control": AnyObject(form="a hint of other systems, not read"),
    },
    required=("type", "text"),
)
CALLED_FUNCTION = Object(
    "CalledFunction",
    {"name": _CONTENT, "arguments": Either((CallArguments(), AnyObject()))},
    required=("name",),
    is_open=True,
)
CALLED_TOOL = Object(
    "CalledTool",
    {"id": _CONTENT, "type": OneOf(("function",)), "function": CALLED_FUNCTION},
    required=("function",),
    defaults={"type": "function"},
    is_open=True,
    about="A tool call of an earlier answer.",
)
CALLED_TOOLS = ListOf(
    CALLED_TOOL, form='a list of {"id", "type": "function", "function": {"name", "arguments"}}'
)
MESSAGE = Object(
    "Message",
    {
        "role": OneOf(CHAT_ROLES),
        "content": Either((_CONTENT, ListOf(TEXT_PART))),
        "tool_calls": CALLED_TOOLS,
    },
    required=("role",),
    is_open=True,
    about="A message. Other keys go to the chat template, as in jobs, unless a text cannot hold them.",
)
# Keys of a message.
KEYS_WITHOUT_TEXT: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
    "refusal": ("",),
}
TEXT_PART_FORM = '{"type": "text", "text": "..."}, the only kind of part that is read'
Steps = tuple[str | int, ...]
_MESSAGES_START = re.compile(r'\s*\[\s*\{.*"(role|content)"\s*:', re.DOTALL)


class WrongMessage(WrongValue):
    """A list of messages has a wrong part.

    Args:
        code: code of a row's error.
    """

    def __init__(self, code: str, form: str, value: Any, steps: Steps, problem: str | None = None):
        super().__init__(form, value, steps)
        self.code, self.is_unsupported = code, code == "unsupported_parameter"
        self.problem: str = (
            f" must be {form}, got {describe_value(value)}" if problem is None else problem
        )

    def place(self, name: str) -> str:
        """Return where the wrong part is, such as messages[0].content, in a list of this name."""
        return place_text((name, *self.steps))


def check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages without nulls. A content that is null stays.

    Parquet stores a null for every absent key. Raises WrongMessage that locates the first wrong
    part.
    """
    return [_checked_message(message, (i,)) for i, message in enumerate(messages)]


@dataclass(frozen=True)
class Messages(ListOf):
    """A list of at least one message. A wrong message raises WrongMessage."""

    def check(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < self.min_items:
            raise self.wrong(value)
        return check_messages(value)


MESSAGES = Messages(MESSAGE, min_items=1, form="a list of messages {role, content}")


def parse_messages(value: Any, column: str) -> str:
    """Return a row's messages as JSON text. Raises RequestError that names the wrong message.

    A text that does not begin like a JSON list of messages becomes one message of the user.

    Args:
        value: list of messages, or a text.
        column: name of the column, for the error.
    """
    if isinstance(value, str):
        value = _messages_in(value, column)
    if not isinstance(value, list):
        raise RequestError(
            "bad_type",
            f"column {column!r} must be a list of messages or a text, got {describe_value(value)}",
        )
    if not value:
        raise RequestError("prompt_empty", f"column {column!r} holds no message: give at least one")
    try:
        messages = check_messages(value)
    except WrongMessage as error:
        raise RequestError(error.code, f"{error.place(column)}{error.problem}") from None
    return json_text(f"column {column!r}", messages)


def template_messages(messages: str) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates.

    Args:
        messages: JSON text that `parse_messages` returned.
    """
    return [template_message(message) for message in json.loads(messages)]


def _messages_in(text: str, column: str) -> Any:
    if not text:
        raise RequestError(
            "prompt_empty", f"column {column!r} is an empty text: write a prompt, or drop the row"
        )
    if not _MESSAGES_START.match(text[:4096]):
        return [{"role": "user", "content": text}]
    try:
        return parse_json(text)
    except HalfSurrogate as error:
        raise json_error(f"column {column!r}", error) from None
    except ValueError as error:
        raise RequestError(
            "bad_json", f"column {column!r} begins like messages but is not JSON: {error}"
        ) from None


def _checked_message(message: Any, at: Steps) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise WrongMessage("bad_type", "an object with role and content", message, at)
    role = message.get("role")
    content = message.get("content")
    if role not in CHAT_ROLES:
        form = ", ".join(CHAT_ROLES)
        raise WrongMessage(
            "bad_role", form, role, (*at, "role"), f" must be {form}; got {describe_value(role)}"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    for name, values in KEYS_WITHOUT_TEXT.items():
        if name in checked and checked[name] not in values:
            problem = " is not supported: this system reads and writes text alone; leave it out"
            raise WrongMessage(
                "unsupported_parameter", "absent", checked[name], (*at, name), problem
            )

    if "tool_calls" in checked:
        here = (*at, "tool_calls")
        calls = _checked_calls(checked["tool_calls"], here)
        if calls and role != "assistant":
            problem = f": only of the assistant, not of role {role}"
            raise WrongMessage("bad_type", "absent", calls, here, problem)
        checked["tool_calls"] = calls

    if isinstance(content, list):
        parts = [_text_part(part, (*at, "content", i)) for i, part in enumerate(content)]
        return checked | {"content": parts}
    if content is None and checked.get("tool_calls"):
        return checked | ({"content": None} if "content" in message else {})
    if not isinstance(content, str):
        raise WrongMessage("bad_type", "a text", content, (*at, "content"))
    return checked


def _checked_calls(calls: Any, at: Steps) -> list[Any]:
    try:
        return CALLED_TOOLS.check(calls)
    except WrongValue as error:
        if error.reason is not None:
            problem = f": {error.reason}"
            raise WrongMessage(
                "bad_encoding", error.form, error.value, (*at, *error.steps), problem
            ) from None
        subject = ": tool_calls" if error.steps else ""
        problem = f"{subject} must be {error.form}, got {describe_value(error.value)}"
        raise WrongMessage(
            "bad_type", error.form, error.value, (*at, *error.steps), problem
        ) from None


def _text_part(part: Any, at: Steps) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in MEDIA:
        problem = (
            f": {MEDIA[kind]} ({kind}) are not supported: this engine reads text only. Leave the part out, or "
            "describe it in a text."
        )
        raise WrongMessage("unsupported_parameter", TEXT_PART_FORM, part, at, problem)
    try:
        return TEXT_PART.check(part)
    except WrongValue:
        raise WrongMessage("unsupported_parameter", TEXT_PART_FORM, part, at) from None
