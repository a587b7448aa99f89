"""Columns: the parts of an input row that are its id and its prompt.

>>> ColumnPath.of("turns[0]").value_in({"turns": ["Hi", "Again"]})
'Hi'
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.text.strict_json import HalfSurrogate

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?\d+)\]")


@dataclass(frozen=True, slots=True)
class ColumnPath:
    """A column, or a value inside one: ``turns[0]``, ``a.b[1].c``. A column with the whole text as its name takes
    precedence.
    """

    text: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str) -> ColumnPath:
        """Parse a path. Raises ValueError if the text is not one."""
        matches = list(_STEP.finditer(text))
        if "".join(m.group() for m in matches) != text or not matches or matches[0].group(1) is None:
            raise ValueError(f"{text!r} is not a column or a path such as turns[0] or a.b[1].c")
        return cls(text, tuple(m.group(1) if m.group(2) is None else int(m.group(2)) for m in matches))

    @property
    def names(self) -> tuple[str, str]:
        """Return the top-level columns that this path may read; the first existing one is read."""
        return self.text, str(self.steps[0])

    @property
    def parent(self) -> ColumnPath | None:
        """Return the path of the object that this path reads a key of, or None for a column or a list item."""
        if len(self.steps) == 1 or not isinstance(self.steps[-1], str):
            return None
        return ColumnPath.of(self.text.rpartition(".")[0])

    def column_in(self, names: Container[str]) -> str | None:
        """Return the top-level column that this path reads, or None if names lacks it."""
        return next((name for name in self.names if name in names), None)

    def value_in(self, row: Mapping[str, Any]) -> Any:
        """Return the value in a row, or None if it is absent. Raises RequestError if the path meets the wrong type."""
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
        raise RequestError("bad_type", f"column {self.text!r}: {step!r} needs {expected}, got {describe_value(value)}")


def json_text(where: str, value: Any, scalar_text: Callable[[Any], str] = str) -> str:
    """Return the JSON text of a row's value. scalar_text: writes what JSON lacks, such as dates.

    Raises RequestError for a key that is no text, as maps of Parquet files and dictionaries of Python may have, and for
    bytes that scalar_text cannot write.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=scalar_text)
    except TypeError:
        raise RequestError("bad_type", f"{where}: a key of an object is no text. Make its keys texts.") from None
    except UnicodeDecodeError:
        raise RequestError("bad_encoding", f"{where} holds bytes that are not UTF-8 text: cast it to a text") from None


def json_error(where: str, error: ValueError) -> RequestError:
    """Return the error of a text or a value that the reader of JSON refuses, or of a text that is not JSON."""
    return RequestError("bad_encoding" if isinstance(error, HalfSurrogate) else "bad_json", f"{where}: {error}")


def describe_value(value: Any) -> str:
    """Return a value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
