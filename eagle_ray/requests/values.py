"""Kinds of parameter values: which values are valid, their plain form, and their types in JSON and Arrow.

A kind's `form` completes the sentence "must be ...". `check` returns the plain form of a valid
value. For an invalid value it raises WrongValue, which locates the wrong part. Checks are strict:
"3" is not 3, and true is not 1.

    >>> Number(0, 1, form="a number between 0 and 1").check(1)
    1.0
    >>> Texts(form="a list of texts, none of them empty").check(["a", ""])
    Traceback (most recent call last):
    ...
    eagle_ray.requests.values.WrongValue: must be a list of texts, none of them empty, got ['a', '']
"""

from __future__ import annotations

import json
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.text.chat_format import template_arguments
from eagle_ray.text.strict_json import HalfSurrogate, JsonError, is_utf8, parse_json, place_text
from eagle_ray.text.structured import response_format_text, schema_text

Json = dict[str, Any]
MAX_INTEGER = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
EMPTY_VALUES: tuple[Any, ...] = ("", [], {})
LOGPROBS = "message.output_text.logprobs"  # the only value of a response's `include`
PANDAS_NULLS = ("NAType", "NaTType")  # names of types: pandas is not imported here
JSON_TEXT: Json = {"type": "string", "contentMediaType": "application/json"}


class Api(Enum):
    """The interface by which a request arrives."""

    JOB = "a job's configuration and rows"
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    BATCHES = "/v1/batches"
    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"
    PYTHON = "SamplingParams"


CHATS = frozenset({Api.CHAT, Api.RESPONSES})
HTTP = CHATS | {Api.COMPLETIONS}
EVERYWHERE = HTTP | {Api.JOB, Api.PYTHON}


class WrongValue(ValueError):
    """The error of a value that is not of its kind.

    Attributes:
        form: description of valid values.
        value: wrong part of the value.
        steps: keys and indices that lead to the wrong part; empty for the whole value.
        reason: message of a parser of JSON, schemas or text; None without one.
        needs_text: whether the wrong part must be a text and is not.
        problem: text that follows the wrong part's place in a message; None if the form says
            enough.
        is_unsupported: whether the value asks for something that this system does not support.
    """

    def __init__(
        self, form: str, value: Any, steps: tuple[str | int, ...] = (), reason: str | None = None
    ):
        super().__init__(f"must be {form}, got {reprlib.repr(value)}")
        self.form, self.value, self.steps, self.reason = form, value, steps, reason
        self.needs_text = self.is_unsupported = False
        self.problem: str | None = None

    @property
    def why(self) -> str:
        """Return the reason in brackets, for the end of a message; empty without a reason."""
        return "" if self.reason is None else f" ({self.reason})"


@dataclass(frozen=True)
class Kind(ABC):
    """The kind of a value.

    Attributes:
        form: description of valid values.
        arrow: type of a column of such values, by its name in `row_schema`.
    """

    form: str = field(default="", kw_only=True)
    arrow = "string"

    @abstractmethod
    def check(self, value: Any) -> Any:
        """Return the plain form of a value. Raises WrongValue."""

    @abstractmethod
    def schema(self) -> Json:
        """Return the JSON schema of a value in a request's body."""

    @property
    def nothings(self) -> tuple[Any, ...]:
        """Return the values that count as absent, besides null, if the parameter may be absent."""
        return ()

    def is_nothing(self, value: Any) -> bool:
        return value is None or any(
            type(value) is type(nothing) and value == nothing for nothing in self.nothings
        )

    def of_column(self, value: Any) -> Any:
        """Convert a column's value, which is not null, to one that `check` accepts. Raises HalfSurrogate."""
        return whole_number(value)

    def with_form(self, form: str) -> Kind:
        """Return this kind with another description of valid values."""
        return replace(self, **{"form": form})

    def wrong(self, value: Any, *steps: str | int, limit: int | None = None) -> WrongValue:
        """Return the error of a value, or of its part at these steps.

        Args:
            value: wrong value or part.
            steps: keys and indices that lead to the part.
            limit: bound that the value exceeds; None without one.
        """
        return WrongValue(
            self.form if limit is None else f"{self.form}, at most {limit}", value, steps
        )

    def part(self, kind: Kind, value: Any, *steps: str | int) -> Any:
        """Return the plain form of a part at these steps. An error has this kind's form.

        Args:
            kind: kind of the part.
            value: value of the part.
            steps: keys and indices that lead to the part.
        """
        try:
            return kind.check(value)
        except WrongValue as error:
            raise WrongValue(self.form, error.value, (*steps, *error.steps), error.reason) from None


