"""Read rows of CSV files (RFC 4180): a header, then one record per row. Quoted values may contain newlines.

Values are texts, an empty value is null, and sampling columns are numbers. A malformed record is
one bad row: reading goes on at the line after its first line, so that an unclosed quote costs one
row and not the rest of the file. Memory is bounded by MAX_RECORD_BYTES. If a file does not end with
a line end, its last value may be cut, which cannot be detected.

    >>> from io import BytesIO
    >>> [row for _, _, row in rows_in_csv(BytesIO(b'id,prompt\\n7,"Hi,\\nyou"\\n'), "a.csv")]
    [{'id': '7', 'prompt': 'Hi,\\nyou'}]
"""

from __future__ import annotations

import codecs
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from eagle_ray.batch.reader.carried_columns import CSV_TEXT, type_of
from eagle_ray.batch.reader.jsonl_files import CutLine, ZeroBytes, is_cut
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.columns import FIRST, RowPosition
from eagle_ray.requests.request import InputRow
from eagle_ray.requests.row_schema import ROW_FIELDS
from eagle_ray.requests.values import json_error
from eagle_ray.text.strict_json import HalfSurrogate, parse_json

# Bytes of a record of several lines: a quote that is open for longer was never closed.
MAX_RECORD_BYTES = 64 << 20
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")  # not 007, which is a code and not the number 7
FLOAT = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SETTING_TYPES = {field.name: field.type for field in ROW_FIELDS}


def rows_in_csv(
    stream: BinaryIO, path: str, start: int = 0, start_position: RowPosition = FIRST
) -> Iterator[tuple[int, RowPosition, InputRow]]:
    """Yield byte offset, position and values of each record from byte `start` on, whose position is
    start_position. 0 reads all.

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
    """Return the type of one value: integer, float, boolean, or CSV_TEXT for any other text."""
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
        raise ConfigError(
            f"cannot read {path} as csv: its first line is not CSV ({error}): write a header"
        ) from None
    except UnicodeError:
        raise ConfigError(
            f"cannot read {path} as csv: its first line is not UTF-8: write the file as UTF-8"
        ) from None
    if "" in names and len(names) > 1:
        raise ConfigError(
            f"{path}: column {names.index('') + 1} has no name: name it in the first line, or leave it out "
            "(pandas: index=False)"
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"{path} has more than one column {repeated[0]!r}: rename or drop all but one of them"
        )
    return names, lines


def _records(lines: _Lines) -> Iterator[tuple[int, int, list[str] | RequestError]]:
    """Yield byte offset, line number and values of every record, blank ones (no values) included."""
    # The limit is the process's, 128 KiB at first; MAX_RECORD_BYTES bounds our records.
    csv.field_size_limit(sys.maxsize)
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
                "bad_csv",
                f"the row is not CSV ({error}): quote its texts, and double quotes in them",
            )
        if values is None:
            return
        yield offset, line, values
        if is_bad:
            lines.return_to_second_line()


class _Lines:
    """A stream's lines for the csv module; bytes that are not UTF-8 become lone surrogates.

    Attributes:
        offset, number: place of the next line.
        is_cut: whether the last line that was read has no line end.
        num_zeros: zero bytes at the end of that line, which are left out: a crash may leave them.
    """

    def __init__(self, stream: BinaryIO, offset: int, number: int):
        self._stream = stream
        self.offset = offset
        self.number = number
        self.is_cut = False
        self.num_zeros = 0
        self._second_line: int | None = None
        self._stream.seek(offset)
        self.begin_record()

    def begin_record(self) -> tuple[int, int]:
        """Mark the next line as the first of a record, and return its offset and number."""
        self._first_line = self.offset, self.number
        self._second_line = None
        return self._first_line

    def return_to_second_line(self) -> None:
        """Go back to the line after the record's first line."""
        assert self._second_line is not None, "the record's first line was read"
        self.offset = self._second_line
        self.number = self._first_line[1] + 1
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
        self.num_zeros = 0
        if self.is_cut:
            text = text.rstrip(b"\0")
            self.num_zeros = len(line) - len(text)
        self.offset += len(line)
        self.number += 1
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
    """Convert a value of a CSV file: null if empty, a number in a sampling column, else text."""
    try:
        text.encode()
    except UnicodeError:
        return RequestError(
            "bad_encoding", f"column {column!r} is not UTF-8 text: write it as UTF-8"
        )
    if text == "" or column not in _SETTING_TYPES:
        return text or None
    type_ = _SETTING_TYPES[column]
    is_list = pa.types.is_list(type_)
    is_map = pa.types.is_map(type_)
    try:
        value = parse_json(text if is_list or is_map else text.lower())
    except HalfSurrogate as error:
        return json_error(f"column {column!r}", error)
    except ValueError:
        return text
    if is_list:
        is_wanted = isinstance(value, list)
    elif is_map:
        is_wanted = isinstance(value, dict)
    else:
        is_wanted = isinstance(value, int | float)
    return value if is_wanted else text
