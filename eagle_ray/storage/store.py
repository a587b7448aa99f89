"""What ``local``, ``s3`` and ``remote`` share: versions of files, errors and globs.

An error of object storage is a request that failed after all retries. Its message names the object
and the endpoint. Local files raise the system's own OSError.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# The last look before a write: what it raises leaves everything as it was.
Precondition = Callable[[], None] | None


def remedy_of(error: OSError) -> str:
    """Return advice for a failed write, as the last sentence of a message."""
    again = "run the same command again to resume"
    return (
        f"Free some space there, then {again}."
        if error.errno in DISK_FULL
        else f"{again.capitalize()}."
    )


class StorageError(OSError):
    """A request failed in spite of retries, because of the storage itself."""


class NotFound(StorageError, FileNotFoundError):
    """The object does not exist.

    Attributes:
        of_bucket: its bucket does not exist either.
    """

    of_bucket = False


class NotAllowed(StorageError, PermissionError):
    """The credentials are missing or not sufficient."""


class StorageTimeout(StorageError, TimeoutError):
    """The server did not respond in time."""


class ConditionFailed(StorageError):
    """A condition of the request did not hold: the object exists, or has another version."""


class NotSupported(StorageError):
    """The server lacks a feature, such as conditional writes; a retry does not help."""


class ObjectChanged(StorageError):
    """The object was replaced while it was read."""


def is_bucket_missing(error: OSError) -> bool:
    """Return whether a whole bucket is missing: then nothing is known of its files."""
    return isinstance(error, NotFound) and error.of_bucket


def check_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if a whole bucket is missing."""
    if is_bucket_missing(error):
        raise error


class FileDamaged(Exception):
    """A file of a run does not hold the bytes that were written."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The size of a file and when, or as what, it was written. Two are equal if these are.

    Attributes:
        size: bytes.
        version: time of the last change in nanoseconds (local), or the ETag (S3).
        inode: inode of a local file, None elsewhere.
        changed_ns: ctime of a local file, which the system sets at each change of the content or
            the inode, and which no program can set; None elsewhere.

        >>> FileVersion(12, 1700000000000000000).as_json()
        {'size': 12, 'mtime_ns': 1700000000000000000}
    """

    size: int
    version: int | str
    inode: int | None = field(default=None, compare=False)
    changed_ns: int | None = field(default=None, compare=False)

    @property
    def state(self) -> str:
        """Return a text that any change of the file changes."""
        if self.changed_ns is None:
            return f"{self.size}-{self.version}"
        return f"{self.inode}-{self.size}-{self.version}-{self.changed_ns}"

    def as_json(self) -> dict[str, int | str]:
        return {
            "size": self.size,
            "etag" if isinstance(self.version, str) else "mtime_ns": self.version,
        }


class ReadOnlyFile(io.RawIOBase):
    """A seekable file whose subclass returns its next bytes, at most `size`, from `_read`."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        raise NotImplementedError


def glob_matches(pattern: list[str], name: list[str]) -> bool:
    """Match part by part, as the standard library's glob does, without looking at files.

    ** is any number of parts; neither it nor * matches a hidden name.

        >>> glob_matches(["**", "*.jsonl"], ["a", "b.jsonl"])
        True
    """
    if not pattern:
        return not name
    first, *rest = pattern
    is_hidden = bool(name) and name[0].startswith(".") and not first.startswith(".")
    has_part = bool(name) and not is_hidden
    if first == "**":
        return glob_matches(rest, name) or (has_part and glob_matches(pattern, name[1:]))
    return has_part and fnmatchcase(name[0], first) and glob_matches(rest, name[1:])
