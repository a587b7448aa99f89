"""Code that ``local``, ``s3`` and ``remote`` share: versions of files, errors and globs.

Errors of object storage are raised after all retries have failed, and name the object and the
endpoint. Local files raise the system's own OSError.
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
    """Return advice on a failed write, to be the last sentence of a message."""
    again = "run the same command again to resume"
    return (
        f"Free some space there, then {again}."
        if error.errno in DISK_FULL
        else f"{again.capitalize()}."
    )


class StorageError(OSError):
    """A request to the storage failed in spite of retries."""


class NotFound(StorageError, FileNotFoundError):
    """The object does not exist.

    Attributes:
        of_bucket: whether even its bucket does not exist.
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
    """Return whether an error means that the whole bucket is missing, so that nothing is known about its files."""
    return isinstance(error, NotFound) and error.of_bucket


def check_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if it means that the whole bucket is missing."""
    if is_bucket_missing(error):
        raise error


class FileDamaged(Exception):
    """A file of a run was changed after it was written."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Version of a file's content, for comparison: its size, and the time or ETag of its last write.

    Attributes:
        size: size in bytes.
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
        """Return a text that changes whenever the file does."""
        if self.changed_ns is None:
            return f"{self.size}-{self.version}"
        return f"{self.inode}-{self.size}-{self.version}-{self.changed_ns}"

    def as_json(self) -> dict[str, int | str]:
        return {
            "size": self.size,
            "etag" if isinstance(self.version, str) else "mtime_ns": self.version,
        }


class ReadOnlyFile(io.RawIOBase):
    """Base class of seekable read-only files. A subclass returns the next bytes, at most `size`, from `_read`."""

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
    """Return whether the parts of a path match a glob, by the standard library's rules, without looking at files.

    ** matches any number of parts. Neither it nor * matches a hidden name.

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
