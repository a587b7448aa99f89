"""RunnerLease: which process runs a batch, so that two processes do not both compute its answers.

It saves work and nothing else: what keeps answers single is the log (``answer_log``). So a lease may be taken over
without a look at clocks of other machines: its holder rewrites it every few seconds, and a lease that looks
the same for LEASE_S on the observer's own clock is free. On one machine a holder that has ended is seen at once.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from eagle_ray.runs.lease import Process
from eagle_ray.storage.path import FileVersion, StoragePath, json_bytes

LEASE_S = 30.0
RENEW_EVERY_S = 5.0


class RunnerLease:
    """The lease in one file. Keep the object while another process holds it: it remembers since when. Blocks."""

    def __init__(self, file: StoragePath):
        self._file = file
        self._token = secrets.token_hex(8)
        self._beat = 0
        self._version: FileVersion | None = None
        self._renewed_at = 0.0
        self._seen: tuple[Any, float] | None = None  # another holder's state, and when it was first seen

    def take(self) -> bool:
        """Take the lease if it is free; return whether this process holds it."""
        if self._create():
            return True
        try:
            data, version = self._file.read_with_version()
        except FileNotFoundError:
            return self._create()
        return self._is_stale(_parsed(data)) and self._replace(version)

    def renew(self) -> bool:
        """Write the lease again if that is due; return False if another process has taken it."""
        if time.monotonic() - self._renewed_at < RENEW_EVERY_S:
            return True
        assert self._version is not None, "renew follows take"
        return self._replace(self._version)

    def release(self) -> None:
        """Give the lease back if this process holds it."""
        with suppress(FileNotFoundError):
            if _parsed(self._file.read_bytes()).get("token") == self._token:
                self._file.remove()

    def _is_stale(self, found: dict[str, Any]) -> bool:
        try:
            if Process(**found["process"]).is_gone():
                return True
        except (KeyError, TypeError):
            pass  # not a lease of ours: watched like one
        now = time.monotonic()
        if self._seen is None or self._seen[0] != found:
            self._seen = found, now
        return now - self._seen[1] > LEASE_S

    def _create(self) -> bool:
        return self._written(self._file.create(self._content()))

    def _replace(self, version: FileVersion) -> bool:
        return self._written(self._file.replace(self._content(), version.version))

    def _content(self) -> bytes:
        self._beat += 1
        return json_bytes({"token": self._token, "beat": self._beat, "process": asdict(Process.current())})

    def _written(self, version: FileVersion | None) -> bool:
        if version is not None:
            self._version, self._renewed_at = version, time.monotonic()
        return version is not None


def _parsed(data: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}