def whole_number(value: Any) -> Any:
    """Return 3.0 as 3. A Parquet column of integers with nulls is often read as floats."""
    return (
        int(value)
        if isinstance(value, float) and abs(value) < 2**64 and value.is_integer()
        else value
    )


def whole_numbers(value: Any) -> Any:
    """Apply `whole_number` to a value, or to each item of a list."""
    return (
        [whole_number(item) for item in value] if isinstance(value, list) else whole_number(value)
    )


def list_schema(item: Json, min_items: int = 0, max_items: int | None = None) -> Json:
    """Return the JSON schema of a list of such items."""
    shortest = {"minItems": min_items} if min_items else {}
    longest = {} if max_items is None else {"maxItems": max_items}
    return {"type": "array", "items": item} | shortest | longest


def parsed_if_json(value: Any) -> Any:
    """Return the value of a JSON text; any other value unchanged. CSV files have lists and objects as JSON.

    Raises HalfSurrogate for an unpaired surrogate.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except HalfSurrogate:
        raise
    except ValueError:
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Number(Kind):
    """A number in a closed interval.

    Attributes:
        low: lower bound.
        high: upper bound.
        is_above: whether the value must differ from the lower bound.
    """

    low: float
    high: float
    is_above: bool = False
    arrow = "float64"

    def check(self, value: Any) -> float:
        is_right = is_number(value) and self.low <= value <= self.high  # not so for NaN
        if not is_right or (self.is_above and value == self.low):
            raise self.wrong(value)
        return float(value)

    def schema(self) -> Json:
        lowest = "exclusiveMinimum" if self.is_above else "minimum"
        return {"type": "number", lowest: self.low, "maximum": self.high}


@dataclass(frozen=True)
class Integer(Kind):
    """An integer.

    Attributes:
        low: lower bound; None if every integer is valid.
        high: upper bound that the form states; None without one.
        off: value that means `low`; None without one.
        max_integer: upper bound that the form does not state; its error adds it.
        takes_false: whether false counts as absent.
    """

    low: int | None
    high: int | None = None
    off: int | None = None
    max_integer: int = MAX_INTEGER
    takes_false: bool = False
    arrow = "int64"

    @property
    def nothings(self) -> tuple[Any, ...]:
        return (False,) if self.takes_false else ()

    def check(self, value: Any) -> int:
        if not is_integer(value):
            raise self.wrong(value)
        if self.low is None:
            return int(value)
        if value == self.off:
            return self.low
        if value < self.low or (self.high is not None and value > self.high):
            raise self.wrong(value)
        if value > self.max_integer:
            raise self.wrong(value, limit=self.max_integer)
        return int(value)

    def schema(self) -> Json:
        if self.low is None:
            return {"type": "integer"}
        lowest = self.low if self.off is None else min(self.low, self.off)
        if self.high is not None:
            return {"type": "integer", "minimum": lowest, "maximum": self.high}
        return {"type": "integer", "minimum": lowest, "exclusiveMaximum": self.max_integer + 1}


@dataclass(frozen=True)
class Boolean(Kind):
    """True or false.

    Attributes:
        is_off: whether only false is valid.
    """

    form: str = field(default="true or false", kw_only=True)
    is_off: bool = False
    arrow = "bool"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool) or (value and self.is_off):
            raise self.wrong(value)
        return value

    def schema(self) -> Json:
        return ({"const": False} if self.is_off else {}) | {"type": "boolean"}


@dataclass(frozen=True)
class Text(Kind):
    """A text that is not empty.

    Attributes:
        max_chars: maximum number of characters; None for no limit.
        can_be_empty: whether an empty text is valid, too.
        known: only text with a meaning, for the JSON schema; None for any text.
    """

    max_chars: int | None = None
    can_be_empty: bool = False
    known: str | None = None

    @property
    def nothings(self) -> tuple[Any, ...]:
        return () if self.can_be_empty else ("",)

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            error = self.wrong(value)
            error.needs_text = True
            raise error
        if not (value or self.can_be_empty) or not is_utf8(value):
            raise self.wrong(value)
        if self.max_chars is not None and len(value) > self.max_chars:
            raise self.wrong(value)
        return value

    def schema(self) -> Json:
        if self.known is not None:
            return {"const": self.known}
        shortest: Json = {} if self.can_be_empty else {"minLength": 1}
        longest = {} if self.max_chars is None else {"maxLength": self.max_chars}
        return {"type": "string"} | shortest | longest


@dataclass(frozen=True)
class Texts(Kind):
    """A list of texts that are not empty.

    Attributes:
        min_items: minimum number of texts.
        max_items: maximum number of texts; None for no limit.
        max_chars: maximum number of characters of a text; None for no limit.
        takes_one: whether a text by itself stands for a list of one.
    """

    min_items: int = 0
    max_items: int | None = None
    max_chars: int | None = None
    takes_one: bool = True
    arrow = "list<string>"

    @property
    def nothings(self) -> tuple[Any, ...]:
        return ("",) if self.takes_one else ()

    def check(self, value: Any) -> list[str]:
        texts = [value] if isinstance(value, str) and self.takes_one else value
        if not isinstance(texts, list) or len(texts) < self.min_items:
            raise self.wrong(value)
        item_kind = Text(self.max_chars, form=self.form)
        for i, item in enumerate(texts[: self.max_items]):
            try:
                item_kind.check(item)
            except WrongValue as error:
                # If one text is a value, too, the whole value is named.
                wrong = self.wrong(value) if self.takes_one else self.wrong(item, i)
                wrong.needs_text = error.needs_text
                raise wrong from None
        if self.max_items is not None and len(texts) > self.max_items:
            raise self.wrong(value)
        return texts

    def of_column(self, value: Any) -> Any:
        """Convert a column's value. A text by itself is one item, unless it is a JSON list of texts."""
        if isinstance(value, str):
            parsed = parsed_if_json(value)
            is_list = (
                isinstance(parsed, list)
                and parsed
                and all(isinstance(item, str) for item in parsed)
            )
            value = parsed if is_list else value
        return whole_numbers(value)

    def schema(self) -> Json:
        item = Text(self.max_chars, form=self.form).schema()
        texts = list_schema(item, self.min_items, self.max_items)
        return {"anyOf": [item, texts]} if self.takes_one else texts


