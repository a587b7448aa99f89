r"""Locate a request in the input: its file and row, the columns to read, and paths into columns.

>>> ColumnPath.of("turns[0]").value_in({"turns": ["Hi", "Again"]})
'Hi'
>>> PromptTemplate.of("Question: {prompt}\nAnswer: {text}\nGrade:").prompt_of({"prompt": "2 + 2?", "text": "4"})
'Question: 2 + 2?\nAnswer: 4\nGrade:'
>>> columns = RequestColumns(ColumnPath.of("id"), {"prompt": ColumnPath.of("question")})
>>> "question" in columns.fully_used
True

Programs count rows from 0, as `row_index` and generated ids do. To fix a text file, people need the
line, which editors count from 1. Line and row differ: a CSV file has a header, and quoted values
may contain newlines. Parquet has no lines.

    >>> str(RowLocation("a.csv", "/d/a.csv", RowPosition(row=0, line=2)))
    '/d/a.csv, line 2'
    >>> str(RowLocation("a.parquet", "/d/a.parquet", RowPosition(row=0, line=None)))
    '/d/a.parquet, row 0 (counted from 0)'
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from string import Formatter
from typing import Any, NamedTuple

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import CHAT, ROW_PARAMETERS, SAMPLING
from eagle_ray.requests.values import describe_value, json_text

PROMPT_NAME = "prompt_name"  # a column of the input: which prompt stands before the row's text

# Columns with prompts that need no configuration.
PROMPTS = (
    "prompt",
    "messages",
    "prompt_token_ids",
)
TEMPLATE_KEY = "input.template"
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?\d+)\]")

CATEGORY = "category"  # a carried column: rows of a category are expected to have outputs of similar length


class RowPosition(NamedTuple):
    """A position within a file.

    Attributes:
        row: number of the row, counted from 0. Blank rows count.
        line: number of the row's first line, counted from 1; None for a file without lines.
    """

    row: int
    line: int | None


FIRST = RowPosition(0, 1)  # first row of a file of lines


@dataclass(frozen=True, slots=True)
class RowLocation:
    """The file that a row is in, and its position there.

    Attributes:
        name: path of the file below the glob's root.
        path: full path of the file.
        position: position within the file.
    """

    name: str
    path: str
    position: RowPosition

    def __str__(self) -> str:
        return location_of(self.path, *self.position)

    @property
    def id(self) -> str:
        """Return the id that a row without one gets."""
        return f"{self.name}:{self.position.row}"


def location_text(row: Mapping[str, Any]) -> str:
    """Return the location of a row in a table of requests, as text for an error message."""
    return location_of(row["source_file"], row["row_index"], row["source_line"])


def location_of(path: str, row: int, line: int | None) -> str:
    return f"{path}, row {row} (counted from 0)" if line is None else f"{path}, line {line}"


@dataclass(frozen=True, slots=True)
class ColumnPath:
    """A column, or a value inside one: ``turns[0]``, ``a.b[1].c``.

    If a column's name is the whole text, that column is read.
    """

    text: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str) -> ColumnPath:
        """Parse a path. Raises ValueError if the text is not one."""
        matches = list(_STEP.finditer(text))
        if (
            "".join(m.group() for m in matches) != text
            or not matches
            or matches[0].group(1) is None
        ):
            raise ValueError(f"{text!r} is not a column or a path such as turns[0] or a.b[1].c")
        return cls(
            text, tuple(m.group(1) if m.group(2) is None else int(m.group(2)) for m in matches)
        )

    @property
    def names(self) -> tuple[str, str]:
        """Return the top-level columns that this path may read. The first one that exists is read."""
        return self.text, str(self.steps[0])

    @property
    def parent(self) -> ColumnPath | None:
        """Return the path of the object that holds this path's last key; None for a column or a list item."""
        if len(self.steps) == 1 or not isinstance(self.steps[-1], str):
            return None
        return ColumnPath.of(self.text.rpartition(".")[0])

    def column_in(self, names: Container[str]) -> str | None:
        """Return the top-level column that this path reads; None if `names` lacks it."""
        return next((name for name in self.names if name in names), None)

    def value_in(self, row: Mapping[str, Any]) -> Any:
        """Return the value in a row; None if it is absent. Raises RequestError if a step does not
        fit its value's type.
        """
        if self.text in row:
            return row[self.text]
        value: Any = row
        for step in self.steps:
            if value is None:
                return None
            value = self._step_into(value, step)
        return value

    def _step_into(self, value: Any, step: str | int) -> Any:
        if isinstance(step, str) and isinstance(value, Mapping):
            return value.get(step)
        if isinstance(step, int) and isinstance(value, list):
            return value[step] if -len(value) <= step < len(value) else None
        expected = "a list" if isinstance(step, int) else "an object"
        raise RequestError(
            "bad_type",
            f"column {self.text!r}: {step!r} needs {expected}, got {describe_value(value)}",
        )


