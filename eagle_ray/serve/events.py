"""Server-sent events as OpenAI's streams have them.

>>> event({"choices": []})
'data: {"choices":[]}\\n\\n'
"""

from __future__ import annotations

import json
from typing import Any

from eagle_ray.serve.errors import ApiError

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """Without the characters at which some clients end a line, beside those that JSON escapes itself."""
    said = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {said.translate(LINE_ENDS)}\n\n"


def error_event(error: ApiError) -> str:
    """What a stream ends with that cannot go on."""
    return event(error.body())
