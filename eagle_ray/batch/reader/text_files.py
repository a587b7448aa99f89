"""Rows of text files: JSONL, plain or of an OpenAI batch, and CSV.

A JSONL file has one JSON object a line. A line that is none is one bad row, and memory is bounded by a line.

A CSV file (RFC 4180) has a header, then a record a row, whose quoted values may hold newlines. Values are texts and an
empty one is null, but for sampling columns, which are numbers. A record that is not CSV is one bad row of its first
line: reading goes on at the line after it, so that a quote without its end costs one row and not the rest of the file.
Memory is bounded by MAX_RECORD_BYTES.

A last line without a line end that is not whole is a CutLine: the file may be one that another process appends to.
Whether the last value of a CSV record is whole cannot be told.

    >>> from io import BytesIO
    >>> list(rows_in_jsonl(BytesIO(b'{"prompt": "Hi"}\\n'), "a.jsonl"))
    [(0, RowPosition(row=0, line=1), {'prompt': 'Hi'})]
    >>> [row for _, _, row in rows_in_csv(BytesIO(b'id,prompt\\n7,"Hi,\\nyou"\\n'), "a.csv")]
    [{'id': '7', 'prompt': 'Hi,\\nyou'}]
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import pyarrow as pa

from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.input_columns import CSV_TEXT, type_of
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.columns import FIRST, PROMPTS, RowPosition
from eagle_ray.requests.openai_bodies import LINE_KEYS, parse_batch_line
from eagle_ray.requests.request import InputRow, with_checked_texts
from eagle_ray.requests.row_schema import ROW_FIELDS
from eagle_ray.requests.values import json_error
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
MAX_RECORD_BYTES = 64 << 20  # bytes of a record of several lines: a quote that is open for longer was never closed
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")  # not 007, which is a code and not the number 7
FLOAT = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SETTING_TYPES = {field.name: field.type for field in ROW_FIELDS}
log = logging.getLogger("eagle_ray")

BYTE_ORDER_MARK = "\ufeff"


class CutLine(RequestError):
    """A last line that has no line end and is not whole. Another process may be appending the rest to the file."""


class ZeroBytes(CutLine):
    """A last line that is not whole and ends in zero bytes, as a crash leaves them. Nothing is appended to it."""

    def __init__(self, num_bytes: int):
        super().__init__(
            "bad_encoding", f"{num_bytes:,} zero bytes stand at the end of the file, as a crash leaves them"
        )


def rows_in_jsonl(
    stream: BinaryIO, path: str, start: int = 0, start_position: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and columns of every line from byte `start` on, which is at position `at`.

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
    """Yield byte offset, position and columns of every line, as for a JSONL file."""
    return ((offset, at, parse_batch_line(line)) for offset, at, line in rows_in_jsonl(stream, path, start, at))


def detect_batch(file: InputFile) -> InputFile:
    """Return a JSONL file as an OpenAI batch file if its lines are requests of one.

    A file that cannot be read is returned as it is: the scan reports it.
    """
    if file.format != "jsonl" or not _holds_requests(file):
        return file
    log.info("input.path: %s is read as an OpenAI batch file. Set input.format to jsonl to read plain rows.", file.path)
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

    A wrong line is neither, so any number of them may come first. If every line is wrong, keys of a request decide.
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
    """Return the object in a line, or an empty one if there is none."""
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


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


def parse_line(line: bytes) -> InputRow:
    """Return the columns of a line, or what is wrong with it."""
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
        return RequestError("bad_json", f"the line is not JSON ({problem}): {_fix_of(text)}")
    except ValueError as error:
        return RequestError("bad_json", f"the line is not JSON ({error}): write one object a line")
    if not isinstance(row, dict):
        return RequestError("bad_json", f"the line holds {JSON_NAMES[type(row)]}: write one object a line")
    return row


def _fix_of(text: str) -> str:
    if (num_zeros := text.count("\0")) > 0:
        return f"it holds {num_zeros:,} zero bytes, as a crash leaves them: remove them with tr -d '\\000'"
    if "\r" in text:
        return "it holds carriage returns without line feeds: end lines in line feeds, as tr '\\r' '\\n' does"
    return "write one object a line"


def rows_in_csv(
    stream: BinaryIO, path: str, start: int = 0, start_position: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and values of every record from byte `start` on, which is at position `at`; 0: all.

    Blank lines are not rows, but are counted. Raises ConfigError if the header is invalid.
    """
    header, lines = _header(stream, path)
    if start:
        assert start_position.line is not None, "lines of text are counted"
        lines = _Lines(stream, start, start_position.line)
    for index, (offset, line, values) in enumerate(_records(lines), start_position.row):
        is_last = lines.is_cut and lines.number == line + 1
        if not values:
            if is_last and lines.num_zeros:
                yield offset, RowPosition(index, line), ZeroBytes(lines.num_zeros)
            continue
        row = _parse_record(header, values)
        if is_last and _is_part(header, values):
            row = CutLine("bad_csv", "the last line has no line end and is not a whole row")
            row = ZeroBytes(lines.num_zeros) if lines.num_zeros else row
        yield offset, RowPosition(index, line), row


