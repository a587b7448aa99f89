"""Request: what one row, one line of a batch file or one prompt in Python asks for; and the parsing of rows.

>>> request = Request(id="q1", source_file="a.jsonl", row_index=0, prompt="Hi", sampling={"n": 2})
>>> Request.of_row(dict.fromkeys(REQUEST.names) | request.to_row()) == request
True

parse_row never raises for a row's content. A bad row becomes a request with an error, which names
the file, the row, the column and the fix.

    >>> from eagle_ray.requests.columns import FIRST
    >>> columns = RequestColumns(ColumnPath.of("id"), {"prompt": ColumnPath.of("prompt")})
    >>> parse_row({"id": 7, "prompt": "Hi"}, columns, RowLocation("a.jsonl", "/d/a.jsonl", FIRST)).id
    '7'
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from eagle_ray.core.errors import RequestError, without_values
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.columns import (
    TEMPLATE_KEY,
    ColumnPath,
    RequestColumns,
    RowLocation,
    location_of,
)
from eagle_ray.requests.messages import parse_messages
from eagle_ray.requests.parameters import CHAT, SAMPLING, TWO_FORMS, Api, merged_values, two_forms
from eagle_ray.requests.row_schema import RENDERED, REQUEST, table_of
from eagle_ray.requests.row_settings import RowSettings
from eagle_ray.requests.values import (
    Boolean,
    WrongValue,
    describe_value,
    describe_wrong,
    json_error,
    json_text,
    parsed_if_json,
    whole_number,
)
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.strict_json import HalfSurrogate, JsonError, check_texts

_OWN_COLUMNS = frozenset(REQUEST.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request. Exactly one of prompt, messages, prompt_token_ids and user_turns is set, unless it has an error.

    Attributes:
        id: name of the request; None for a prompt in Python until it is numbered.
        source_file, row_index, source_line: location in the input. Only files of lines have a
            source_line.
        prompt: text of the prompt.
        messages: JSON text of a list of messages.
        prompt_token_ids: token ids of the prompt.
        user_turns: messages of the user in a conversation. The answers are its other messages.
        is_rendered: whether a chat template wrote the prompt, with all special tokens.
        sampling: values of sampling parameters that the request sets. A seed fits into Arrow's
            int64.
        chat: values of chat parameters that the request sets; lists, objects and texts as JSON.
        error: reason why the request cannot be answered, which begins with the location.
        answers: answers to the earlier turns of a conversation; None for a turn that failed.
        carried: columns of the input that are copied to the output rows.
    """

    id: str | None
    source_file: str
    row_index: int
    source_line: int | None = None
    prompt: str | None = None
    messages: str | None = None
    prompt_token_ids: list[int] | None = None
    user_turns: list[str] | None = None
    is_rendered: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)
    error: RequestError | None = None
    answers: tuple[str | None, ...] = ()
    carried: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Request:
        """Return the request in a row of a table with the columns REQUEST. Other columns are carried."""
        sampling = {name: row[name] for name in SAMPLING if row[name] is not None}
        if "logit_bias" in sampling:
            sampling["logit_bias"] = dict(sampling["logit_bias"])
        if "continuations" in sampling:
            sampling["continuations"] = json.loads(sampling["continuations"])
        code = row["error_code"]
        return cls(
            id=row["request_id"],
            source_file=row["source_file"],
            row_index=row["row_index"],
            source_line=row["source_line"],
            prompt=row["prompt"],
            messages=row["messages"],
            prompt_token_ids=row["prompt_token_ids"],
            user_turns=row["user_turns"],
            is_rendered=bool(row[RENDERED]),
            sampling=sampling,
            chat={name: row[name] for name in CHAT if row[name] is not None},
            error=None if code is None else RequestError(code, row["error_message"]),
            carried={name: value for name, value in row.items() if name not in _OWN_COLUMNS},
        )

    def to_row(self) -> dict[str, Any]:
        """Return the columns of the request and its carried columns. Parameters that it does not set are absent."""
        row = {
            "request_id": self.id,
            "row_index": self.row_index,
            "source_file": self.source_file,
            "source_line": self.source_line,
            "prompt": self.prompt,
            "messages": self.messages,
            "prompt_token_ids": self.prompt_token_ids,
            "user_turns": self.user_turns,
            **self.sampling,
            **self.chat,
            **self.carried,
        }
        if "logit_bias" in self.sampling:
            row["logit_bias"] = list(self.sampling["logit_bias"].items())  # as Arrow takes a map
        if "continuations" in self.sampling:
            row["continuations"] = dump_json(self.sampling["continuations"], ensure_ascii=False)
        if self.is_rendered:
            row[RENDERED] = True
        if self.error is not None:
            row |= {"error_code": self.error.code, "error_message": str(self.error)}
        return row

    @property
    def location(self) -> str:
        """Return the location in the input, as text."""
        return location_of(self.source_file, self.row_index, self.source_line)

    def error_text(self, error: RequestError) -> str:
        """Return an error's message, preceded by the location unless the reader's error already has it."""
        return str(error) if self.error is not None else f"{self.location}: {error}"

    def check(self) -> None:
        """Raise RequestError if the request cannot be answered."""
        if self.error is not None:
            raise RequestError(self.error.code, str(self.error))

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt goes through the chat template."""
        return self.messages is not None or self.user_turns is not None

    @property
    def turn_index(self) -> int:
        return len(self.answers)

    def next_turn(self, answers: Iterable[str | None]) -> Request:
        """Return the request of the conversation's next turn.

        Args:
            answers: answers to all earlier turns; None for a turn that failed.
        """
        return replace(self, answers=tuple(answers))

    @property
    def turn_messages(self) -> str | None:
        """Return the messages that this turn answers, as a JSON list; None for a prompt without messages.

        In a conversation of several turns, these are the turns and answers so far, up to the user's
        turn that is answered next.
        """
        if self.user_turns is None:
            return self.messages
        messages = []
        for turn, answer in zip(self.user_turns, [*self.answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return dump_json(messages, ensure_ascii=False)

    def sampling_params(self, config: RowSettings) -> SamplingSettings:
        """Return the sampling parameters in force: the request's values, then the job's."""
        return SamplingSettings(**merged_values(dict(config.sampling), self.sampling))

    def chat_options(self, config: RowSettings) -> ChatOptions:
        """Return the chat options in force: the request's values, then the job's. Raises RequestError."""
        own = {
            name: json.loads(value) if isinstance(value, str) else value
            for name, value in self.chat.items()
        }
        try:
            options = config.chat.options(own)
        except ValueError as error:
            raise RequestError("invalid_chat", str(error)) from None
        if self.is_chat:
            return options
        if options.has_tools:
            raise RequestError(
                "invalid_chat",
                "tools: only with messages. Leave tools out of rows with other prompts",
            )
        return NO_OPTIONS

    def num_samples(self, config: RowSettings) -> int:
        """Return the number of requested samples. A request with an error has it, too."""
        return self.sampling.get("n") or config.sampling.n

    @property
    def num_turns(self) -> int:
        """Return the number of turns of each sample: 1 unless the request is a conversation."""
        return len(self.user_turns or [None])

    def num_rows(self, config: RowSettings) -> int:
        """Return the number of the request's output rows, which is equal for answers and for errors."""
        return self.num_samples(config) * self.num_turns


