"""Find parameters in the input that rows cannot set, so that a user learns that they are ignored."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import ColumnPath, RequestColumns, RowPosition
from eagle_ray.requests.parameters import ROW_PARAMETERS, match_unsupported
from eagle_ray.requests.refused import REFUSED, has_effect

CARRY_HINT = "(input.on_unknown=carry)."


class UnreadValue(NamedTuple):
    """The first value of a parameter that rows cannot set.

    Attributes:
        number: number of its row, counted from the first one that was scanned; blank lines are not
            counted.
        row, line: position of its row in the file.
        text: the value, shortened.
    """

    number: int
    row: int
    line: int | None
    text: str


class UnreadParameters:
    """Finds parameters that rows cannot set, and the first value of each that would change an output.

    Such a parameter is a column, or a key in an object from which input.columns reads another key.

    Attributes:
        values: first value found, by column or by ``path.key``.
        watched: parameter name of each such column that has no value yet.
        is_watching: whether further rows must be inspected.
    """

    def __init__(self, columns: RequestColumns, is_private: bool = False) -> None:
        self._text_of = _hidden_text if is_private else reprlib.repr
        paths = (columns.id, *columns.prompt_paths)
        self._objects = list({path.parent for path in paths if path.parent is not None})
        self.values: dict[str, UnreadValue] = {}
        self.watched: dict[str, str] = {}
        self.is_watching = bool(self._objects)

    def watch(self, columns: Iterable[str]) -> None:
        """Watch those of the columns that are named like a parameter which rows cannot set."""
        self.watched |= {
            column: name for column in columns if (name := match_unsupported(column)) is not None
        }
        self.is_watching = bool(self.watched or self._objects)

    def look(self, number: int, position: RowPosition, row: dict[str, Any]) -> None:
        """Record the first values of watched parameters in a row.

        Args:
            number: number of the row, counted from the first row of the scan.
        """
        values = [(column, name, row.get(column)) for column, name in self.watched.items()]
        for path in self._objects:
            for key, value in _object_at(path, row).items():
                name = _parameter(key)
                if name:
                    values.append((f"{path.text}.{key}", name, value))
        for column, name, value in values:
            if column not in self.values and has_effect(name, value):
                self.values[column] = UnreadValue(number, *position, self._text_of(value))
                self.watched.pop(column, None)
        self.is_watching = bool(self.watched or self._objects)


def _hidden_text(value: Any) -> str:
    return f"a {type(value).__name__} that is not shown, as output.store_prompt is false"


@cache
def _parameter(key: str) -> str | None:
    return key if key in ROW_PARAMETERS else match_unsupported(key)


def _object_at(path: ColumnPath, row: dict[str, Any]) -> dict[str, Any]:
    try:
        value = path.value_in(row)
    except RequestError:  # the row is refused for it elsewhere
        return {}
    return value if isinstance(value, dict) else {}


def remedy_of_unread(column: str) -> str:
    """Return advice on a column that is named like a parameter which rows cannot set."""
    name = match_unsupported(column)
    if "." in column and name is None:
        return (
            "Move it to a column of its own (format: openai_batch reads body), or treat it as data "
            + CARRY_HINT
        )
    instead = name
    if name is not None and name not in ROW_PARAMETERS:
        instead = REFUSED[name].use if name in REFUSED else None
    change = f"Rename it to {instead!r}" if instead else "Leave it out of the input, or rename it"
    return f"{change}, or treat it as data {CARRY_HINT}"
