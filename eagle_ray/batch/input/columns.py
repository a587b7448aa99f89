"""Columns: which parts of an input row are its id and its prompt.

>>> ColumnPath.of("turns[0]").value_in({"turns": ["Hi", "Again"]})
'Hi'
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.batch.output.schema import SAMPLING_FIELDS
from eagle_ray.errors import RequestError

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?\d+)\]")


@dataclass(frozen=True, slots=True)
class ColumnPath:
    """A column, or a value inside one: ``turns[0]``, ``a.b[1].c``. A column whose name is the whole text wins."""

    text: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str) -> ColumnPath:
        """Raises ValueError where the text is no path."""
        matches = list(_STEP.finditer(text))
        if "".join(m.group() for m in matches) != text or not matches or matches[0].group(1) is None:
            raise ValueError(f"{text!r} is not a column or a path such as turns[0] or a.b[1].c")
        return cls(text, tuple(m.group(1) if m.group(2) is None else int(m.group(2)) for m in matches))

    @property
    def names(self) -> tuple[str, str]:
        """The top-level columns that this path may read, the first that is there."""
        return self.text, str(self.steps[0])

    @property
    def parent(self) -> ColumnPath | None:
        """The path of the object that this path reads a key of; None for a column and for an item of a list."""
        if len(self.steps) == 1 or not isinstance(self.steps[-1], str):
            return None
        return ColumnPath.of(self.text.rpartition(".")[0])

    def column_in(self, names: Container[str]) -> str | None:
        """The top-level column that this path reads, None where names lacks it."""
        return next((name for name in self.names if name in names), None)

    def value_in(self, row: Mapping[str, Any]) -> Any:
        """The value in a row, None where it is absent. Raises RequestError where the path meets the wrong type."""
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


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Which columns are read. Of the prompts (keys of REQUEST: prompt, messages, prompt_token_ids), a row sets one."""

    id: ColumnPath
    prompts: dict[str, ColumnPath]

    @property
    def fully_used(self) -> set[str]:
        """Columns that are not carried through again. Of ``turns[0]`` only a part is used, so turns is carried."""
        return {path.text for path in (self.id, *self.prompts.values())} | {field.name for field in SAMPLING_FIELDS}


def describe_value(value: Any) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
