"""FileVersion: distinguishes states of a file without reading it.

>>> FileVersion(12, 1700000000000000000).as_json()
{'size': 12, 'mtime_ns': 1700000000000000000}
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileVersion:
    """size: bytes. version: time of the last change in nanoseconds (local), or the ETag (S3)."""

    size: int
    version: int | str

    def as_json(self) -> dict[str, int | str]:
        return {"size": self.size, "etag" if isinstance(self.version, str) else "mtime_ns": self.version}


@dataclass(frozen=True, slots=True)
class FileState:
    """A local file's inode, size and times as one text, which any change of the file changes.

    changed_ns: its ctime, which the system sets at each change of the content or the inode.
    """

    text: str
    changed_ns: int