@dataclass(frozen=True)
class TokenIds(Kind):
    """A list of token ids.

    Attributes:
        min_items: minimum number of ids.
        max_items: maximum number of ids; None for no limit.
    """

    min_items: int = 0
    max_items: int | None = None
    arrow = "list<int64>"

    def check(self, value: Any) -> list[int]:
        if not isinstance(value, list) or len(value) < self.min_items:
            raise self.wrong(value)
        # Most lists are right, and this finds it out without a loop in Python.
        is_right = (
            set(map(type, value)) <= {int}
            and min(value, default=0) >= 0
            and max(value, default=0) <= MAX_TOKEN_ID
        )
        if not is_right:
            for i, token in enumerate(value[: self.max_items]):
                if not is_integer(token) or token < 0:
                    raise self.wrong(token, i)
                if token > MAX_TOKEN_ID:
                    raise self.wrong(token, i, limit=MAX_TOKEN_ID)
        if self.max_items is not None and len(value) > self.max_items:
            raise self.wrong(value)
        return value

    def of_column(self, value: Any) -> Any:
        return whole_numbers(parsed_if_json(value))

    def schema(self) -> Json:
        item = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_TOKEN_ID + 1}
        return list_schema(item, self.min_items, self.max_items)


def _is_pair(value: Any) -> bool:
    """Return whether a value is a pair that begins with a token id, as a number or a text."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (int, str))


@dataclass(frozen=True)
class LogitBias(Kind):
    """Biases by token id. In JSON, token ids are texts such as "17".

    Attributes:
        max_bias: largest absolute value of a bias.
    """

    max_bias: float
    arrow = "map<int64, float64>"
    max_tokens = 1 << 16  # each is checked, and then added at every place of a draft

    def check(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise self.wrong(value)
        if len(value) > self.max_tokens:
            raise WrongValue(f"{self.form}, at most {self.max_tokens} of them", len(value))
        checked: dict[int, float] = {}
        for key, bias in value.items():
            is_number_text = isinstance(key, str) and key.isdecimal() and key.isascii()
            token = int(key) if is_number_text else key
            if not is_integer(token) or token < 0:
                raise self.wrong(key, str(key))
            if token > MAX_TOKEN_ID:
                raise self.wrong(token, str(key), limit=MAX_TOKEN_ID)
            if not is_number(bias) or not math.fabs(bias) <= self.max_bias:
                raise self.wrong(bias, str(key))
            checked[int(token)] = float(bias)
        return checked

    def of_column(self, value: Any) -> Any:
        """Return the biases by token id.

        Arrow stores a map as pairs, and a struct with a null for each token that only other rows
        have. JSON that was written from Arrow has lists of two for pairs.
        """
        value = parsed_if_json(value)
        if (
            isinstance(value, list)
            and all(map(_is_pair, value))
            and len(by_token := dict(value)) == len(value)
        ):
            value = by_token
        if isinstance(value, dict):
            return {token: whole_number(bias) for token, bias in value.items() if bias is not None}
        return value

    def schema(self) -> Json:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -self.max_bias,
                "maximum": self.max_bias,
            },
        }


@dataclass(frozen=True)
class JsonText(Kind):
    """An object, or the JSON text of one. It is kept as text, since the order of keys is the output's order."""

    @abstractmethod
    def text_of(self, value: Any) -> Any:
        """Return the JSON text of a value. Raises ValueError.

        If the text is not JSON, the error's message becomes the reason of the WrongValue.
        """

    def check(self, value: Any) -> str:
        try:
            return str(self.text_of(value))
        except (JsonError, json.JSONDecodeError) as error:
            raise WrongValue(self.form, value, reason=str(error)) from None
        except ValueError:
            raise self.wrong(value) from None

    def of_column(self, value: Any) -> Any:
        return whole_number(parsed_if_json(value))


