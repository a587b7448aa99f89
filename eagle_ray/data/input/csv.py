"""Rows of a CSV file (RFC 4180): a header, then a record a row, whose quoted values may hold newlines.

Values are texts and an empty one is null, but for sampling columns, which are numbers. A record that is not CSV is one
bad row of its first line: reading goes on at the line after it, so that a quote that nobody closes costs one row and
not the rest of the file. Memory is bounded by LONGEST_RECORD. Does not know shards or what the other columns mean.

    >>> [row for _, _, row in rows_in_csv(io.BytesIO(b'id,prompt\n7,"Hi,\nyou"\n'), "a.csv")]
    [{'id': '7', 'prompt': 'Hi,\nyou'}]
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from eagle_ray.config import ConfigError
from eagle_ray.data.input.carried import CELLS, type_of
from eagle_ray.data.input.row import Row
from eagle_ray.data.schema import SAMPLING_FIELDS
from eagle_ray.errors import RequestError

LONGEST_RECORD = 64 << 20  # bytes of a record of several lines: a quote that is open for longer was never closed
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")  # not 007, which is somebody's code and not the number 7
FLOAT = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SAMPLING = {field.name: field.type for field in SAMPLING_FIELDS}


def rows_in_csv(stream: BinaryIO, path: str, start: int = 0, index: int = 0) -> Iterator[tuple[int, int, Row]]:
    """Byte offset, index and values of every record from byte `start` on, where row `index` begins; 0: all of them.

    Blank lines are no rows, but are counted. Raises ConfigError where the header cannot be one.
    """
    header, first = _header(stream, path)
    for number, (offset, values) in enumerate(_records(stream, start or first), index):
        if values:
            yield offset, number, _row(header, values)


def type_of_cell(value: Any) -> pa.DataType:
    """The type of one value: an integer, a float, a boolean, or CELLS, which holds any text."""
    if not isinstance(text := value, str):
        return type_of(value)
    if INTEGER.fullmatch(text):
        return pa.int64() if len(text) <= 20 and -(2**63) <= int(text) < 2**63 else CELLS
    if FLOAT.fullmatch(text):
        return pa.float64()
    return pa.bool_() if text.lower() in ("true", "false") else CELLS


def _header(stream: BinaryIO, path: str) -> tuple[list[str], int]:
    """The columns' names and the offset of the first record; no names for a file of no bytes."""
    lines = _Lines(stream, 0)
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
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{path} has more than one column {twice[0]!r}: rename or drop all but one of them")
    return names, lines.offset


def _records(stream: BinaryIO, start: int) -> Iterator[tuple[int, list[str] | RequestError]]:
    """Byte offset and values of every record, blank ones (no values) included."""
    csv.field_size_limit(sys.maxsize)  # the process's, 128 KiB at first: LONGEST_RECORD bounds ours
    lines = _Lines(stream, start)
    reader = csv.reader(lines, strict=True)
    while True:
        offset = lines.begin_record()
        try:
            values = next(reader, None)
        except csv.Error as error:
            values = RequestError(
                "bad_csv", f"the row is not CSV ({error}): quote its texts, and double quotes in them"
            )
            lines.return_to_second_line()
        if values is None:
            return
        yield offset, values


class _Lines:
    """A stream's lines as csv reads them; bytes that are no UTF-8 become lone surrogates.

    offset: of the line that comes next.
    """

    def __init__(self, stream: BinaryIO, offset: int):
        self._stream, self.offset = stream, offset
        self._stream.seek(offset)
        self.begin_record()

    def begin_record(self) -> int:
        """The next line is a record's first one; returns its offset."""
        self._record, self._second_line = self.offset, None
        return self.offset

    def return_to_second_line(self) -> None:
        """What followed the record's first line is read again."""
        self.offset = self._second_line
        self._stream.seek(self.offset)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._second_line is not None and self.offset - self._record > LONGEST_RECORD:
            raise csv.Error(f"a quote is open for more than {LONGEST_RECORD >> 20} MiB")
        line = self._stream.readline()
        if not line:
            raise StopIteration
        text = line.removeprefix(codecs.BOM_UTF8) if self.offset == 0 else line
        self.offset += len(line)
        self._second_line = self._second_line or self.offset
        return text.decode("utf-8", "surrogateescape")


def _row(header: list[str], values: list[str] | RequestError) -> Row:
    if isinstance(values, RequestError):
        return values
    if len(values) != len(header):
        return RequestError(
            "bad_csv",
            f"the row has {len(values)} values and the first line names {len(header)} columns: give each column one "
            "value, and quote texts that hold commas or newlines",
        )
    return {name: _value(name, text) for name, text in zip(header, values, strict=True)}


def _value(column: str, text: str) -> Any:
    """The text, null where it is empty; of a sampling column what it says, or the text where that is nothing."""
    try:
        text.encode()
    except UnicodeError:
        return RequestError("bad_encoding", f"column {column!r} is not UTF-8 text: write it as UTF-8")
    if text == "" or column not in _SAMPLING:
        return text or None
    is_list = pa.types.is_list(_SAMPLING[column])
    try:
        value = json.loads(text if is_list else text.lower())
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list if is_list else int | float) else text