def _is_part(header: list[str], values: list[str] | RequestError) -> bool:
    """Return whether a file's last line can only be a part of a record."""
    if isinstance(values, RequestError) or len(values) < len(header):
        return True
    return "\udc80" <= values[-1][-1:] <= "\udcff"  # a part of a character


def type_of_csv_value(value: Any) -> pa.DataType:
    """Return the type of one value: an integer, a float, a boolean, or CSV_TEXT, which holds any text."""
    if not isinstance(text := value, str):
        return type_of(value)
    if INTEGER.fullmatch(text):
        return pa.int64() if len(text) <= 20 and -(2**63) <= int(text) < 2**63 else CSV_TEXT
    if FLOAT.fullmatch(text):
        return pa.float64()
    return pa.bool_() if text.lower() in ("true", "false") else CSV_TEXT


def _header(stream: BinaryIO, path: str) -> tuple[list[str], _Lines]:
    """Return the column names and the following lines; no names for an empty file."""
    lines = _Lines(stream, 0, 1)
    try:
        names = next(filter(None, csv.reader(lines, strict=True)), [])
        "".join(names).encode()
    except csv.Error as error:
        raise ConfigError(f"cannot read {path} as csv: its first line is not CSV ({error}): write a header") from None
    except UnicodeError:
        raise ConfigError(f"cannot read {path} as csv: its first line is not UTF-8: write the file as UTF-8") from None
    if "" in names and len(names) > 1:
        raise ConfigError(
            f"{path}: column {names.index('') + 1} has no name: name it in the first line, or leave it out "
            "(pandas: index=False)"
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{path} has more than one column {repeated[0]!r}: rename or drop all but one of them")
    return names, lines


def _records(lines: _Lines) -> Iterator[tuple[int, int, list[str] | RequestError]]:
    """Yield byte offset, line number and values of every record, blank ones (no values) included."""
    csv.field_size_limit(sys.maxsize)  # the process's, 128 KiB at first: MAX_RECORD_BYTES bounds ours
    reader = csv.reader(lines, strict=True)
    while True:
        offset, line = lines.begin_record()
        is_bad = False
        values: list[str] | RequestError | None
        try:
            values = next(reader, None)
        except csv.Error as error:
            is_bad = True
            values = RequestError(
                "bad_csv", f"the row is not CSV ({error}): quote its texts, and double quotes in them"
            )
        if values is None:
            return
        yield offset, line, values
        if is_bad:
            lines.return_to_second_line()


class _Lines:
    """A stream's lines for the csv module; bytes that are not UTF-8 become lone surrogates.

    offset, number: place of the next line.
    is_cut: whether the last line that was read has no line end.
    num_zeros: zero bytes that were left out at its end, as a crash leaves them there.
    """

    def __init__(self, stream: BinaryIO, offset: int, number: int):
        self._stream, self.offset, self.number = stream, offset, number
        self.is_cut = False
        self.num_zeros = 0
        self._second_line: int | None = None
        self._stream.seek(offset)
        self.begin_record()

    def begin_record(self) -> tuple[int, int]:
        """Mark the next line as a record's first one; return its offset and number."""
        self._first_line = self.offset, self.number
        self._second_line = None
        return self._first_line

    def return_to_second_line(self) -> None:
        """Go back to the line after the record's first line."""
        assert self._second_line is not None, "the record's first line was read"
        self.offset, self.number = self._second_line, self._first_line[1] + 1
        self._stream.seek(self.offset)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._second_line is not None and self.offset - self._first_line[0] > MAX_RECORD_BYTES:
            raise csv.Error(f"a quote is open for more than {MAX_RECORD_BYTES >> 20} MiB")
        line = self._stream.readline()
        if not line:
            raise StopIteration
        self.is_cut = is_cut(line)
        text = line.removeprefix(codecs.BOM_UTF8) if self.offset == 0 else line
        text = text.rstrip(b"\0") if self.is_cut else text
        self.num_zeros = len(line) - len(text) if self.is_cut else 0
        self.offset, self.number = self.offset + len(line), self.number + 1
        self._second_line = self._second_line or self.offset
        return text.decode("utf-8", "surrogateescape")


def _parse_record(header: list[str], values: list[str] | RequestError) -> InputRow:
    if isinstance(values, RequestError):
        return values
    if len(values) != len(header):
        return RequestError(
            "bad_csv",
            f"the row has {len(values)} values and the first line names {len(header)} columns: give each column one "
            "value, and quote texts that hold commas or newlines",
        )
    return {name: parse_csv_value(name, text) for name, text in zip(header, values, strict=True)}


def parse_csv_value(column: str, text: str) -> Any:
    """Return the text, or null if it is empty; a sampling column's number, or the text if it is not one."""
    try:
        text.encode()
    except UnicodeError:
        return RequestError("bad_encoding", f"column {column!r} is not UTF-8 text: write it as UTF-8")
    if text == "" or column not in _SETTING_TYPES:
        return text or None
    type_ = _SETTING_TYPES[column]
    is_list, is_map = pa.types.is_list(type_), pa.types.is_map(type_)
    try:
        value = parse_json(text if is_list or is_map else text.lower())
    except HalfSurrogate as error:
        return json_error(f"column {column!r}", error)
    except ValueError:
        return text
    wanted = list if is_list else dict if is_map else int | float
    return value if isinstance(value, wanted) else text
