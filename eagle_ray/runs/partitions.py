"""Partitions: columns that name directories of a run's data, as in Hive.

A directory is named after the values of chosen columns, such as
``data/split=train/lang=de/part-001-000007.parquet``: values are percent-encoded; null is Hive's own
word. A column that names a directory is not in the files below it, as in Hive and Spark: DuckDB
reads either way, but pandas refuses a text column that is in both. Readers guess types from text:
DuckDB's ``hive_types_autocast=false`` keeps text; pandas needs
``partitioning=pyarrow.dataset.partitioning(flavor="hive")`` for null values. The original type is
in the file's metadata, and ``read_tables`` restores it. An id's samples are in one file, so only
columns that are equal for all samples of a row can partition.

    >>> table = pa.table({"text": ["Hallo", "Hi", "?"], "lang": ["de", "en", None]})
    >>> [(directory, rows.num_rows) for directory, rows in Partitions(("lang",)).split(table)]
    [('lang=de', 1), ('lang=en', 1), ('lang=__HIVE_DEFAULT_PARTITION__', 1)]
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import location_text
from eagle_ray.requests.row_schema import JSON, OUTPUT_FIELDS
from eagle_ray.runs.job_errors import OutputMismatch

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
MAX_NAME_BYTES = 255  # bytes; names are percent-encoded, so as many characters
TYPES_KEY = b"eagle_ray.partition_types"
# The job's own columns that are equal for all samples of a row and tell rows apart
# usefully.
PARTITION_COLUMNS = (
    "source_file",
    "run_id",
    "attempt",
    "status",
    "error_code",
    "target_model",
    "draft_model",
    "method",
    "config_hash",
)
NAMING_TYPES = (  # carried columns of other types make no names, or names without a way back
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date,
    pa.types.is_timestamp,
)
DROP_COLUMN_REMEDY = "leave the column out, with another output.path"
CHOOSE_COLUMN_REMEDY = f"choose a carried column or one of {', '.join(PARTITION_COLUMNS)}"


@dataclass(frozen=True, slots=True)
class Partitions:
    """Columns that name directories.

    Attributes:
        columns: columns from the outermost directory to the innermost; empty for no directories.
        types: types of carried columns.
    """

    columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, columns: Iterable[str], carried_types: Mapping[str, pa.DataType]) -> Partitions:
        """Return the partitions of a job. Raises ConfigError for an unsuitable column."""
        for name in columns:
            if name not in PARTITION_COLUMNS:
                _check_carried(name, carried_types)
        if repeated := [name for i, name in enumerate(columns) if name in list(columns)[:i]]:
            raise ConfigError(f"output.partition_by: {repeated[0]!r} is named twice")
        return cls(tuple(columns), dict(carried_types))

    def check_values(self, requests: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError naming the first row whose value cannot be read or makes too long a directory name.

        It is checked before the start, since an error row would need that very directory.
        """
        names = [
            name for name in self.columns if name not in PARTITION_COLUMNS or name == "source_file"
        ]
        for request in requests if names else ():
            for name in names:
                value = request[name]
                if isinstance(value, str) and not _is_readable(value, self.types.get(name)):
                    raise ConfigError(
                        f"{location_text(request)}: output.partition_by: the value {value} of column {name!r} cannot "
                        f"be read back from a directory's name: change it, or {DROP_COLUMN_REMEDY}"
                    )
                if isinstance(value, str) and _is_too_long(name, value):
                    raise ConfigError(
                        f"{location_text(request)}: {_too_long_message(name, value)}: "
                        f"shorten it, or {DROP_COLUMN_REMEDY}"
                    )

    def split(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Yield each directory and its rows without partition columns, in the order of first appearance."""
        if not self.columns:
            yield "", table
            return
        stored = _with_partition_types(
            table.drop_columns(list(self.columns)), table.schema, self.columns
        )
        directories = self._directories(table)
        for directory in pc.unique(directories).to_pylist():
            yield directory, stored.filter(pc.equal(directories, directory))

    def _directories(self, table: pa.Table) -> pa.Array:
        """Return the directory of each row, such as a=1/b=x."""
        parts = []
        for name in self.columns:
            quoted = quote(name, safe="")
            parts.append([_directory_name(quoted, value) for value in _texts(table[name])])
        paths = ["/".join(row) for row in zip(*parts, strict=True)]
        return pa.array(paths, pa.string())


def partition_values(path: str) -> dict[str, str | None]:
    """Return the columns and values in a path's directory names."""
    pairs = [part.partition("=") for part in path.split("/")[:-1] if part.find("=") > 0]
    return {
        unquote(name): None if value == HIVE_NULL else unquote(value) for name, _, value in pairs
    }


def partition_types(schema: pa.Schema) -> pa.Schema:
    """Return the types of a file's partition columns, from its metadata."""
    noted = (schema.metadata or {}).get(TYPES_KEY)
    return pa.ipc.read_schema(pa.py_buffer(noted)) if noted else pa.schema([])


def with_partition_columns(table: pa.Table, types: pa.Schema, path: str) -> pa.Table:
    """Add a file's partition columns, in these types, to its rows.

    Raises OutputMismatch if its directories do not give their values.
    """
    values = partition_values(path)
    for field in types:
        try:
            column = pa.repeat(pa.scalar(values[field.name], pa.string()), len(table)).cast(
                field.type
            )
        except (KeyError, pa.ArrowException):
            raise OutputMismatch(
                f"{path}: its directories give its column {field.name!r} no value of type {field.type}. Put it back "
                "where the run wrote it; if it is there, an older release wrote it, and its run must be made again "
                "without that column in output.partition_by."
            ) from None
        table = table.append_column(field, column)
    return table


def _with_partition_types(table: pa.Table, schema: pa.Schema, columns: Iterable[str]) -> pa.Table:
    types = pa.schema([schema.field(name) for name in columns])
    metadata = schema.metadata or {}
    return table.replace_schema_metadata(metadata | {TYPES_KEY: types.serialize().to_pybytes()})


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    """Return the values as text. Times with a zone are UTC, since a zone's early offsets have seconds."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return column.cast(pa.string()).to_pylist()


def _is_readable(text: str, type_: pa.DataType | None) -> bool:
    """Return whether Arrow reads the text of a date or time, as it does for the years 0 to 9999."""
    if type_ is None or not pa.types.is_temporal(type_):
        return True
    try:
        pa.scalar(text).cast(type_)
    except pa.ArrowInvalid:
        return False
    return True


def _directory_name(name: str, value: str | None) -> str:
    """Return the encoded directory name. Raises ConfigError if it is too long for file systems."""
    directory = f"{name}={_encode(value)}"
    if len(directory) > MAX_NAME_BYTES:
        raise ConfigError(f"{_too_long_message(unquote(name), value or '')}: {DROP_COLUMN_REMEDY}")
    return directory


def _is_too_long(name: str, value: str) -> bool:
    return len(f"{quote(name, safe='')}={_encode(value)}") > MAX_NAME_BYTES


def _too_long_message(name: str, value: str) -> str:
    preview = f"{value[:40]!r}..., {len(value)} characters"
    return f"output.partition_by: a value of column {name!r} is too long for a directory's name ({preview})"


def _encode(value: str | None) -> str:
    """Percent-encode a value, so that it never equals Hive's word for null."""
    if value is None:
        return HIVE_NULL
    return quote(value, safe="") if value != HIVE_NULL else value.replace("_", "%5F")


def _check_carried(name: str, types: Mapping[str, pa.DataType]) -> None:
    if name in {field.name for field in OUTPUT_FIELDS}:
        raise ConfigError(
            f"output.partition_by: {name!r} differs between samples or names too many files: {CHOOSE_COLUMN_REMEDY}"
        )
    if name not in types:
        near = difflib.get_close_matches(name, [*PARTITION_COLUMNS, *types], 1)
        hint = f"did you mean {near[0]}?" if near else CHOOSE_COLUMN_REMEDY
        raise ConfigError(f"output.partition_by: the output has no column {name!r}; {hint}")
    type_ = types[name]
    if type_ == JSON or pa.types.is_nested(type_):
        raise ConfigError(
            f"output.partition_by: {name!r} holds lists, objects or mixed values: {CHOOSE_COLUMN_REMEDY}"
        )
    if not _comes_back(type_):
        raise ConfigError(
            f"output.partition_by: {name!r} is of type {type_}, whose values make no names: {CHOOSE_COLUMN_REMEDY}"
        )


def _comes_back(type_: pa.DataType) -> bool:
    """Return whether Arrow reads values of this type from their text, which is not so for times of day and bytes."""
    if pa.types.is_dictionary(type_):
        return _comes_back(type_.value_type)
    return any(is_type(type_) for is_type in NAMING_TYPES)
