"""Server-sent events as OpenAI's streams have them.

>>> event({"choices": []})
'data: {"choices":[]}\\n\\n'
"""

from __future__ import annotations

from typing import Any

from eagle_ray.serve.http_errors import ApiError
from eagle_ray.serve.json_parts import json_parts

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """Escape the characters at which some clients end a line and that JSON does not escape itself."""
    parts = (part.translate(LINE_ENDS) for part in json_parts(body))
    return f"data: {''.join(parts)}\n\n"


def error_event(error: ApiError) -> str:
    """Return the last event of a stream that failed."""
    return event(error.body())