Piece = tuple[str, ColumnPath | None]
"""Text, and the field that follows it, if any."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template that makes a prompt from a row's columns (`input.template`).

    A field in braces is a column or a path into one, as in `input.columns`. ``{{`` and ``}}`` stand
    for braces. A template of one text makes a plain prompt. A template of messages makes messages,
    which go through the chat template.

    Attributes:
        messages: role and pieces of each message. A template of a plain prompt has a single one,
            with the role None.
    """

    messages: tuple[tuple[str | None, tuple[Piece, ...]], ...]

    @classmethod
    def of(cls, template: str | Sequence[Mapping[str, str]]) -> PromptTemplate:
        """Parse a text or a list of {role, content}. Raises ValueError naming what is wrong."""
        if isinstance(template, str):
            return cls(((None, _pieces_of(template)),))
        return cls(tuple((message["role"], _pieces_of(message["content"])) for message in template))

    @property
    def fields(self) -> list[ColumnPath]:
        """Return the columns that the template reads."""
        return [field for _, pieces in self.messages for _, field in pieces if field is not None]

    def is_column(self, name: str) -> bool:
        """Return whether the prompt is this column alone."""
        return self.messages == ((None, (("", ColumnPath.of(name)),)),)

    def prompt_of(self, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return the row's prompt, or its messages. Raises RequestError for an absent field."""
        filled = [
            (role, "".join(_fill(piece, row) for piece in pieces)) for role, pieces in self.messages
        ]
        [(role, text), *_] = filled
        return text if role is None else [{"role": role, "content": text} for role, text in filled]


def _pieces_of(text: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(
            f"{text!r}: {error}. Write a brace that is text twice, as {{{{ or }}}}."
        ) from None
    for literal, name, spec, conversion in parsed:
        if spec or conversion:
            raise ValueError(
                f"field {name!r} has a format or a conversion. Write {{{name}}} alone."
            )
        pieces.append((literal, None if name is None else _field(name)))
    return tuple(pieces)


def _field(name: str) -> ColumnPath:
    try:
        return ColumnPath.of(name)
    except ValueError as error:
        raise ValueError(
            f"field {error}. Write a brace that is text twice, as {{{{ or }}}}."
        ) from None


def _fill(piece: Piece, row: Mapping[str, Any]) -> str:
    literal, field = piece
    return literal if field is None else literal + _value_text(field, row)


def _value_text(field: ColumnPath, row: Mapping[str, Any]) -> str:
    where = f"column {field.text!r} of {TEMPLATE_KEY}"
    value = field.value_in(row)
    if isinstance(value, RequestError):
        raise value
    if value is None or value != value:
        raise RequestError("field_missing", f"{where} is absent, null or NaN in this row")
    if isinstance(value, bool | int | float | list | dict):
        return json_text(where, value, _scalar_text)
    try:
        return _scalar_text(value)
    except UnicodeDecodeError:
        wrong = f"{where} holds bytes that are not UTF-8 text: cast it to a text"
        raise RequestError("bad_encoding", wrong) from None


def _scalar_text(value: Any) -> str:
    """Return the text of a value that JSON lacks: 9.90, 2026-01-31, 2026-01-31 08:05:00+00:00."""
    if isinstance(value, bytes):
        return value.decode()
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """The columns from which requests are made.

    Attributes:
        id: column of the row's id.
        prompts: columns by kind (prompt, messages, prompt_token_ids, turns), of which a row sets
            one; empty with a template.
        template: template that makes the prompt from other columns; None without one.
    """

    id: ColumnPath
    prompts: dict[str, ColumnPath]
    template: PromptTemplate | None = None

    @property
    def prompt_paths(self) -> list[ColumnPath]:
        """Return every path that is read for a prompt."""
        return [
            *self.prompts.values(),
            *(self.template.fields if self.template is not None else ()),
        ]

    @property
    def needed(self) -> list[str]:
        """Return the names of all columns that requests are made of."""
        read = [name for path in (self.id, *self.prompt_paths) for name in path.names]
        return [*read, *SAMPLING, *CHAT]

    @property
    def fully_used(self) -> set[str]:
        """Return the columns that are not carried to the output, because requests use them completely.

        ``turns[0]`` uses only a part of turns, so turns is carried. Columns of a template are
        carried, too.
        """
        return {path.text for path in (self.id, *self.prompts.values())} | ROW_PARAMETERS
