"""Columns of the input: which requests are made of, which set parameters of their rows, and which are carried.

The types of carried columns are fixed before the job starts. A Parquet column keeps its Arrow type, and its values are
never Python's. Types of several files are joined upwards: null below everything, integers below floats, decimals below
those with more digits, JSON text above incompatible types, and CSV_TEXT above JSON. Lists and objects of JSONL files
have no Arrow type and are JSON text. In JSON text, bytes are base64, and dates, times and decimals are texts.

    >>> joined_type(pa.int64(), pa.float64())
    DataType(double)
    >>> joined_type(pa.int64(), pa.string()) == JSON
    True
"""

from __future__ import annotations

import base64
import difflib
import shlex
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import pyarrow as pa

from eagle_ray.batch.reader.parquet import CONTEXT, RUN_ID
from eagle_ray.config import ColumnsConfig, InputConfig
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.columns import PROMPTS, ColumnPath, PromptTemplate, RequestColumns
from eagle_ray.requests.row_schema import JSON, ROW_FIELDS

RENAME_PREFIX = "input_"  # of a carried column with a name that the output has already
# Texts of a CSV file. Values of other files become texts, as dates do, or else JSON text.
CSV_TEXT = pa.large_string()
ROW_SETTINGS = frozenset(field.name for field in ROW_FIELDS)  # columns that override `sampling` and `chat`


@dataclass(frozen=True, slots=True)
class CarriedColumn:
    """A column to pass through.

    Attributes:
        source: its name in the input.
        name: its name in the output.
        type: the joined type of its values; `field_of` gives the output column's.
    """

    source: str
    name: str
    type: pa.DataType

    @property
    def field(self) -> pa.Field:
        return field_of(self.name, self.type)


def output_names(sources: Iterable[str], reserved: Iterable[str]) -> dict[str, str]:
    """Return the output name of each carried column.

    A name that the job uses itself gets the prefix ``input_``. If the input has a column of that name too, a number
    follows: ``input_text_2``. SQL does not tell names apart that differ by case alone, so neither do these: of
    several such columns the later ones get the prefix.

        >>> output_names(["text", "input_text", "score"], {"text"})
        {'text': 'input_text_2', 'input_text': 'input_text', 'score': 'score'}
        >>> output_names(["Text", "score", "Score"], {"text"})
        {'Text': 'input_Text', 'score': 'score', 'Score': 'input_Score'}
    """
    sources = list(sources)
    taken = {name.casefold() for name in reserved}
    names: dict[str, str] = {}
    for source in sources:
        if source.casefold() not in taken:
            names[source] = source
            taken.add(source.casefold())
    for source in sources:
        if source not in names:
            names[source] = _unused_name(RENAME_PREFIX + source, taken)
            taken.add(names[source].casefold())
    return {source: names[source] for source in sources}


def _unused_name(name: str, taken: Container[str]) -> str:
    candidates = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate.casefold() not in taken)


def type_of(value: Any) -> pa.DataType:
    """Return the type of a value parsed from JSON; an unreadable value has none."""
    if value is None or isinstance(value, RequestError):
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else JSON
    return pa.float64() if isinstance(value, float) else pa.string() if isinstance(value, str) else JSON


def type_in_parquet(declared: pa.DataType) -> pa.DataType:
    """Return the carried type of a Parquet column: its own, but for extension types and the widths of text."""
    if isinstance(declared, pa.BaseExtensionType):
        return type_in_parquet(declared.storage_type)
    if pa.types.is_large_string(declared) or pa.types.is_string_view(declared):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(declared) else declared


def decoded_type(type_: pa.DataType) -> pa.DataType:
    """Return the type on the way to the file: dictionaries are encoded only there, since each batch has its own."""
    if isinstance(type_, pa.BaseExtensionType):
        return decoded_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return decoded_type(type_.value_type)
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    return _decoded_nested(type_) if pa.types.is_nested(type_) else type_


