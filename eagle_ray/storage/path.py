"""StoragePath: a file or directory on a local disk, in an S3 bucket, or (to read) elsewhere, with all operations on it.

Writes are atomic. The work is done by ``local``, ``s3`` and ``remote`` (gs://, hf://, https://:
input only), which have the same functions. Nothing is cached between calls, so changes by other
machines are visible. All failures are OSErrors; on S3 a StorageError, within a time limit.

    output = StoragePath.of("s3://bucket/runs/a")
    (output / "data").glob("*.parquet")
    # [StoragePath('s3://bucket/runs/a/data/part-001-000000.parquet')]
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, BinaryIO

from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.storage import local, remote
from eagle_ray.storage.store import FileVersion, Precondition, check_bucket

S3 = "s3://"
PATH_SCHEMES = ("s3", *remote.PACKAGE_OF_SCHEME)


@dataclass(frozen=True, slots=True, order=True)
class StoragePath:
    """A path of a local file or directory, or a URL, with operations that are atomic.

    Attributes:
        text: an absolute local path or a URL such as s3://bucket/key, without a trailing slash.
        is_private: whether local files and directories that are created here are readable by their
            owner alone. It applies to paths below, too.
    """

    text: str
    is_private: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, text: str | os.PathLike[str]) -> StoragePath:
        """Parse a path; local ones become absolute. Raises ValueError for a URL that cannot be read here."""
        text = os.fspath(text)
        if "\0" in text:
            raise ValueError(f"{text!r} has a null byte, which no path can have")
        scheme, separator, rest = text.partition("://")
        if separator and (scheme not in PATH_SCHEMES or not rest.partition("/")[0]):
            schemes = ", ".join(f"{name}://" for name in PATH_SCHEMES)
            raise ValueError(
                f"{text!r} is neither a local path nor a URL of {schemes} with a bucket or host"
            )
        if (
            separator
            and scheme in remote.PACKAGE_OF_SCHEME
            and (package := remote.missing_package(text))
        ):
            raise ValueError(
                f"{text!r} needs the package {package}, which is not installed. Run `pip install {package}` on every "
                "node, or copy the files to local storage or S3."
            )
        if separator:
            return cls(text.rstrip("/"))
        try:
            return cls(os.path.abspath(os.path.expanduser(text)))
        except FileNotFoundError:
            raise ValueError(
                f"{text!r} is relative, and the current directory has been deleted. Change to another directory."
            ) from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"StoragePath({self.text!r})"

    def __truediv__(self, name: str) -> StoragePath:
        return StoragePath(f"{self.text.rstrip('/')}/{name}", self.is_private)

    @property
    def is_local(self) -> bool:
        return "://" not in self.text

    @property
    def is_s3(self) -> bool:
        return self.text.startswith(S3)

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> StoragePath:
        """Return the parent directory; the root, or a bucket, is its own parent."""
        if self.is_local:
            return StoragePath(os.path.dirname(self.text))
        return (
            StoragePath(self.text.rpartition("/")[0])
            if "/" in self.text.partition("://")[2]
            else self
        )

    def relative_to(self, directory: StoragePath) -> str | None:
        """Return the path below a directory, "" for the directory itself, None if it is elsewhere.
        Follows local links.
        """
        here, there = (
            os.path.realpath(x.text) if x.is_local else x.text for x in (self, directory)
        )
        if here == there:
            return ""
        start = there.rstrip("/") + "/"
        return here.removeprefix(start) if here.startswith(start) else None

    @property
    def display_path(self) -> str:
        """Return the path for messages: relative to the working directory if it is below it."""
        with suppress(ValueError):  # a working directory that was deleted
            return self.relative_to(StoragePath.of(os.curdir)) or self.text
        return self.text

    def exists(self) -> bool:
        """Return whether it is a file."""
        return self._store.is_file(self.text)

    def is_directory(self) -> bool:
        """Return whether it is a directory; on S3, whether any object is below."""
        return self._store.is_directory(self.text)

    def stat(self) -> FileVersion:
        """Return the file's version. Raises FileNotFoundError."""
        return self._store.stat(self.text)

    def list_states(self, pattern: str) -> dict[StoragePath, str]:
        """Return the matching files below, sorted, each with a text that changes whenever the file does."""
        return {file: version.state for file, version in self.list_versions(pattern).items()}

    def read_bytes(self) -> bytes:
        """Return the content. Raises FileNotFoundError."""
        return self.read_with_version()[0]

    def read_with_version(self) -> tuple[bytes, FileVersion]:
        """Return the file's bytes and the version that it had when they were read. Raises FileNotFoundError."""
        return self._store.read_with_version(self.text)

    def open(self) -> BinaryIO:
        """Return a seekable binary file to read; large files are read in parts. Raises FileNotFoundError."""
        return self._store.open_file(self.text)

    def glob(self, pattern: str) -> list[StoragePath]:
        """Return the matching files below, sorted."""
        return list(self.list_versions(pattern))

    def list_versions(self, pattern: str | None = None) -> dict[StoragePath, FileVersion]:
        """Return the matching files below, or all of them, sorted, with their versions."""
        store = self._store
        versions = (
            store.list_files(self.text) if pattern is None else store.glob(self.text, pattern)
        )
        return {StoragePath(text): versions[text] for text in sorted(versions)}

    def list_names(self) -> list[str]:
        """Return the names of files and directories directly in this directory."""
        return self._store.list_names(self.text)

    def write_atomic(self, data: bytes, precondition: Precondition = None) -> FileVersion:
        """Replace the file in one step.

        Args:
            precondition: callback right before the write; if it raises, nothing changes.
        """
        return self._store.write_atomic(self.text, data, precondition, **self._modes)

    def create(self, data: bytes, precondition: Precondition = None) -> FileVersion | None:
        """Create the file in one step. Return None if it already exists."""
        return self._store.create(self.text, data, precondition, **self._modes)

    def replace(
        self, data: bytes, version: int | str, precondition: Precondition = None
    ) -> FileVersion | None:
        """Replace the file if it still has this version; else return None."""
        return self._store.replace(self.text, data, version, precondition, **self._modes)

    def remove(self, missing_ok: bool = True) -> None:
        self._store.remove(self.text, missing_ok)

    def remove_tree(self) -> None:
        """Delete the directory and its content, if it exists. A reader may see it half deleted."""
        self._store.remove_tree(self.text)

    def make_directory(self) -> None:
        """Create the directory and its parents. Does nothing on S3."""
        self._store.make_directory(self.text, **self._modes)

    def restrict(self) -> None:
        """Allow only the owner to use an existing local file or directory. Does nothing on S3."""
        if self.is_local:
            local.restrict(self.text)

    def remove_temporary(self) -> None:
        """Delete temporary files of killed writers in this directory and below."""
        self._store.remove_temporary(self.text)

    def check_writable(self) -> None:
        """Raise OSError if this directory is not writable. Leaves no file."""
        self._store.check_writable(self.text)

    @property
    def _modes(self) -> dict[str, local.Modes]:
        return {"modes": local.PRIVATE} if self.is_private and self.is_local else {}

    @property
    def _store(self) -> ModuleType:
        if self.is_local:
            return local
        if not self.is_s3:
            return remote
        # Its libraries take a second to import, which local jobs do without.
        from eagle_ray.storage import (
            s3,
        )

        return s3


def named_path(name: str, text: str) -> StoragePath:
    """Parse the path in a configuration key or flag. Raises ConfigError that begins with the key's name."""
    try:
        return StoragePath.of(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def write_json(file: StoragePath, value: Any, precondition: Precondition = None) -> None:
    file.write_atomic(json_bytes(value), precondition)


def json_bytes(value: Any) -> bytes:
    return (dump_json(value, indent=2, ensure_ascii=False) + "\n").encode()


def parse_json_bytes(data: bytes) -> Any:
    """Parse the JSON of one of our own files. Raises ValueError if it is damaged."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its lists and objects stand too deep in each other") from None


def read_json(file: StoragePath) -> Any | None:
    """Return the JSON value of one of our own files, or None if it is missing. Raises ValueError if it is damaged.

    A missing bucket is an error.
    """
    try:
        return parse_json_bytes(file.read_bytes())
    except FileNotFoundError as error:
        check_bucket(error)
        return None


def read_json_object(file: StoragePath) -> dict[str, Any] | None:
    """Return the JSON object in one of our own files, or None if it is missing, damaged or not an object."""
    try:
        value = read_json(file)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
