"""RowLocation: where a row stands in the input, in a program's count and in the words of a person with an editor.

A program counts rows from 0, as `row_index` and ids made of places do. To mend a text file one looks for a line,
which an editor counts from 1: a CSV file's header has some, and so has a quoted value with newlines. Parquet has none.

    >>> str(Place("a.csv", "/d/a.csv", At(row=0, line=2)))
    '/d/a.csv, line 2'
    >>> str(Place("a.parquet", "/d/a.parquet", At(row=0, line=None)))
    '/d/a.parquet, row 0 (counted from 0)'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class RowPosition(NamedTuple):
    """A place within a file. row: counted from 0, blank ones too. line: counted from 1, where the row begins."""

    row: int
    line: int | None


FIRST = RowPosition(0, 1)  # of a file of lines


@dataclass(frozen=True, slots=True)
class RowLocation:
    """name: the file's path below the glob's root; path: the file."""

    name: str
    path: str
    position: RowPosition

    def __str__(self) -> str:
        return _format(self.path, *self.position)

    @property
    def id(self) -> str:
        """The id of a row that gives none."""
        return f"{self.name}:{self.position.row}"


def location_text(request: Mapping[str, Any]) -> str:
    """The same words, of a row that has become a request."""
    return _format(request["source_file"], request["row_index"], request["source_line"])


def _format(path: str, row: int, line: int | None) -> str:
    return f"{path}, row {row} (counted from 0)" if line is None else f"{path}, line {line}"