def table_of_requests(requests: Iterable[Request]) -> pa.Table:
    """Return a table of requests without carried columns."""
    return table_of([request.to_row() for request in requests], REQUEST)


_SAMPLING_KINDS = [(name, parameter.kind_at(Api.JOB)) for name, parameter in SAMPLING.items()]
InputRow = dict[str, Any] | RequestError
"""A row's columns, or why the line is no row. A value that cannot be read is a RequestError in its column."""
UNCARRIED = "__uncarried__"
"""Key of a RequestError for a value that cannot be carried: the row is an error row with its own id and samples."""


def parse_row(
    row: InputRow, columns: RequestColumns, location: RowLocation, is_private: bool = False
) -> Request:
    """Return the request in one row, without carried columns.

    Args:
        row: columns of the row, or the error of a line that is no row.
        columns: columns to read.
        location: location of the row in the input.
        is_private: whether the request's error must not quote values of the row.
    """
    parsed: dict[str, Any] = {}
    bad: RequestError | None = None
    try:
        if isinstance(row, RequestError):
            raise row
        if (error := unreadable(row)) is not None:
            raise error
        _explicit_id(row, columns.id)
        parsed = _prompt_of(row, columns) | {"sampling": _sampling_of(row), "chat": chat_of(row)}
        if isinstance(uncarried := row.get(UNCARRIED), RequestError):
            raise uncarried
    except RequestError as error:
        shown = without_values(error, columns.needed) if is_private else error
        bad = RequestError(error.code, f"{location}: {shown}")
    return Request(
        id=id_of(row, columns, location),
        source_file=location.path,
        row_index=location.position.row,
        source_line=location.position.line,
        error=bad,
        **parsed,
    )