@dataclass(frozen=True)
class JsonSchema(JsonText):
    def text_of(self, value: Any) -> Any:
        return schema_text(value)

    @property
    def nothings(self) -> tuple[Any, ...]:
        return ("",)  # {} is a schema

    def schema(self) -> Json:
        return {"anyOf": [{"type": ["object", "boolean"]}, JSON_TEXT]}


@dataclass(frozen=True)
class ResponseFormat(JsonText):
    """OpenAI's response_format."""

    def text_of(self, value: Any) -> Any:
        return response_format_text(value)

    @property
    def nothings(self) -> tuple[Any, ...]:
        return ("", {})

    def schema(self) -> Json:
        any_schema: Json = {"type": ["object", "boolean"]}
        # These keys say nothing of an answer.
        labels: Json = {
            "name": {},
            "description": {},
            "strict": {},
        }
        return {
            "anyOf": [
                _format_schema("text"),
                _format_schema("json_object"),
                _format_schema("json_object", schema={"type": "object"}),
                _format_schema("json_schema", schema=any_schema, **labels),
                _format_schema(
                    "json_schema", json_schema=object_schema(schema=any_schema, type={}, **labels)
                ),
                JSON_TEXT,
            ]
        }


@dataclass(frozen=True)
class Checked(Kind):
    """A value that a function checks.

    Attributes:
        function: returns the plain form of a value, or raises ValueError that begins with the wrong
            part's place.
        json: JSON schema of a value.
    """

    function: Callable[[Any], Any] = lambda value: value
    json: Json = field(default_factory=dict)

    def check(self, value: Any) -> Any:
        return self.function(value)

    def schema(self) -> Json:
        return self.json


def object_schema(**properties: Json) -> Json:
    """Return the JSON schema of an object. A property is required if its schema is not empty."""
    required = [name for name, schema in properties.items() if schema]
    others = {"type": "null"}
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": others,
    }


def _format_schema(format_type: str, **properties: Json) -> Json:
    """Return the JSON schema of a response_format of this type."""
    return object_schema(type={"const": format_type}, **properties)


