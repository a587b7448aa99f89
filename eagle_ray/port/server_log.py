"""ServerLog: summarise the log of another engine's server, without timestamps and stack traces.

    log = ServerLog()
    log.add("(EngineCore pid=7) ERROR 11-30 09:05:02 [core.py:15] ValueError: no memory is left")
    log.summary()      # "ValueError: no memory is left"

A server that fails prints one stack trace for each of its processes, and the first has the cause.
So the summary begins with the first error.
"""

from __future__ import annotations

import re
from collections import deque

from eagle_ray.core.errors import shortened

LAST_LINES = 6
MAX_LINE = 500  # characters
SILENT = "it has logged nothing"
# "(APIServer pid=7) ", "INFO 11-30 09:03:44 [model.py:733] ", "[2026-11-30 09:03:44 TP0] ", "INFO:     "
STAMPS = (
    re.compile(r"^\([\w .:-]*pid=\d+\)\s?"),
    re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d\s+)?"),
    re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s?"),
    re.compile(r"^\[\w+\.py:\d+\]\s?"),
)
STACK_LINE = re.compile(r"^\s|^Traceback \(most recent call last\)|^[\s^~]*$|^During handling of")
ERROR_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")


class ServerLog:
    """The messages of a server so far: the first error, and the last few."""

    def __init__(self) -> None:
        self._first_error = ""
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def add(self, line: str) -> str:
        """Add a line of the log, and return its message; "" for a line of a stack trace or without words."""
        message = message_of(line)
        if not message:
            return ""
        if not self._first_error and ERROR_LINE.match(message):
            self._first_error = message
        if not self._last or self._last[-1] != message:
            self._last.append(message)
        return message

    def summary(self) -> str:
        """Return the first error and the last messages, in one line."""
        last = [message for message in self._last if message != self._first_error]
        first = [self._first_error] if self._first_error else []
        return " | ".join([*first, *last]) or SILENT


def message_of(line: str) -> str:
    """Return a log line without its timestamp and logger; "" if it belongs to a stack trace."""
    rest = line.rstrip()
    before = ""
    while rest != before:
        before = rest
        for stamp in STAMPS:
            rest = stamp.sub("", rest)
    return "" if STACK_LINE.match(rest) else shortened(rest, MAX_LINE)
