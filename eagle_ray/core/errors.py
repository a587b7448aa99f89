"""What goes wrong: one request, the engine itself, or what a user has configured.

Anything else that is raised is a bug and is not caught, but where one row must not end a job
(``batch/worker/worker.py``) nor one sequence that the engine cannot add everybody else's (``engine/async_engine.py``).
"""

import json
import re

WIDE_ENCODINGS = ("UTF-16", "UTF-32")
ENCODING_BYTES = 64  # of a file's start that tell its encoding
# torch says either, of a device or of the host, in a RuntimeError of one class or another
OUT_OF_MEMORY = re.compile(r"out of memory|alloc\w* .*memory|OutOfMemoryError|MemoryError|_ALLOC_FAILED", re.IGNORECASE)


class RequestError(Exception):
    """This request cannot be answered; every other one can.

    Attributes:
        code: a short stable name such as ``prompt_too_long`` (the ``error_code`` column, OpenAI's ``code``).
        param: the parameter at fault, if it is known.
    """

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param

    def __reduce__(self):
        return type(self), (self.code, str(self), self.param)


class EngineError(Exception):
    """The engine can no longer answer anything: its process should end."""


class RankError(EngineError):
    """One of an engine's processes has ended, hangs, or has computed something else than the others."""


class ConfigError(Exception):
    """Invalid usage or configuration: the job did not start (exit code 2)."""


class UnfitDevice(ConfigError):
    """This worker's devices cannot run the engine that is asked for; those of another worker may."""


def shortened(text: str, max_chars: int = 200) -> str:
    """Return the text, or its beginning and its length if it has more characters than `most`."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """Return another library's error message in one line."""
    return " ".join(str(error).split())


def wide_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if a text file with these first bytes is written so, with or without a byte order mark.

    >>> wide_encoding("id".encode("utf-16")), wide_encoding(b"id")
    ('UTF-16', None)
    """
    codec = json.detect_encoding(start)
    name = codec[:6].upper()
    if name not in WIDE_ENCODINGS or "\0" in start.decode(codec, "ignore"):  # a run of zeros is no text
        return None
    return name