@dataclass(frozen=True)
class CallArguments(Kind):
    """The arguments of a tool call, as text. The chat template gets a text that is no JSON object unchanged."""

    def check(self, value: Any) -> str:
        text: str = Text(form=self.form, can_be_empty=True).check(value)
        try:
            template_arguments(text)
        except HalfSurrogate as error:
            raise WrongValue(self.form, value, reason=str(error)) from None
        return text

    def schema(self) -> Json:
        return {"type": "string"}


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a fixed set of texts."""

    values: tuple[str, ...]

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise self.wrong(value)
        return value

    def schema(self) -> Json:
        values = {"const": self.values[0]} if len(self.values) == 1 else {"enum": [*self.values]}
        return values | {"type": "string"}


@dataclass(frozen=True)
class Metadata(Kind):
    """A mapping of texts to texts, limited in size."""

    max_pairs: int
    max_key_chars: int
    max_value_chars: int

    def check(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self.wrong(value)
        for key, text in value.items():
            if len(key) > self.max_key_chars:
                raise self.wrong(key, key)
            if not isinstance(text, str) or len(text) > self.max_value_chars:
                raise self.wrong(text, key)
        if len(value) > self.max_pairs:
            raise self.wrong(value)
        return value

    def schema(self) -> Json:
        return {
            "type": "object",
            "maxProperties": self.max_pairs,
            "propertyNames": {"maxLength": self.max_key_chars},
            "additionalProperties": {"type": "string", "maxLength": self.max_value_chars},
        }


@dataclass(frozen=True)
class Either(Kind):
    """A value that is valid for one of several kinds. The first kind that accepts it is used.

    If no kind accepts a value, the error shows the whole value.

    Attributes:
        kinds: kinds to try, in order.
        empties: values that count as absent.
    """

    kinds: tuple[Kind, ...]
    empties: tuple[Any, ...] = ()

    @property
    def nothings(self) -> tuple[Any, ...]:
        return self.empties

    def check(self, value: Any) -> Any:
        for kind in self.kinds:
            try:
                return kind.check(value)
            except WrongValue as error:
                if error.reason is not None:
                    raise
        raise self.wrong(value)

    def schema(self) -> Json:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True)
class ListOf(Kind):
    """A list of values of one kind. Errors of its items have the list's form.

    Attributes:
        item: kind of an item.
        min_items: minimum number of items.
    """

    item: Kind
    min_items: int = 0

    def check(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < self.min_items:
            raise self.wrong(value)
        checked: list[Any] = []
        try:
            for item in value:
                checked.append(self.item.check(item))
        except WrongValue as error:
            steps = (len(checked), *error.steps)
            raise WrongValue(self.form, error.value, steps, error.reason) from None
        return checked

    def schema(self) -> Json:
        return list_schema(self.item.schema(), self.min_items)


@dataclass(frozen=True)
class Continuations(Kind):
    """A list whose items are texts or lists of token ids. A column may hold it as JSON text."""

    def check(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.wrong(value)
        if set(map(type, value)) == {str}:
            for i, text in enumerate(value):
                if not is_utf8(text):
                    raise self.wrong(text, i)
            return value
        item_kind = Either(
            (Text(form=self.form, can_be_empty=True), TokenIds(form=self.form)), form=self.form
        )
        return [self.part(item_kind, item, i) for i, item in enumerate(value)]

    def of_column(self, value: Any) -> Any:
        value = parsed_if_json(value)
        if not isinstance(value, list):
            return whole_number(value)
        return [whole_numbers(item) if isinstance(item, list) else item for item in value]

    def schema(self) -> Json:
        ids = TokenIds(form=self.form).schema()
        return list_schema({"anyOf": [{"type": "string"}, ids]}, 1)


@dataclass(frozen=True)
class AnyObject(Kind):
    """An object with any keys.

    Attributes:
        is_empty: whether only nulls may be values, because no key has a meaning.
    """

    is_empty: bool = False

    def check(self, value: Any) -> Json:
        if not isinstance(value, dict):
            raise self.wrong(value)
        return value

    def schema(self) -> Json:
        return {
            "type": "object",
            "additionalProperties": {"type": "null"} if self.is_empty else True,
        }


@dataclass(frozen=True)
class Object(Kind):
    """An object with given keys. A key that is null is absent. Errors of its values have the object's form.

    Attributes:
        name: name of its JSON schema.
        keys: kinds of the values, by key.
        required: keys that must be present.
        defaults: defaults of the other keys, where they are not null.
        is_open: whether further keys are valid and kept unchanged.
        about: description for the OpenAPI document.
    """

    name: str
    keys: Mapping[str, Kind]
    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False
    about: str = ""

    def check(self, value: Any) -> Json:
        if not isinstance(value, dict):
            raise self.wrong(value)
        given = {key: inner for key, inner in value.items() if inner is not None}
        checked: Json = {}
        for key, kind in self.keys.items():
            if key in given:
                checked[key] = self.part(kind, given[key], key)
            elif key in self.required:
                raise self.wrong(given, key)
        others = {key: inner for key, inner in given.items() if key not in self.keys}
        if others and not self.is_open:
            key, inner = next(iter(others.items()))
            raise self.wrong(inner, key)
        return given | checked

    def schema(self) -> Json:
        return {"$ref": f"#/components/schemas/{self.name}"}


def plain_value(value: Any, opened: Callable[[Any], Any] = lambda value: value) -> Any:
    """Convert values of NumPy, torch and pandas, tuples and sets to Python's numbers and lists, at any depth.

    A missing value of pandas becomes None.

    Args:
        value: value to convert.
        opened: function that returns the parts of further types of objects. It is called first, for
            every value.
    """
    value = opened(value)
    if type(value).__name__ in PANDAS_NULLS:
        return None
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_plain_key(key): plain_value(inner, opened) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        is_plain = set(map(type, value)) <= {int, float, str}
        return list(value) if is_plain else [plain_value(inner, opened) for inner in value]
    return value


def _plain_key(key: Any) -> Any:
    """Return the plain form of a key. A tuple or a set stays, since a list cannot be a key."""
    return key if isinstance(key, tuple | frozenset) else plain_value(key)


def json_text(where: str, value: Any, scalar_text: Callable[[Any], str] = str) -> str:
    """Return the JSON text of a row's value.

    Raises RequestError for a key that is not a text, as maps of Parquet files and dictionaries of
    Python may have, and for bytes that scalar_text cannot write.

    Args:
        where: place of the value, with which an error begins.
        value: value to write.
        scalar_text: function that returns the text of a value that JSON lacks, such as a date.
    """
    try:
        return dump_json(value, ensure_ascii=False, default=scalar_text)
    except TypeError:
        raise RequestError(
            "bad_type", f"{where}: a key of an object is no text. Make its keys texts."
        ) from None
    except UnicodeDecodeError:
        raise RequestError(
            "bad_encoding", f"{where} holds bytes that are not UTF-8 text: cast it to a text"
        ) from None


def json_error(where: str, error: ValueError) -> RequestError:
    """Return the RequestError for an error of the JSON parser."""
    return RequestError(
        "bad_encoding" if isinstance(error, HalfSurrogate) else "bad_json", f"{where}: {error}"
    )


def describe_value(value: Any) -> str:
    """Return a value and its type, shortened for a message."""
    text = repr(value[:61] if isinstance(value, str) else value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def describe_wrong(name: str, value: Any, error: WrongValue) -> str:
    """Return a shortened value. If it has several parts, the text says which of them is wrong.

    Args:
        name: name of the parameter.
        value: whole value.
        error: error that locates the wrong part.
    """
    shown = reprlib.repr(value)
    has_parts = isinstance(value, list | tuple | dict) and len(value) > 1
    if error.steps and has_parts:
        shown += f", where {place_text((name, *error.steps))} is {reprlib.repr(error.value)}"
    return f"{shown}{error.why}"


def checked(name: str, kind: Kind, value: Any) -> Any:
    """Return the plain form of a parameter's value in a body. Raises RequestError that locates the fault."""
    try:
        return kind.check(value)
    except WrongValue as error:
        named = (step for step in error.steps if isinstance(step, int) or step.isidentifier())
        param = place_text((name, *named))  # a step that is no name is left out
        if error.problem is not None:
            code = "unsupported_parameter" if error.is_unsupported else "bad_value"
            raise RequestError(code, f"{param}{error.problem}", param) from None
        subject = "" if param == name else f"{name} "
        problem = f"{subject}must be {error.form}, got {reprlib.repr(error.value)}{error.why}"
        raise bad_value(param, problem) from None


def bad_value(param: str, problem: str) -> RequestError:
    return RequestError("bad_value", f"{param}: {problem}", param)


def missing(param: str, kind: Kind) -> RequestError:
    return RequestError("missing", f"{param}: missing; it must be {kind.form}", param)


def unsupported(param: str, fix: str) -> RequestError:
    return RequestError("unsupported_parameter", f"{param} is not supported: {fix}", param)
