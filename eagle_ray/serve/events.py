"""Server-sent events as OpenAI's streams have them.

>>> event({"choices": []})
'data: {"choices":[]}\\n\\n'
"""

from __future__ import annotations

import json
from typing import Any

from eagle_ray.serve.errors import ApiError

DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_event(error: ApiError) -> str:
    """What a stream ends with that cannot go on."""
    return event(error.body())
