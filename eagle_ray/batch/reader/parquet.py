"""Convert rows of Arrow tables and Parquet files to Python values, one batch in memory at a time.

A Parquet struct has all keys in every row, so a null in a struct is read as a key that the row does
not have.

    with pq.ParquetFile("a.parquet") as parquet:
        [(rows, _)] = batches_in_parquet(parquet, file, needed=["prompt"], groups=[0])
    rows                                                                    # [{'prompt': 'Hi'}]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.batch.reader.files import InputFile
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.requests.request import UNCARRIED, InputRow

BATCH_ROWS = 256
NANOSECONDS = pa.time64("ns")
# Metadata of a column whose texts are JSON, each of a value of any type.
JSON_VALUES = {b"eagle_ray.values": b"json"}
ERROR_KEY = "eagle_ray.error"  # key of an object in such a column that stands for a RequestError: its code and message
Convert = Callable[[Any], Any]
# Python has no dates beyond its years, and no unknown time zones.
CONVERSION_ERRORS = (
    pa.ArrowException,
    OverflowError,
    ValueError,
    KeyError,
)
BINARY_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_binary_view,
)


def check_unique(parquet: pq.ParquetFile, file: InputFile) -> None:
    """Raise ConfigError if two columns have one name: a row could hold only one of them."""
    names = parquet.schema_arrow.names
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"{file.path} has more than one column {repeated[0]!r}: rename or drop all but one of them"
        )


def arrow_rows(table: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """Convert rows to Python values: structs without nulls, float32 with its short decimal form, JSON_VALUES parsed.

    Bytes that are UTF-8 become texts, because Spark and Hive write texts without a declared type.
    """
    rows = table.to_pylist(maps_as_pydicts="lossy")
    for field in table.schema:
        is_json = JSON_VALUES.items() <= (field.metadata or {}).items()
        convert = _json_value if is_json else _converter(field.type)
        for row in rows if convert is not None else ():
            row[field.name] = _converted(row[field.name], convert)
    return rows


def _json_value(text: str) -> Any:
    value = json.loads(text)
    return (
        RequestError(*value[ERROR_KEY]) if isinstance(value, dict) and ERROR_KEY in value else value
    )


def _converted(value: Any, convert: Convert | None) -> Any:
    return value if value is None or convert is None else convert(value)


def _converter(type_: pa.DataType) -> Convert | None:
    """Return a function that converts Python values of an Arrow type, or None if they need no conversion."""
    if pa.types.is_float32(type_) or pa.types.is_float16(type_):
        number = type_.to_pandas_dtype()
        return lambda value: float(str(number(value)))
    if any(is_kind(type_) for is_kind in BINARY_KINDS):
        return _as_text
    if pa.types.is_dictionary(type_):
        return _converter(type_.value_type)
    if pa.types.is_struct(type_):
        return _struct_converter(type_)
    if pa.types.is_map(type_):
        convert_key = _converter(type_.key_type)
        convert_item = _converter(type_.item_type)
        return lambda value: {
            _converted(k, convert_key): _converted(v, convert_item) for k, v in value.items()
        }
    if not pa.types.is_nested(type_) or pa.types.is_union(type_):
        return None
    convert = _converter(type_.value_type)
    if convert is None:
        return None
    return lambda value: [_converted(item, convert) for item in value]


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _struct_converter(type_: pa.StructType) -> Convert:
    """Return a function that leaves out a struct's nulls, except a message's content: OpenAI's form has null there."""
    converters = {field.name: _converter(field.type) for field in type_}
    nullable = {"content"} if "role" in converters else set()

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        present = {
            name: item for name, item in value.items() if item is not None or name in nullable
        }
        return {name: _converted(item, converters[name]) for name, item in present.items()}

    return convert