def _decoded_nested(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([_decoded_field(field) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(decoded_type(type_.key_type), _decoded_field(type_.item_field), type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_decoded_field(type_.value_field), type_.list_size)
    if pa.types.is_large_list(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(_decoded_field(type_.value_field))
    if pa.types.is_list(type_) or pa.types.is_list_view(type_):
        return pa.list_(_decoded_field(type_.value_field))
    return type_


def _decoded_field(field: pa.Field) -> pa.Field:
    return field.with_type(decoded_type(field.type))


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def _is_binary(type_: pa.DataType) -> bool:
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_)


# of types that are joined; Arrow would join others, too, such as texts with bytes and numbers with decimals
JOINED_KINDS = (_is_number, _is_binary, pa.types.is_nested, pa.types.is_decimal)


def joined_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the narrowest type that holds both."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    for above in (CSV_TEXT, JSON):
        if above in (a, b):
            return above
    if pa.types.is_dictionary(a) or pa.types.is_dictionary(b):
        return joined_type(decoded_type(a), decoded_type(b))
    if not any(is_kind(a) and is_kind(b) for is_kind in JOINED_KINDS) or _overflow(a, b):
        return JSON
    both = [pa.schema([("x", a)]), pa.schema([("x", b)])]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return JSON


def join_into(types: dict[str, pa.DataType], more: Mapping[str, pa.DataType]) -> None:
    """Add columns, and widen the types of those already there."""
    for name, type_ in more.items():
        types[name] = joined_type(types.get(name, type_), type_)


def field_of(name: str, type_: pa.DataType) -> pa.Field:
    """Return the output column of a joined type: JSON, CSV_TEXT and null are stored as strings."""
    return pa.field(name, pa.string() if type_ in (JSON, CSV_TEXT) or pa.types.is_null(type_) else type_)


def column_of(values: Iterable[Any], type_: pa.DataType) -> pa.Array:
    """Return Python values in the decoded type of a carried column; CSV numbers are texts before."""
    as_type = _converter(type_)
    absent = (type(None), RequestError)
    decoded = decoded_type(field_of("", type_).type)
    return pa.array([None if isinstance(v, absent) else as_type(v) for v in values], decoded)


def carry(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Return a Parquet column in the decoded type of a carried column."""
    if type_ not in (JSON, CSV_TEXT):
        try:
            return column.cast(decoded_type(field_of("", type_).type))
        except (
            pa.ArrowException
        ):  # such as integers from 2**53 to floats, or a struct without a field of the joined one
            pass
    return column_of(_python_values(column), type_)


def _python_values(column: pa.Array) -> list[Any]:
    """Return a column's values; within them, what Python cannot hold is a text or a number."""
    try:
        return column.to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowException, OverflowError, ValueError, KeyError):
        pass
    if pa.types.is_struct(column.type):
        fields = zip(*(_python_values(part) for part in column.flatten()), strict=True)
        objects = [dict(zip(column.type.names, values, strict=True)) for values in fields]
        return [value if valid else None for value, valid in zip(objects, column.is_valid().to_pylist(), strict=True)]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lists = (column.slice(i, 1) for i in range(len(column)))
        return [_python_values(one.flatten()) if one.null_count == 0 else None for one in lists]
    for type_ in (pa.string(), pa.int64()):
        try:
            return column.cast(type_).to_pylist()
        except pa.ArrowException:
            pass
    return column.to_pylist()  # raises: for instance of text that is not UTF-8


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, as texts if Python cannot hold them, such as times in nanoseconds."""
    try:
        return _python_values(column.combine_chunks())
    except (pa.ArrowException, OverflowError, ValueError, KeyError):
        return [f"a value of type {column.type}" if valid else None for valid in column.is_valid().to_pylist()]


def _converter(type_: pa.DataType) -> Callable[[Any], Any]:
    if type_ == JSON:
        return _as_json
    if type_ == CSV_TEXT:
        return _as_text
    if pa.types.is_floating(type_):
        return float  # Arrow refuses integers from 2**53
    if pa.types.is_integer(type_):
        return int
    return _as_boolean if pa.types.is_boolean(type_) else lambda value: value


def _as_json(value: Any) -> str:
    try:
        return dump_json(value, ensure_ascii=False, default=_json_form)
    except TypeError:  # a map's keys that are no texts
        return dump_json(_with_text_keys(value), ensure_ascii=False, default=_json_form)


def _as_text(value: Any) -> str:
    return _as_json(value) if isinstance(value, bool | int | float | list | dict) else _json_form(value)


def _json_form(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _json_form(key): _with_text_keys(x) for key, x in value.items()}
    return [_with_text_keys(x) for x in value] if isinstance(value, list) else value


def _as_boolean(value: bool | str) -> bool:
    return value.lower() == "true" if isinstance(value, str) else value


def _overflow(a: pa.DataType, b: pa.DataType) -> bool:
    """Return whether the types are unsigned 64-bit and signed integers, which have no common integer type."""
    return pa.uint64() in (a, b) and (pa.types.is_signed_integer(a) or pa.types.is_signed_integer(b))


def request_columns(
    config: ColumnsConfig, template: PromptTemplate | None = None, of_run: bool = False
) -> RequestColumns:
    """Return the configured columns. Without a configured prompt, every default prompt column of the rows is read.

    of_run: the rows are those of another run, which have ids that are made for them, and no prompt of their own.
    """
    names = (*PROMPTS, "turns")
    configured = {name: _path(name, text) for name in names if (text := getattr(config, name)) is not None}
    if template is not None and configured:
        raise ConfigError(f"input.template: input.columns.{next(iter(configured))} is set too. Keep one of them.")
    if of_run and template is None and not configured:
        raise ConfigError(
            "input.template: missing. The rows of a run (input.path run:DIR) are asked something about with a template "
            f"of their columns, {', '.join(CONTEXT)} or a carried one; or name a prompt column in input.columns."
        )
    id_column = _path("id", config.id or (RUN_ID if of_run else "id"))
    defaults = {} if template is not None else {name: _path(name, name) for name in PROMPTS}
    return RequestColumns(id_column, configured or defaults, template)


def template_of(config: InputConfig) -> PromptTemplate | None:
    """Return the parsed input.template. Raises ConfigError."""
    given = config.template
    if given is None:
        return None
    try:
        return PromptTemplate.of(given if isinstance(given, str) else [dict(message) for message in given])
    except ValueError as error:
        raise ConfigError(f"input.template: {error}") from None


def _path(name: str, text: str) -> ColumnPath:
    try:
        return ColumnPath.of(text)
    except ValueError as error:
        raise ConfigError(f"input.columns.{name}: {error}") from None


def check_columns_exist(
    config: ColumnsConfig, columns: RequestColumns, types: dict[str, pa.DataType], has_csv: bool
) -> None:
    """Check that configured columns exist in some file, and that there is a prompt. has_csv: some file is CSV."""
    for name, path in [("id", columns.id), *columns.prompts.items()]:
        if path.text in ROW_SETTINGS:
            raise ConfigError(
                f"input.columns.{name}: column {path.text!r} is a setting of its row. Rename the column, and the key."
            )
        if getattr(config, name) is not None and path.column_in(types) is None:
            raise ConfigError(f"input.columns.{name}: no file has a column {path.text!r}{_near(path.text, types)}")
    for path in columns.template.fields if columns.template is not None else ():
        if path.column_in(types) is None:
            raise ConfigError(f"input.template: no file has a column {path.text!r}{_near(path.text, types)}")
    if columns.template is None and not any(path.column_in(types) for path in columns.prompts.values()):
        raise ConfigError(
            f"input.columns: no file has a column {', '.join(PROMPTS[:2])} or {PROMPTS[2]}. Name the one that holds "
            "the prompts with input.columns.prompt, .messages, .prompt_token_ids or .turns, or make prompts with "
            f"input.template; columns: {', '.join(types)}{_example(types, has_csv)}"
        )


def _example(types: dict[str, pa.DataType], has_csv: bool) -> str:
    """Return the key for the only column of texts, or what a CSV file without a header looks like; "" otherwise."""
    if has_csv and any(name.isdecimal() for name in types):
        return ". If these are values, the file lacks a header: its first line must name the columns"
    alike = [(name, prompt) for name in types for prompt in PROMPTS if name.casefold() == prompt]
    if alike:
        [(name, prompt), *_] = alike
        return f". For example: --set {shlex.quote(f'input.columns.{prompt}={name}')}"
    texts = [name for name, kind in types.items() if name != "id" and kind in (pa.string(), CSV_TEXT)]
    return f". For example: --set {shlex.quote(f'input.columns.prompt={texts[0]}')}" if len(texts) == 1 else ""


def carried_names(
    config: InputConfig, columns: RequestColumns, types: dict[str, pa.DataType], is_private: bool = False
) -> list[str]:
    """Return the columns that input.passthrough names. Raises ConfigError for one that no file has.

    is_private: "all" leaves out the columns that prompts are made of, also in part, and the prompts of an earlier run.
    """
    if config.passthrough == "none":
        return []
    if config.passthrough == "all":
        private = _prompt_columns(columns) if is_private else set()
        return [name for name in types if name not in columns.fully_used | private]
    for name in config.passthrough:
        if types and name not in types:
            raise ConfigError(f"input.passthrough: no file has a column {name!r}{_near(name, types)}")
    return list(dict.fromkeys(config.passthrough))


def _prompt_columns(columns: RequestColumns) -> set[str]:
    read = {name for path in columns.prompt_paths for name in path.names}
    return read | set(PROMPTS) if columns.id.text == RUN_ID else read


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else f"; columns: {', '.join(names)}"


def settings_line(names: Iterable[str]) -> str | None:
    """Return one line that names the columns that are taken for parameters of their rows, or None if there are none."""
    listed = ", ".join(sorted(names))
    return f"columns that set parameters of their rows: {listed}. Rename a column that is data." if listed else None
