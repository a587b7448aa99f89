"""RowLocation: the location of a row in the input, for programs and for people with an editor.

Programs count rows from 0, as `row_index` and generated ids do. To fix a text file, people need the line, which
editors count from 1 and which differs from the row: a CSV file has a header, and quoted values may have newlines.
Parquet has no lines.

    >>> str(RowLocation("a.csv", "/d/a.csv", RowPosition(row=0, line=2)))
    '/d/a.csv, line 2'
    >>> str(RowLocation("a.parquet", "/d/a.parquet", RowPosition(row=0, line=None)))
    '/d/a.parquet, row 0 (counted from 0)'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class RowPosition(NamedTuple):
    """A position within a file. row: counted from 0, blank ones too. line: counted from 1, the row's first line."""

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
        return location_of(self.path, *self.position)

    @property
    def id(self) -> str:
        """Return the id of a row that has none."""
        return f"{self.name}:{self.position.row}"


def location_text(row: Mapping[str, Any]) -> str:
    """Return the location as text, of a row of a table of requests."""
    return location_of(row["source_file"], row["row_index"], row["source_line"])


def location_of(path: str, row: int, line: int | None) -> str:
    return f"{path}, row {row} (counted from 0)" if line is None else f"{path}, line {line}"
