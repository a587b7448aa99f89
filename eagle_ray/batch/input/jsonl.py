"""Rows of a JSONL file: one JSON object a line. A line that is none is one bad row.

Memory is bounded by a line. A last line without a line end that is not JSON is a CutLine: the file may be one that
another process appends to.

    >>> list(rows_in_jsonl(io.BytesIO(b'{"prompt": "Hi"}\n'), "a.jsonl"))
    [(0, At(row=0, line=1), {'prompt': 'Hi'})]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from eagle_ray.batch.input.request import InputRow, with_checked_texts
from eagle_ray.batch.input.row_location import FIRST, RowPosition
from eagle_ray.errors import RequestError
from eagle_ray.strict_json import HalfSurrogate, parse_json_line

BYTE_ORDER_MARK = "\ufeff"


class CutLine(RequestError):
    """A last line that has no line end and is not whole. Another process may be appending the rest to the file."""


def rows_in_jsonl(
    stream: BinaryIO, path: str, start: int = 0, start_position: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of every line from byte `start` on, which is at position `at`.

    Blank lines are not rows, but are counted.
    """
    stream.seek(start)
    for i, line in enumerate(stream):
        position = RowPosition(start_position.row + i, start_position.line + i)
        if line.strip():
            row = _parse_line(line)
            if is_cut(line) and isinstance(row, RequestError) and not is_json(line):
                row = CutLine(row.code, str(row))
            yield start, position, row
        start += len(line)


def is_cut(line: bytes) -> bool:
    """Return whether a line is a file's last one and has no line end."""
    return not line.endswith(b"\n")


def is_json(line: bytes) -> bool:
    """Return whether a line is JSON of any kind, however deep."""
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _parse_line(line: bytes) -> InputRow:
    try:
        text = line.rstrip().decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeError as error:
        return RequestError("bad_encoding", f"the line is not UTF-8 text ({error}): write it as UTF-8")
    try:
        row = parse_json_line(text)  # behind a line break, errors are at its first character
    except HalfSurrogate as error:
        row = json.loads(text)
        return with_checked_texts(row) if isinstance(row, dict) else RequestError("bad_encoding", f"the line: {error}")
    except json.JSONDecodeError as error:  # its own words call every line the first
        problem = f"{error.msg}: character {error.colno}"
        return RequestError("bad_json", f"the line is not JSON ({problem}): write one object a line")
    except ValueError as error:
        return RequestError("bad_json", f"the line is not JSON ({error}): write one object a line")
    if not isinstance(row, dict):
        return RequestError("bad_json", f"the line holds a {type(row).__name__}: write one object a line")
    return row
