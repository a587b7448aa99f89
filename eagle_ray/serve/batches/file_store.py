"""FileStore: uploaded files and batch outputs of one owner, in a directory or a bucket.

A file is a description (JSON) and numbered chunks of bytes. The description is written last, so a file exists whole or
not at all, and no more than a chunk is ever in memory. Ids begin with their time, so names in order are files in order
of creation. Owners have directories of their own: one key's client cannot name another key's file.

    OWNER/files/file-ID.json       the description
    OWNER/contents/file-ID/000000  the first chunk

    >>> store = FileStore(StoragePath.of("batches"), "all")
    >>> store.write([b'{"custom_id": "a"}'], "in.jsonl", "batch").bytes
    18
"""

from __future__ import annotations

import io
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from eagle_ray.serve.http_errors import ApiError
from eagle_ray.storage.path import StoragePath, read_json_object, write_json

CHUNK_BYTES = 8 << 20
READ_BYTES = 1 << 20
FILE, BATCH = "file-", "batch_"
ID = re.compile(rf"({FILE}|{BATCH})[0-9a-f]{{27}}")
TIME_DIGITS = 11  # hexadecimal, of milliseconds: until the year 2527


def new_id(prefix: str) -> str:
    """Return a new id: the time, then 64 random bits. prefix: FILE or BATCH."""
    return f"{prefix}{time.time_ns() // 1_000_000:0{TIME_DIGITS}x}{secrets.token_hex(8)}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and ID.fullmatch(text) is not None


def made_at(id: str) -> float:
    """Return the time in an id, in seconds since 1970."""
    return int(id[len(FILE) :][-27:][:TIME_DIGITS], 16) / 1000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's description. Times are seconds since 1970; expires_at None: it stays until it is deleted."""

    id: str
    bytes: int
    num_chunks: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": self.expires_at,
        }


class FileStore:
    """Files of one owner. Methods block on storage and raise OSError if it fails."""

    def __init__(self, root: StoragePath, owner: str):
        self._descriptions = root / owner / "files"
        self._contents = root / owner / "contents"

    def get(self, id: str) -> StoredFile:
        """Return a file. Raises ApiError with 404 if there is none, or if it has expired."""
        file = self.find(id)
        if file is None or (file.expires_at is not None and file.expires_at <= time.time()):
            raise ApiError(404, f"there is no file {id!r} of this API key", "file_id", "file_not_found")
        return file

    def find(self, id: str) -> StoredFile | None:
        """Return a file, expired or not, or None if there is none."""
        found = read_json_object(self._description(id)) if is_id(id, FILE) else None
        return StoredFile(**found) if found else None

    def ids(self) -> list[str]:
        """Return the ids of all files, oldest first."""
        return [path.name.removesuffix(".json") for path in self._descriptions.glob(f"{FILE}*.json")]

    def usage(self) -> tuple[int, int]:
        """Return how many files there are, and the bytes of all of them, uploads that run included."""
        sizes = self._contents.list_versions()
        return len(set(self.ids()) | {path.parent.name for path in sizes}), sum(file.size for file in sizes.values())

    def unfinished_ids(self) -> list[str]:
        """Return the ids of contents without a description: uploads that run, or that were killed."""
        there = set(self.ids())
        return [id for id in names_in(self._contents) if is_id(id, FILE) and id not in there]

    def write(
        self,
        parts: Iterable[bytes],
        filename: str,
        purpose: str,
        expires_at: int | None = None,
        id: str | None = None,
    ) -> StoredFile:
        """Write a file and return it. id: of a file that an earlier process may have begun with the same parts."""
        id = id or new_id(FILE)
        num_chunks = size = 0
        for chunk in _chunks(parts):
            self.write_chunk(id, num_chunks, chunk)
            num_chunks += 1
            size += len(chunk)
        return self.finish(StoredFile(id, size, num_chunks, int(time.time()), filename, purpose, expires_at))

    def write_chunk(self, id: str, number: int, data: bytes) -> None:
        (self._contents / id / f"{number:06d}").write_atomic(data)

    def finish(self, file: StoredFile) -> StoredFile:
        """Write the description of a file whose chunks are there; from now on it exists."""
        write_json(self._description(file.id), asdict(file))
        return file

    def read(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the file's bytes in parts of at most READ_BYTES. Raises FileNotFoundError if it is being deleted."""
        for number in range(file.num_chunks):
            with (self._contents / file.id / f"{number:06d}").open() as chunk:
                while part := chunk.read(READ_BYTES):
                    yield part

    def open(self, file: StoredFile) -> BinaryIO:
        """Return the file as a stream of lines. It can be read once, from its start."""
        return io.BufferedReader(_Joined(self.read(file)), READ_BYTES)

    def delete(self, id: str) -> None:
        self._description(id).remove()
        self.discard(id)

    def discard(self, id: str) -> None:
        """Delete the chunks of a file that has no description."""
        (self._contents / id).remove_tree()

    def _description(self, id: str) -> StoragePath:
        return self._descriptions / f"{id}.json"


class _Joined(io.RawIOBase):
    """Parts as one stream."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts, self._rest, self._position = parts, b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Accept the position that is current already, which is where every reader begins."""
        if whence != io.SEEK_END and offset == (self._position if whence == io.SEEK_SET else 0):
            return self._position
        raise io.UnsupportedOperation("a stored file is read from its start to its end")

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._parts, b"")
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        self._position += len(part)
        return len(part)


def _chunks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes in chunks of CHUNK_BYTES or a little more; the last is smaller."""
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def names_in(directory: StoragePath) -> list[str]:
    """Return the names in a directory, which need not exist."""
    try:
        return directory.list_names()
    except FileNotFoundError:
        return []
