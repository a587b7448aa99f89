"""PromptTemplate: a prompt made of a row's columns, as `input.template` has it.

A field in braces is a column or a path into one, as in `input.columns`; ``{{`` and ``}}`` are braces. A text is a
prompt as it is. A list of messages goes through the chat template.

>>> template = PromptTemplate.of("Question: {prompt}\\nAnswer: {text}\\nGrade:")
>>> template.request_of({"prompt": "2 + 2?", "text": "4"})
{'prompt': 'Question: 2 + 2?\\nAnswer: 4\\nGrade:'}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from string import Formatter
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import ColumnPath, json_text
from eagle_ray.requests.messages import parse_messages

KEY = "input.template"
Piece = tuple[str, ColumnPath | None]
"""Text, and the field that follows it, if any."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """messages: role and pieces of each message; a template of a plain prompt has one with the role None."""

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

    def request_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's prompt, or its messages in their request form. Raises RequestError for an absent field."""
        filled = [(role, "".join(_fill(piece, row) for piece in pieces)) for role, pieces in self.messages]
        [(role, text), *_] = filled
        if role is None:
            return {"prompt": text}
        return {"messages": parse_messages([{"role": role, "content": text} for role, text in filled], KEY)}


def _pieces_of(text: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}. Write a brace that is text twice, as {{{{ or }}}}.") from None
    for literal, name, spec, conversion in parsed:
        if spec or conversion:
            raise ValueError(f"field {name!r} has a format or a conversion. Write {{{name}}} alone.")
        pieces.append((literal, None if name is None else _field(name)))
    return tuple(pieces)


def _field(name: str) -> ColumnPath:
    try:
        return ColumnPath.of(name)
    except ValueError as error:
        raise ValueError(f"field {error}. Write a brace that is text twice, as {{{{ or }}}}.") from None


def _fill(piece: Piece, row: Mapping[str, Any]) -> str:
    literal, field = piece
    return literal if field is None else literal + _value_text(field, row)


def _value_text(field: ColumnPath, row: Mapping[str, Any]) -> str:
    value = field.value_in(row)
    if isinstance(value, RequestError):
        raise value
    if value is None or value != value:
        raise RequestError("field_missing", f"column {field.text!r} of {KEY} is absent, null or NaN in this row")
    if isinstance(value, bool | int | float | list | dict):
        return json_text(f"column {field.text!r} of {KEY}", value, _scalar_text)
    try:
        return _scalar_text(value)
    except UnicodeDecodeError:
        wrong = f"column {field.text!r} of {KEY} holds bytes that are not UTF-8 text: cast it to a text"
        raise RequestError("bad_encoding", wrong) from None


def _scalar_text(value: Any) -> str:
    """Return a value that JSON lacks as a text holds it: 9.90, 2026-01-31, 2026-01-31 08:05:00+00:00."""
    if isinstance(value, bytes):
        return value.decode()
    return f"{value:f}" if isinstance(value, Decimal) else str(value)
