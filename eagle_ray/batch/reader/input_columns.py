"""Which columns of the input requests are made of, which set parameters of their rows, and which are carried.

columns = request_columns(config.input.columns, template_of(config.input))
columns.needed[:2]                                              # ['id', 'id']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import pyarrow as pa

from eagle_ray.batch.reader.run_input import CONTEXT, RUN_ID
from eagle_ray.config import ColumnsConfig, InputConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import PROMPTS, ColumnPath, PromptTemplate, RequestColumns
from eagle_ray.requests.row_schema import ROW_FIELDS

ROW_SETTINGS = frozenset(field.name for field in ROW_FIELDS)  # columns that override `sampling` and `chat`


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


def check_columns_exist(config: ColumnsConfig, columns: RequestColumns, types: dict[str, pa.DataType]) -> None:
    """Check that configured columns exist in some file, and that there is a prompt."""
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
            f"input.template; columns: {', '.join(types)}"
        )


def carried_names(config: InputConfig, columns: RequestColumns, types: dict[str, pa.DataType]) -> list[str]:
    """Return the columns that input.passthrough names. Raises ConfigError for one that no file has."""
    if config.passthrough == "none":
        return []
    if config.passthrough == "all":
        return [name for name in types if name not in columns.fully_used]
    for name in config.passthrough:
        if types and name not in types:
            raise ConfigError(f"input.passthrough: no file has a column {name!r}{_near(name, types)}")
    return list(dict.fromkeys(config.passthrough))


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else f"; columns: {', '.join(names)}"


def settings_line(names: Iterable[str]) -> str | None:
    """Return one line that names the columns that are taken for parameters of their rows, or None if there are none."""
    listed = ", ".join(sorted(names))
    return f"columns that set parameters of their rows: {listed}. Rename a column that is data." if listed else None
