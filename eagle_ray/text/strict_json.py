r"""Parse JSON strictly, with equal results in every process.

``parse_json`` also refuses JSON that some reader would lose or fail at: NaN and Infinity, a key
that an object has twice, integers of thousands of digits, half surrogates (an escape such as \ud83d
without its second half, which no UTF-8 text can hold) and deep nesting. Python's own nesting limit
depends on the calls above it: the driver would accept a row that a worker, with a deeper stack,
refuses. So nesting is limited far below that.

    >>> parse_json('{"prompt": "Hi"}')
    {'prompt': 'Hi'}
    >>> parse_json('{"prompt": ["Hi", "cut \\ud83d"]}')
    Traceback (most recent call last):
    ...
    eagle_ray.text.strict_json.HalfSurrogate: prompt[1]: half a surrogate: \ud83d without its second
        half. Write it...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from json import scanner
from typing import Any, NoReturn

MAX_JSON_DEPTH = 200  # lists and objects in each other
# Characters of a text that json's C code reads in one call, within a hundredth of a second.
MAX_WHOLE_CHARS = 1 << 16
Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


class JsonError(ValueError):
    """A text is valid for Python's json module and refused all the same."""


class HalfSurrogate(JsonError):
    """A text has half a surrogate pair.

    Args:
        place: location of the text in the checked value; for a key, location of its object.
    """

    def __init__(self, place: Place, text: str):
        half = next(character for character in text if "\ud800" <= character <= "\udfff")
        self.place = place
        problem = f"half a surrogate: \\u{ord(half):04x} without its second half. Write it whole"
        super().__init__(f"{where}: {problem}" if (where := place_text(place)) else problem)


def parse_json(text: str) -> Any:
    """Parse JSON. Raises json.JSONDecodeError or JsonError, both ValueErrors that say what is wrong."""
    return _parse(text, _STRICT)


def parse_json_line(text: str) -> Any:
    """Parse a line of JSONL, in which NaN and Infinity are allowed, since Python and pandas write
    them. Raises as parse_json."""
    return _parse(text, _WITH_NAN)


class _Decoders:
    """Decoders of short and of long texts.

    json's C code holds Python's lock until it returns. A long text is therefore read by json's
    scanner in Python, which takes three times as long and lets other threads run.
    """

    def __init__(self, **hooks: Any):
        self._short = json.JSONDecoder(object_pairs_hook=_object, **hooks)
        self._long = json.JSONDecoder(object_pairs_hook=_object, **hooks)
        self._long.scan_once = scanner.py_make_scanner(self._long)  # type: ignore[attr-defined]  # missing in typeshed

    def decode(self, text: str) -> Any:
        return (self._short if len(text) <= MAX_WHOLE_CHARS else self._long).decode(text)


def _parse(text: str, decoders: _Decoders) -> Any:
    try:
        value = decoders.decode(text)
    except RecursionError:
        raise _depth_error() from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string" in str(error):  # Python's own text names a function of Python
            raise JsonError("an integer has thousands of digits: write it as a text") from None
        raise
    if (
        "\\ud" in text
        or "\\uD" in text
        or text.count("[") + text.count("{") > MAX_JSON_DEPTH
        or not is_utf8(text)
    ):
        check_texts(value)
    return value


def check_texts(value: Any) -> None:
    """Check the texts of a value that may not come from JSON, for example a Python caller's.

    Raises HalfSurrogate for a text or a key with half a surrogate pair, and JsonError for nesting
    that parse_json refuses.
    """
    level: list[tuple[Place, Any]] = [((), value)]
    for _ in range(MAX_JSON_DEPTH + 1):
        for place, item in level:
            if isinstance(item, str) and not is_utf8(item):
                raise HalfSurrogate(place, item)
        containers = [(place, item) for place, item in level if not isinstance(item, str)]
        if not containers:
            return
        level = [
            inner
            for place, container in containers
            for inner in _texts_and_containers(place, container)
        ]
    raise _depth_error()


def place_text(place: Place) -> str:
    """Format a location for messages: ``messages[0].content``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "".join(steps).removeprefix(".")


def _texts_and_containers(place: Place, container: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the items of a list or an object that are texts, lists or objects. Raises HalfSurrogate for a key."""
    if isinstance(container, Mapping):
        for key in container:
            if isinstance(key, str) and not is_utf8(key):
                raise HalfSurrogate(place, key)
    elif not isinstance(container, list | tuple):
        return
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for step, item in items:
        if isinstance(item, str | list | tuple | Mapping):
            yield (*place, step), item


def is_utf8(text: str) -> bool:
    """Return whether the text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise JsonError(f"key {twice[:60]!a} is given more than once in one object: keep one")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a number of JSON: write null, or leave the key out")


def _depth_error() -> JsonError:
    return JsonError(
        f"its lists and objects stand more than {MAX_JSON_DEPTH} deep in each other: flatten it"
    )


_STRICT = _Decoders(parse_constant=_refuse_constant)  # json.loads makes a decoder for each call
_WITH_NAN = _Decoders()
