"""FileVersion: distinguishes states of a file without reading it.

>>> FileVersion(12, 1700000000000000000).as_json()
{'size': 12, 'mtime_ns': 1700000000000000000}
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The size of a file and when, or as what, it was written. Two are equal if these are.

    Attributes:
        size: bytes.
        version: time of the last change in nanoseconds (local), or the ETag (S3).
        inode: of a local file, None elsewhere.
        changed_ns: ctime of a local file, which the system sets at each change of the content or the inode, and which
            no program can set; None elsewhere.
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
        return {"size": self.size, "etag" if isinstance(self.version, str) else "mtime_ns": self.version}
