"""Sort the input's columns: those that make requests, those that set parameters, and those that are carried.

`carried_columns.py` has what becomes of the carried ones.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable

import pyarrow as pa

from eagle_ray.batch.reader.carried_columns import CSV_TEXT
from eagle_ray.batch.reader.run_rows import CONTEXT, RUN_ID
from eagle_ray.config import ColumnsConfig, InputConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import PROMPTS, ColumnPath, PromptTemplate, RequestColumns
from eagle_ray.requests.row_schema import ROW_FIELDS

# Columns that override `sampling` and `chat`.
ROW_SETTINGS = frozenset(field.name for field in ROW_FIELDS)


def request_columns(
    config: ColumnsConfig, template: PromptTemplate | None = None, of_run: bool = False
) -> RequestColumns:
    """Return the columns that requests are read from. Without a configured prompt, all default prompt columns are read.

    Args:
        of_run: whether the rows come from another run; these have ids, and no prompt of their own.
    """
    names = (*PROMPTS, "turns")
    configured = {
        name: _path(name, text) for name in names if (text := getattr(config, name)) is not None
    }
    if template is not None and configured:
        raise ConfigError(
            f"input.template: input.columns.{next(iter(configured))} is set too. Keep one of them."
        )
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
        return PromptTemplate.of(
            given if isinstance(given, str) else [dict(message) for message in given]
        )
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
    """Raise ConfigError unless configured columns exist in some file, and there is a prompt.

    Args:
        has_csv: whether some file is CSV.
    """
    for name, path in [("id", columns.id), *columns.prompts.items()]:
        if path.text in ROW_SETTINGS:
            raise ConfigError(
                f"input.columns.{name}: column {path.text!r} is a setting of its row. Rename the column, and the key."
            )
        if getattr(config, name) is not None and path.column_in(types) is None:
            raise ConfigError(
                f"input.columns.{name}: no file has a column {path.text!r}{_near(path.text, types)}"
            )
    for path in columns.template.fields if columns.template is not None else ():
        if path.column_in(types) is None:
            raise ConfigError(
                f"input.template: no file has a column {path.text!r}{_near(path.text, types)}"
            )
    if columns.template is None and not any(
        path.column_in(types) for path in columns.prompts.values()
    ):
        raise ConfigError(
            f"input.columns: no file has a column {', '.join(PROMPTS[:2])} or {PROMPTS[2]}. Name the one that holds "
            "the prompts with input.columns.prompt, .messages, .prompt_token_ids or .turns, or make prompts with "
            f"input.template; columns: {', '.join(types)}{_example(types, has_csv)}"
        )


def _example(types: dict[str, pa.DataType], has_csv: bool) -> str:
    """Return an example of the missing key: the only text column, or a CSV header; "" without one."""
    if has_csv and any(name.isdecimal() for name in types):
        return (
            ". If these are values, the file lacks a header: its first line must name the columns"
        )
    alike = [(name, prompt) for name in types for prompt in PROMPTS if name.casefold() == prompt]
    if alike:
        [(name, prompt), *_] = alike
        return f". For example: --set {shlex.quote(f'input.columns.{prompt}={name}')}"
    texts = [
        name for name, kind in types.items() if name != "id" and kind in (pa.string(), CSV_TEXT)
    ]
    return (
        f". For example: --set {shlex.quote(f'input.columns.prompt={texts[0]}')}"
        if len(texts) == 1
        else ""
    )


def carried_names(
    config: InputConfig,
    columns: RequestColumns,
    types: dict[str, pa.DataType],
    is_private: bool = False,
) -> list[str]:
    """Return the columns that input.passthrough selects. Raises ConfigError for a column that no file has.

    Args:
        is_private: whether "all" leaves out columns that hold prompts or parts of them, and prompts
            of an earlier run.
    """
    if config.passthrough == "none":
        return []
    if config.passthrough == "all":
        private = _prompt_columns(columns) if is_private else set()
        return [name for name in types if name not in columns.fully_used | private]
    for name in config.passthrough:
        if types and name not in types:
            raise ConfigError(
                f"input.passthrough: no file has a column {name!r}{_near(name, types)}"
            )
    return list(dict.fromkeys(config.passthrough))


def _prompt_columns(columns: RequestColumns) -> set[str]:
    read = {name for path in columns.prompt_paths for name in path.names}
    return read | set(PROMPTS) if columns.id.text == RUN_ID else read


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else f"; columns: {', '.join(names)}"


def settings_line(names: Iterable[str]) -> str | None:
    """Return a log line that names the columns read as request parameters, or None without any."""
    listed = ", ".join(sorted(names))
    return (
        f"columns that set parameters of their rows: {listed}. Rename a column that is data."
        if listed
        else None
    )
