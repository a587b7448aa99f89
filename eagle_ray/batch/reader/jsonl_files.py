"""Rows of JSONL files, plain or of an OpenAI batch.

A JSONL file has one JSON object per line. Any other line is one bad row, and memory is bounded by a
line. An incomplete last line without a line end is a CutLine: another process may be appending to
the file.

    >>> from io import BytesIO
    >>> list(rows_in_jsonl(BytesIO(b'{"prompt": "Hi"}\\n'), "a.jsonl"))
    [(0, RowPosition(row=0, line=1), {'prompt': 'Hi'})]
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from eagle_ray.batch.reader.files import InputFile
from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import BYTE_ORDER_MARK
from eagle_ray.requests.batch_lines import LINE_KEYS, parse_batch_line
from eagle_ray.requests.columns import FIRST, PROMPTS, RowPosition
from eagle_ray.requests.request import InputRow, with_checked_texts
from eagle_ray.storage.store import StorageError
from eagle_ray.text.strict_json import HalfSurrogate, parse_json, parse_json_line

JSON_NAMES = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
log = logging.getLogger("eagle_ray")


class CutLine(RequestError):
    """Marks an incomplete last line without a line end. Another process may be appending the rest to the file."""


class ZeroBytes(CutLine):
    """Marks an incomplete last line that ends in zero bytes, for example after a crash. Nothing may
    be appended to it."""

    def __init__(self, num_bytes: int):
        super().__init__(
            "bad_encoding",
            f"{num_bytes:,} zero bytes stand at the end of the file, as a crash leaves them",
        )


def rows_in_jsonl(
    stream: BinaryIO, path: str, start: int = 0, start_position: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of each line from byte `start` on, whose position is start_position.

    Blank lines are not rows, but are counted.
    """
    stream.seek(start)
    assert start_position.line is not None, "lines of text are counted"
    for i, line in enumerate(stream):
        position = RowPosition(start_position.row + i, start_position.line + i)
        text = line.rstrip(b"\0") if is_cut(line) else line
        num_zeros = len(line) - len(text)
        if text.strip():
            row = parse_line(text)
            if is_cut(line) and isinstance(row, RequestError) and not is_json(text):
                row = ZeroBytes(num_zeros) if num_zeros else CutLine(row.code, str(row))
            yield start, position, row
        elif num_zeros:
            yield start, position, ZeroBytes(num_zeros)
        start += len(line)


def rows_in_batch(
    stream: BinaryIO, path: str, start: int = 0, at: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of each line of an OpenAI batch file; arguments as for rows_in_jsonl."""
    return (
        (offset, at, parse_batch_line(line))
        for offset, at, line in rows_in_jsonl(stream, path, start, at)
    )


def detect_batch(file: InputFile) -> InputFile:
    """Return the file with the format openai_batch if its lines are batch requests, else unchanged.

    An unreadable file is returned unchanged: the scan reports the error.
    """
    if file.format != "jsonl" or not _holds_requests(file):
        return file
    log.info(
        "input.path: %s is read as an OpenAI batch file. Set input.format to jsonl to read plain rows.",
        file.path,
    )
    return replace(file, format="openai_batch")


def _holds_requests(file: InputFile) -> bool:
    try:
        with file.detect_changes(), file.open() as stream:
            return _are_requests(stream)
    except StorageError:
        raise
    except OSError:
        return False


def _are_requests(lines: Iterable[bytes]) -> bool:
    """Return whether lines are requests of a batch: by the first line that is a request, or else a row with a prompt.

    A wrong line is neither, so any number of them may come first. If every line is wrong, keys of a
    request decide.
    """
    resemble = False
    for line in lines:
        row = _object_in(line)
        has_body = {"custom_id", "url", "body"} <= row.keys() and isinstance(row["body"], dict)
        if has_body and row.keys() <= LINE_KEYS:
            return True
        has_prompt = any(row.get(name) is not None for name in PROMPTS)
        if has_prompt and not has_body:
            return False
        resemble |= not has_prompt and "custom_id" in row and ("url" in row or "body" in row)
    return resemble


def _object_in(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line, or an empty one if the line is none."""
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def is_cut(line: bytes) -> bool:
    """Return whether a line is a file's last one and has no line end."""
    return not line.endswith(b"\n")


def is_json(line: bytes) -> bool:
    """Return whether a line is valid JSON of any type and depth."""
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def parse_line(line: bytes) -> InputRow:
    """Return the columns of a line, or the error that makes it a bad row."""
    try:
        text = line.rstrip().decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeError as error:
        return RequestError(
            "bad_encoding", f"the line is not UTF-8 text ({error}): write it as UTF-8"
        )
    try:
        row = parse_json_line(text)  # behind a line break, errors are at its first character
    except HalfSurrogate as error:
        row = json.loads(text)
        return (
            with_checked_texts(row)
            if isinstance(row, dict)
            else RequestError("bad_encoding", f"the line: {error}")
        )
    except json.JSONDecodeError as error:  # its own words call every line the first
        problem = f"{error.msg}: character {error.colno}"
        return RequestError("bad_json", f"the line is not JSON ({problem}): {_fix_of(text)}")
    except ValueError as error:
        return RequestError("bad_json", f"the line is not JSON ({error}): write one object a line")
    if not isinstance(row, dict):
        return RequestError(
            "bad_json", f"the line holds {JSON_NAMES[type(row)]}: write one object a line"
        )
    return row


def _fix_of(text: str) -> str:
    if (num_zeros := text.count("\0")) > 0:
        return f"it holds {num_zeros:,} zero bytes, as a crash leaves them: remove them with tr -d '\\000'"
    if "\r" in text:
        return "it holds carriage returns without line feeds: end lines in line feeds, as tr '\\r' '\\n' does"
    return "write one object a line"