def unreadable(row: InputRow) -> RequestError | None:
    """Return the error of a row that cannot be read, or of its first unreadable column; None for a readable row."""
    if isinstance(row, RequestError):
        return row
    values = (value for name, value in row.items() if name != UNCARRIED)
    return next((value for value in values if isinstance(value, RequestError)), None)


def with_checked_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with a RequestError in place of each value that JSON cannot hold.

    Such a value has an unpaired surrogate, or is nested too deep.
    """
    checked: dict[str, Any] = {}
    for name, value in row.items():
        try:
            check_texts(name)
            check_texts(value)
            checked[name] = value
        except JsonError as error:
            shown = str(name).encode("utf-8", "backslashreplace").decode()
            checked[shown] = json_error(f"column {shown!r}", error)
    return checked


def id_of(row: InputRow, columns: RequestColumns, location: RowLocation) -> str:
    """Return the row's id as text, or its location if the id is absent, null, empty or unusable."""
    try:
        explicit_id = None if isinstance(row, RequestError) else _explicit_id(row, columns.id)
    except RequestError:
        explicit_id = None
    return location.id if explicit_id is None else explicit_id


def _explicit_id(row: Mapping[str, Any], path: ColumnPath) -> str | None:
    value = path.value_in(row)
    if isinstance(value, RequestError):
        raise value
    if isinstance(value, list | dict | bytes) or value != value:  # NaN is no id
        wrong = (
            f"column {path.text!r} must be a text or a number as an id, got {describe_value(value)}"
        )
        raise RequestError("bad_type", wrong + _fix_of_bytes(value))
    if isinstance(value, str) and not value.strip():
        raise RequestError(
            "empty_id",
            f"column {path.text!r} is an empty text ({describe_value(value)}). Give the row an id of its own, or "
            "null, which makes one from its file and row.",
        )
    return None if value is None else str(whole_number(value))


def _fix_of_bytes(value: Any) -> str:
    """Return advice for bytes that are not UTF-8, as the end of an error message; empty for other values."""
    if not isinstance(value, bytes):
        return ""
    return ". They are not UTF-8 text: cast the column to a text, such as hex(id) in SQL, or name another column"


def _prompt_of(row: Mapping[str, Any], columns: RequestColumns) -> dict[str, Any]:
    if columns.template is not None:
        prompt = columns.template.prompt_of(row)
        if not isinstance(prompt, str):
            return {"messages": parse_messages(prompt, TEMPLATE_KEY)}
        is_rendered = columns.template.is_column("prompt") and row.get(RENDERED) is True
        return {"prompt": prompt, "is_rendered": True} if is_rendered else {"prompt": prompt}

    # Exactly one column has the prompt.
    prompts = {}
    for name, path in columns.prompts.items():
        value = path.value_in(row)
        if value is not None:
            prompts[name] = value
    if not prompts:
        names = " or ".join(_column_and_key(name, path) for name, path in columns.prompts.items())
        raise RequestError(
            "prompt_missing", f"column {names} is absent or null: give the row exactly one prompt"
        )
    if len(prompts) > 1:
        both = " and ".join(repr(columns.prompts[name].text) for name in prompts)
        raise RequestError(
            "prompt_ambiguous",
            f"columns {both} are set: keep one, or name the one in input.columns",
        )

    [(name, value)] = prompts.items()
    column = columns.prompts[name].text
    if name == "turns":
        return {"user_turns": _turns(value, column)}
    if name == "messages":
        return {"messages": parse_messages(value, column)}
    if name == "prompt_token_ids":
        return {"prompt_token_ids": _token_ids(value, column)}
    parsed: dict[str, Any] = {"prompt": _text(value, column)}
    if column == "prompt" and row.get(RENDERED) is True:
        parsed["is_rendered"] = True
    return parsed


