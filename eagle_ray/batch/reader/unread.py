"""Find columns that are request parameters which rows cannot set: each would be dropped without a word.

Files are read again only if they have such a column, and only until a row asks for something with it.

    find_unread(plan.slices, ["frequency_penalty", "category"])
    # {'frequency_penalty': (RowLocation("a.jsonl", ...), 0.5)}
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_ray.batch.reader.file_slices import FileSlice, rows_in
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.columns import ColumnPath, RowLocation
from eagle_ray.requests.parameters import ROW_PARAMETERS, match_unsupported
from eagle_ray.requests.refused import REFUSED, has_effect

log = logging.getLogger("eagle_ray")
CARRY_HINT = "(input.on_unknown=carry)."
FoundParameters = dict[str, tuple[RowLocation, Any]]


def check_unread(
    slices: Sequence[FileSlice], columns: Iterable[str], mapped: Iterable[ColumnPath], on_unknown: str
) -> None:
    """Raise ConfigError for columns that are parameters which rows cannot set, or log them, as on_unknown says.

    mapped: paths of input.columns. A parameter in the object that such a path reads from is not read either.
    """
    if on_unknown == "carry":
        return
    found = find_unread(slices, columns) | find_unread_nested(slices, mapped)
    if found and on_unknown == "refuse":
        raise ConfigError("\n".join(f"{_problem(*item)}. {_remedy(item[0])}" for item in found.items()))
    for item in found.items():
        log.warning("%s. It is treated as data.", _problem(*item))


def find_unread(slices: Iterable[FileSlice], columns: Iterable[str]) -> FoundParameters:
    """Return, for each column of an unread parameter, the first row that asks for something with it, and its value."""
    wanted = {column: name for column in columns if (name := match_unsupported(column)) is not None}
    found: FoundParameters = {}
    for file_slice in slices if wanted else ():
        left = [column for column in wanted if column not in found]
        if not left:
            break
        found |= _find_in_slice(file_slice, {column: wanted[column] for column in left})
    return found


def find_unread_nested(slices: Iterable[FileSlice], mapped: Iterable[ColumnPath]) -> FoundParameters:
    """Return parameters in the objects that mapped paths such as body.messages read from, as find_unread does."""
    parents = {path.parent for path in mapped if path.parent is not None}
    found: FoundParameters = {}
    for file_slice in slices if parents else ():
        for position, row in rows_in(file_slice, [name for parent in parents for name in parent.names]):
            if isinstance(row, RequestError):
                continue
            for parent in parents:
                for key, value in _object_at(parent, row).items():
                    name = key if key in ROW_PARAMETERS else match_unsupported(key)
                    if name is not None and has_effect(name, value):
                        found.setdefault(
                            f"{parent.text}.{key}",
                            (RowLocation(file_slice.file.name, file_slice.file.path, position), value),
                        )
    return found


def _object_at(path: ColumnPath, row: dict[str, Any]) -> dict[str, Any]:
    try:
        value = path.value_in(row)
    except RequestError:  # the row is refused for it elsewhere
        return {}
    return value if isinstance(value, dict) else {}


def _find_in_slice(file_slice: FileSlice, wanted: dict[str, str]) -> FoundParameters:
    found: FoundParameters = {}
    for position, row in rows_in(file_slice, wanted):
        if not isinstance(row, dict):
            continue
        for column, name in wanted.items():
            if column not in found and has_effect(name, row.get(column)):
                found[column] = (RowLocation(file_slice.file.name, file_slice.file.path, position), row[column])
        if len(found) == len(wanted):
            break
    return found


def _problem(column: str, first: tuple[RowLocation, Any]) -> str:
    location, value = first
    return f"{location}: column {column!r} ({reprlib.repr(value)}) is a request parameter that rows cannot set here"


def _remedy(column: str) -> str:
    name = match_unsupported(column)
    if "." in column and name is None:
        return "Move it to a column of its own (format: openai_batch reads body), or treat it as data " + CARRY_HINT
    instead = name
    if name is not None and name not in ROW_PARAMETERS:
        instead = REFUSED[name].use if name in REFUSED else None
    change = f"Rename it to {instead!r}" if instead else "Leave it out of the input, or rename it"
    return f"{change}, or treat it as data {CARRY_HINT}"
