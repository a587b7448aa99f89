"""StoragePath: the name of a file or directory, here or in an S3 bucket, and all that is done with it.

What is written appears whole or not at all. The work is done by ``local_files`` and ``s3_objects``, which have the same
functions; nothing is remembered between calls, so that what another machine wrote is seen. Whatever fails is an
OSError; on S3 a StorageError, within a time limit.

    >>> output = StoragePath.of("s3://bucket/runs/a")
    >>> (output / "data").glob("*.parquet")
    [StoragePath('s3://bucket/runs/a/data/part-001-000000.parquet')]
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.storage import local
from eagle_ray.storage.file_version import FileVersion
from eagle_ray.storage.storage_errors import NotFound, StorageError, StorageTimeout

__all__ = [
    "FileVersion",
    "NotFound",
    "StorageError",
    "StoragePath",
    "StorageTimeout",
    "json_bytes",
    "parquet_bytes",
    "read_json",
    "read_json_object",
    "write_json",
]

Precondition = Callable[[], None] | None
SCHEME = "s3://"


@dataclass(frozen=True, slots=True, order=True)
class StoragePath:
    """text: an absolute local path or s3://bucket/key, without a slash at its end; it is how the location reads."""

    text: str

    @classmethod
    def of(cls, text: str | os.PathLike[str]) -> StoragePath:
        """Local paths become absolute. Raises ValueError for a URL that is none of S3."""
        text = os.fspath(text)
        if text.startswith(SCHEME) and text.removeprefix(SCHEME).partition("/")[0]:
            return cls(text.rstrip("/"))
        if "://" in text:
            raise ValueError(f"{text!r} is neither a local path nor s3://bucket/key")
        return cls(os.path.abspath(os.path.expanduser(text)))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"StoragePath({self.text!r})"

    def __truediv__(self, name: str) -> StoragePath:
        return StoragePath(f"{self.text.rstrip('/')}/{name}")

    @property
    def is_local(self) -> bool:
        return not self.text.startswith(SCHEME)

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> StoragePath:
        """The directory it stands in; the root, or a bucket, is its own."""
        if self.is_local:
            return StoragePath(os.path.dirname(self.text))
        return StoragePath(self.text.rpartition("/")[0]) if "/" in self.text.removeprefix(SCHEME) else self

    def relative_to(self, directory: StoragePath) -> str | None:
        """Its path below a directory, "" for the directory itself, None where it is elsewhere. Follows local links."""
        here, there = (os.path.realpath(x.text) if x.is_local else x.text for x in (self, directory))
        if here == there:
            return ""
        start = there.rstrip("/") + "/"
        return here.removeprefix(start) if here.startswith(start) else None

    @property
    def display_path(self) -> str:
        """For a person: relative to the working directory where it stands beneath it."""
        return self.relative_to(StoragePath.of(os.curdir)) or self.text

    def exists(self) -> bool:
        """Whether it is a file."""
        return self._store.is_file(self.text)

    def is_directory(self) -> bool:
        """On S3: whether any file stands below."""
        return self._store.is_directory(self.text)

    def stat(self) -> FileVersion:
        """Raises FileNotFoundError."""
        return self._store.stat(self.text)

    def read_bytes(self) -> bytes:
        """Raises FileNotFoundError."""
        return self.read_with_version()[0]

    def read_with_version(self) -> tuple[bytes, FileVersion]:
        """The bytes, and the stamp of the very file that held them. Raises FileNotFoundError."""
        return self._store.read_with_version(self.text)

    def open(self) -> BinaryIO:
        """A seekable binary file to read from; large files are read in parts. Raises FileNotFoundError."""
        return self._store.open_file(self.text)

    def glob(self, pattern: str) -> list[StoragePath]:
        """The files below that match, sorted."""
        return list(self.list_versions(pattern))

    def list_versions(self, pattern: str | None = None) -> dict[StoragePath, FileVersion]:
        """The files below that match, or all of them, sorted, each with its stamp."""
        store = self._store
        found = store.list_files(self.text) if pattern is None else store.glob(self.text, pattern)
        return {StoragePath(text): found[text] for text in sorted(found)}

    def list_names(self) -> list[str]:
        """What stands directly in this directory, files and directories."""
        return self._store.list_names(self.text)

    def write_atomic(self, data: bytes, precondition: Precondition = None) -> FileVersion:
        """Replace the file in one step. precondition: the last look; what it raises leaves everything as it was."""
        return self._store.write_atomic(self.text, data, precondition)

    def create(self, data: bytes, precondition: Precondition = None) -> FileVersion | None:
        """Write the file where there is none, in one step; None where there is one."""
        return self._store.create(self.text, data, precondition)

    def replace(self, data: bytes, version: int | str, precondition: Precondition = None) -> FileVersion | None:
        """Replace the file where it is still of this version (a Stamp's); None where it is not."""
        return self._store.replace(self.text, data, version, precondition)

    def remove(self, missing_ok: bool = True) -> None:
        self._store.remove(self.text, missing_ok)

    def make_directory(self) -> None:
        """With its parents. On S3 there is nothing to make."""
        self._store.make_directory(self.text)

    def remove_temporary(self) -> None:
        """Delete what killed writers left half-written in this directory and below."""
        self._store.remove_temporary(self.text)

    def check_writable(self) -> None:
        """Raises OSError where nothing could be written into this directory. Leaves nothing behind."""
        self._store.check_writable(self.text)

    @property
    def _store(self) -> ModuleType:
        if self.is_local:
            return local
        from eagle_ray.storage import s3  # its libraries take a second to import: local jobs do without

        return s3


def parquet_bytes(table: pa.Table, compression: str) -> bytes:
    """A whole file, made in memory first."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression=compression)
    return buffer.getvalue().to_pybytes()


def write_json(file: StoragePath, value: Any, precondition: Precondition = None) -> None:
    file.write_atomic(json_bytes(value), precondition)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(file: StoragePath) -> Any | None:
    """The file's value, or None where there is no such file. Raises ValueError where it is damaged."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None


def read_json_object(file: StoragePath) -> dict[str, Any] | None:
    """The JSON object in one of our own files; one that is missing, damaged or something else says nothing."""
    try:
        value = read_json(file)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
