"""Exceptions: for one request, for the engine, and for a user's configuration.

Any other exception is a bug. It is caught in two places only: one row must not end a job
(``batch/worker/worker.py``), and one sequence that the engine cannot add must not end the others
(``engine/async_engine.py``).
"""

import json
import re
from collections.abc import Container

WIDE_ENCODINGS = ("UTF-16", "UTF-32")
ENCODING_BYTES = 64  # bytes of a file's start that tell its encoding
# torch says either, of a device or of the host, in a RuntimeError of one class or another
OUT_OF_MEMORY = re.compile(
    r"out of memory|alloc\w* .*memory|OutOfMemoryError|MemoryError|_ALLOC_FAILED", re.IGNORECASE
)


class RequestError(Exception):
    """One request cannot be answered. Other requests are not affected.

    Attributes:
        code: a short stable name such as ``prompt_too_long`` (the ``error_code`` column, OpenAI's
            ``code``).
        param: the parameter at fault, if it is known.
    """

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param

    def __reduce__(self):
        return type(self), (self.code, str(self), self.param)


# Codes of errors whose messages hold nothing of a row but numbers and the names of columns.
VALUE_FREE = frozenset(
    [
        "prompt_missing",
        "prompt_ambiguous",
        "prompt_empty",
        "prompt_too_long",
        "field_missing",
        "kv_space",
        "timeout",
        "worker_died",
        "earlier_turn_failed",
        "grammar_queue_full",
        "no_chat_template",
        "no_tokenizer",
    ]
)
_WHAT = {  # is wrong, by code: said where values are private
    "bad_csv": "the record is not CSV",
    "bad_encoding": "it holds bytes or half characters that are not UTF-8 text",
    "bad_grammar": "the grammar or schema cannot be used",
    "bad_json": "it is not JSON as it must be",
    "bad_messages": "the chat template refuses the messages",
    "bad_role": "a message has no role that is known",
    "bad_token_id": "a token id is not in the target's vocabulary",
    "bad_type": "a value is not of the type that it must have",
    "earlier_run_failed": "it is an error row of the first run",
    "grammar_limit": "the grammar cannot go on",
    "internal_error": "an internal error, which please report",
    "unsupported_parameter": "it asks for what is not supported",
}
_FIRST_NAME = re.compile(r"(?:columns? )?'?(?:body\.)?(\w+)")


def without_values(error: RequestError, names: Container[str] = ()) -> RequestError:
    """Return an error without quoted values in its message, for runs that do not store prompts.

    A message is assumed to quote values unless its code is in VALUE_FREE.

    Args:
        names: column names that may be shown, because the configuration or this package names them.

        >>> print(without_values(RequestError("bad_type", "column 'prompt' must be a text, got ['x']"), {"prompt"}))
        column 'prompt': a value is not of the type that it must have. The value is not shown, as ...
    """
    if error.code in VALUE_FREE:
        return error
    first = _FIRST_NAME.match(str(error))
    place = f"column {first[1]!r}: " if first is not None and first[1] in names else ""
    what = _WHAT.get(error.code, "a value is not as it must be")
    return RequestError(
        error.code,
        f"{place}{what}. The value is not shown, as output.store_prompt is false. To see it, run eagle-ray validate "
        "with --set output.store_prompt=true",
    )


class EngineError(Exception):
    """The engine has failed for good and its process should end."""


class RankError(EngineError):
    """A rank of an engine has ended, hangs, or has computed a result that differs from the others'."""


class ConfigError(Exception):
    """Invalid usage or configuration: the job did not start (exit code 2)."""


class UnfitDevice(ConfigError):
    """The devices of this worker cannot run the engine. Those of another worker may."""


def shortened(text: str, max_chars: int = 200) -> str:
    """Return the text; if it has more characters than `most`, its beginning and its length."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """Return another library's error message in one line."""
    return " ".join(str(error).split())


def first_line_of(error: BaseException) -> str:
    """Return the first line of another library's error, without torch's stack of C++ calls."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def wide_encoding(start: bytes) -> str | None:
    """Return "UTF-16" or "UTF-32" if a text file with these first bytes is in that encoding, with
    or without a byte order mark.

    >>> wide_encoding("id".encode("utf-16")), wide_encoding(b"id")
    ('UTF-16', None)
    """
    codec = json.detect_encoding(start)
    name = codec[:6].upper()
    # A run of zero bytes is no text.
    if name not in WIDE_ENCODINGS or "\0" in start.decode(codec, "ignore"):
        return None
    return name
