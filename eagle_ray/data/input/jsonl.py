"""Rows of a JSONL file: one JSON object a line. A line that is none is one bad row.

Memory is bounded by a line. Does not know shards or what the columns mean.

    >>> list(rows_in_jsonl(io.BytesIO(b'{"prompt": "Hi"}\n'), "a.jsonl"))
    [(0, 0, {'prompt': 'Hi'})]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from eagle_ray.data.input.row import Row
from eagle_ray.errors import RequestError


def rows_in_jsonl(stream: BinaryIO, path: str, start: int = 0, index: int = 0) -> Iterator[tuple[int, int, Row]]:
    """Byte offset, line number and columns of every line from byte `start` on, where line `index` begins.

    Blank lines are no rows, but are counted.
    """
    stream.seek(start)
    for number, line in enumerate(stream, index):
        if line.strip():
            yield start, number, _parsed(line)
        start += len(line)


def _parsed(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except UnicodeError as error:
        return RequestError("bad_encoding", f"the line is not UTF-8 text ({error}): write it as UTF-8")
    except (ValueError, RecursionError) as error:
        return RequestError("bad_json", f"the line is not JSON ({error}): write one object a line")
    if not isinstance(row, dict):
        return RequestError("bad_json", f"the line holds a {type(row).__name__}: write one object a line")
    return row
