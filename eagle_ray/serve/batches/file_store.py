"""FileStore: uploaded files and batch outputs of one owner, in a directory or a bucket.

A file is a description (JSON) and numbered chunks of bytes. The description is written last, so a file exists whole or
not at all, and no more than a chunk is ever in memory. Owners have directories of their own: one key's client cannot
name another key's file.

    OWNER/files/file-ID.json       the description
    OWNER/contents/file-ID/000000  the first chunk

    >>> store = FileStore(StoragePath.of("batches"), "all")
    >>> store.write([b'{"custom_id": "a"}'], "in.jsonl", "batch").bytes
    18
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from eagle_ray.serve.batches.batch_models import FILE, StoredFile, is_id, new_id
from eagle_ray.serve.http_answers import ApiError
from eagle_ray.storage.path import StoragePath, read_json_object

CHUNK_BYTES = 8 << 20
READ_BYTES = 1 << 20


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
        return sorted(set(ids_in(self._contents, FILE)) - set(self.ids()))

    def write(
        self,
        parts: Iterable[bytes],
        filename: str,
        purpose: Literal["batch", "batch_output"],
        expires_at: int | None = None,
        id: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> StoredFile:
        """Write a file and return it.

        Args:
            id: of a file that an earlier process may have begun with the same parts.
            check: called right before each write; if it raises, nothing changes.
        """
        id = id or new_id(FILE)
        num_chunks = size = 0
        for chunk in _chunks(parts):
            self.write_chunk(id, num_chunks, chunk, check)
            num_chunks += 1
            size += len(chunk)
        file = StoredFile(
            id=id,
            bytes=size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
            expires_at=expires_at,
            num_chunks=num_chunks,
        )
        return self.finish(file, check)

    def write_chunk(self, id: str, number: int, data: bytes, check: Callable[[], None] | None = None) -> None:
        (self._contents / id / f"{number:06d}").write_atomic(data, check)

    def finish(self, file: StoredFile, check: Callable[[], None] | None = None) -> StoredFile:
        """Write the description of a file whose chunks are there; from now on it exists."""
        self._description(file.id).write_atomic(file.model_dump_json().encode(), check)
        return file

    def read(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the file's bytes in parts of at most READ_BYTES. Raises FileNotFoundError if it is being deleted."""
        for number in range(file.num_chunks):
            with (self._contents / file.id / f"{number:06d}").open() as chunk:
                while part := chunk.read(READ_BYTES):
                    yield part

    def lines(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the file's lines, without their ends."""
        line = bytearray()
        for part in self.read(file):
            *ended, rest = part.split(b"\n")
            for piece in ended:
                yield bytes(line + piece)
                line.clear()
            line += rest
        if line:
            yield bytes(line)

    def delete(self, id: str) -> None:
        self._description(id).remove()
        self.discard(id)

    def discard(self, id: str) -> None:
        """Delete the chunks of a file that has no description."""
        (self._contents / id).remove_tree()

    def _description(self, id: str) -> StoragePath:
        return self._descriptions / f"{id}.json"


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


def ids_in(directory: StoragePath, prefix: str) -> list[str]:
    """Return the ids that names in a directory are, in a bucket of the first thousand. It need not exist."""
    try:
        return [name for name in directory.list_names() if is_id(name, prefix)]
    except FileNotFoundError:
        return []