def _column_and_key(name: str, path: ColumnPath) -> str:
    """Return the quoted column, followed by its configuration key if the configuration names the column."""
    return repr(path.text) if path.text == name else f"{path.text!r} (input.columns.{name})"


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        wrong = f"column {column!r} must be a text, got {describe_value(value)}"
        raise RequestError("bad_type", wrong + _fix_of_bytes(value))
    if not value:
        raise RequestError(
            "prompt_empty", f"column {column!r} is an empty text: write a prompt, or drop the row"
        )
    return value


def _turns(value: Any, column: str) -> list[str]:
    return [
        _text(turn, f"{column}[{i}]")
        for i, turn in enumerate(_list(value, column, "texts", "turn"))
    ]


def _list(value: Any, column: str, form: str, item: str) -> list[Any]:
    """Return a list that has items. Raises RequestError for any other value."""
    value = _parse_if_json(value, column)
    if not isinstance(value, list):
        raise RequestError(
            "bad_type", f"column {column!r} must be a list of {form}, got {describe_value(value)}"
        )
    if not value:
        raise RequestError("prompt_empty", f"column {column!r} holds no {item}: give at least one")
    return value


def _token_ids(value: Any, column: str) -> list[int]:
    value = _list(value, column, "integers", "token id")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**63:
            raise RequestError(
                "bad_type",
                f"{column}[{i}] must be a token id, an integer from 0, got {describe_value(token)}",
            )
    return value


def _parse_if_json(value: Any, column: str) -> Any:
    """Return the value of a column, parsed if it is JSON text. Raises RequestError."""
    try:
        return parsed_if_json(value)
    except HalfSurrogate as error:
        raise json_error(f"column {column!r}", error) from None


def _sampling_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the row sets, with checked values. Raises RequestError."""
    values: dict[str, Any] = {}
    for name, kind in _SAMPLING_KINDS:
        if (value := row.get(name)) is None:
            continue
        try:
            value = kind.of_column(value)
            if not kind.is_nothing(value):
                values[name] = kind.check(value)
        except HalfSurrogate as error:
            raise json_error(f"column {name!r}", error) from None
        except WrongValue as error:
            problem = (
                f"column {name!r} must be {error.form}, got {describe_wrong(name, value, error)}"
            )
            raise RequestError("bad_sampling", problem) from None
    if (both := two_forms(values)) is not None:
        raise RequestError("bad_sampling", f"columns {both[0]!r} and {both[1]!r} {TWO_FORMS}")
    if "seed" in values:
        # The same 64 bits, as Arrow's int64 holds them.
        values["seed"] = (values["seed"] + 2**63) % 2**64 - 2**63
    return values


def chat_of(values: Mapping[str, Any], place: str = "column {!r}") -> dict[str, Any]:
    """Return the chat parameters that are set. Raises RequestError that begins with the wrong one's place.

    Objects and lists may be JSON text. A key of a tool that is null is absent.

    Args:
        values: parameters by name.
        place: format of a parameter's name in an error.
    """
    values_by_name: dict[str, Any] = {}
    for name, parameter in CHAT.items():
        if values.get(name) is None or (value := _parse_if_json(values[name], name)) is None:
            continue
        if name == "tools" and isinstance(value, list):
            value = [_without_null_keys(tool) for tool in value]
        elif name == "tool_choice":
            value = _without_null_keys(value)
        where = place.format(name)
        try:
            value = parameter.kind_at(Api.JOB).check(value)
        except WrongValue as error:
            raise RequestError(
                "bad_type", f"{where} must be {error.form}, got {describe_value(value)}"
            ) from None
        except ValueError as error:
            part, _, problem = str(error).partition(":")
            raise RequestError("bad_type", f"{place.format(part)}:{problem}") from None
        if isinstance(parameter.kind, Boolean):
            values_by_name[name] = value
        elif value:
            values_by_name[name] = json_text(where, value)
    return values_by_name


def _without_null_keys(value: Any) -> Any:
    """Return an object, and the function in it, without nulls. Parquet has every key of a struct in every row."""
    if not isinstance(value, dict):
        return value
    given = {key: x for key, x in value.items() if x is not None}
    function = given.get("function")
    if isinstance(function, dict):
        given["function"] = {key: x for key, x in function.items() if x is not None}
    return given