def batches_in_parquet(
    parquet: pq.ParquetFile,
    file: InputFile,
    needed: Iterable[str],
    groups: list[int],
    carried: Iterable[str] = (),
) -> Iterator[tuple[list[InputRow], pa.RecordBatch]]:
    """Yield batches of some row groups: the needed columns as Python rows, the carried ones as Arrow columns.

    Text that is not UTF-8 makes its row a bad one. Raises ConfigError naming a column with values
    that Python cannot hold.
    """
    names = parquet.schema_arrow.names
    read = [name for name in dict.fromkeys(needed) if name in names]
    carried_names = [name for name in dict.fromkeys(carried) if name in names]
    columns = list(dict.fromkeys([*read, *carried_names]))
    if not columns:  # pyarrow reads no rows of no columns
        num_rows = sum(parquet.metadata.row_group(i).num_rows for i in groups)
        for size in _batch_sizes(num_rows):
            yield _empty_rows(size), pa.record_batch({})
        return
    for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=columns):
        rows = _empty_rows(batch.num_rows)
        if read:
            rows = _to_rows(_nanoseconds_as_text(batch.select(read)), file)
        yield _without_bad_text(rows, batch.select(carried_names))


def _empty_rows(number: int) -> list[InputRow]:
    return [{} for _ in range(number)]


def _batch_sizes(num_rows: int) -> Iterator[int]:
    for start in range(0, num_rows, BATCH_ROWS):
        yield min(BATCH_ROWS, num_rows - start)


def _without_bad_text(
    rows: list[InputRow], carried: pa.RecordBatch
) -> tuple[list[InputRow], pa.RecordBatch]:
    """Make a row with a carried text that is not UTF-8 a bad row, without that text: readers could not decode it."""
    for index, name in enumerate(carried.schema.names):
        column = carried.column(index)
        if _is_valid(column):
            continue
        valid_rows = [
            i if _is_valid(column.take(pa.array([i]))) else None for i in range(len(column))
        ]
        for place in (place for place, row in enumerate(valid_rows) if row is None):
            error = RequestError(
                "bad_encoding", f"column {name!r} is not UTF-8 text: write it as UTF-8"
            )
            row = rows[place]
            rows[place] = error if isinstance(row, RequestError) else row | {UNCARRIED: error}
        carried = carried.set_column(index, name, column.take(pa.array(valid_rows, pa.int64())))
    return rows, carried


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _nanoseconds_as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return times in nanoseconds as text, since Python's have microseconds."""
    columns = [
        column.cast(pa.string()) if column.type == NANOSECONDS else column
        for column in batch.columns
    ]
    fields = [
        field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _to_rows(batch: pa.RecordBatch, file: InputFile) -> list[InputRow]:
    try:
        return list(arrow_rows(batch))
    except UnicodeError as error:
        # Parquet's writers do not check their texts: halve until the row is alone.
        if batch.num_rows == 1:
            return [
                RequestError(
                    "bad_encoding", f"a text of the row is not UTF-8 ({error}): write it as UTF-8"
                )
            ]
        half = batch.num_rows // 2
        return _to_rows(batch.slice(0, half), file) + _to_rows(batch.slice(half), file)
    except CONVERSION_ERRORS as error:
        raise _conversion_error(batch, file, error) from None


def _conversion_error(batch: pa.RecordBatch, file: InputFile, error: Exception) -> ConfigError:
    """Return an error that names the column with values that Python cannot hold."""
    column = next(
        (name for name in batch.schema.names if not _is_convertible(batch.column(name))), "?"
    )
    return ConfigError(
        f"{file.path}: column {column!r} ({batch.schema.field(column).type}) holds values that cannot be read "
        f"({error}): cast it, for example to a string, or leave it out with input.passthrough"
    )


def _is_convertible(column: pa.Array) -> bool:
    try:
        column.to_pylist(maps_as_pydicts="lossy")
    except UnicodeError:  # a bad row of its own
        return True
    except CONVERSION_ERRORS:
        return False
    return True
