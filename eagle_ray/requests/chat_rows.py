"""What a row's chat columns make: options for the chat template.

>>> chat_options_of(row, config)
ChatOptions(tools=(...), tool_choice='auto', ...)
"""

from __future__ import annotations

import json
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.row_schema import CHAT_FIELDS
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions

JSON_COLUMNS = ("tools", "tool_choice", "chat_template_kwargs")


def is_chat(row: dict[str, Any]) -> bool:
    """Return whether the row's prompt goes through the chat template."""
    return row["messages"] is not None or row.get("user_turns") is not None


def chat_options_of(row: dict[str, Any], config: JobConfig) -> ChatOptions:
    """Return the options in force for a row: its own, then the job's. Raises RequestError."""
    own = {field.name: row.get(field.name) for field in CHAT_FIELDS}
    own |= {name: json.loads(own[name]) for name in JSON_COLUMNS if own[name] is not None}
    try:
        options = config.chat.options(own)
    except ValueError as error:
        raise RequestError("invalid_chat", str(error)) from None
    if is_chat(row):
        return options
    if options.has_tools:
        raise RequestError("invalid_chat", "tools: only with messages. Leave tools out of rows with other prompts")
    return NO_OPTIONS
