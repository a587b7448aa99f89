"""FileStore: uploaded files and batch outputs of one owner, in a directory or a bucket.

A file consists of a description (JSON) and numbered chunks of bytes. The description is written
last, so a file is either complete or does not exist. Each owner has its own directory, so a client
cannot name another client's file.

    OWNER/files/file-ID.json       the description
    OWNER/contents/file-ID/000000  the first chunk

    >>> store = FileStore(StoragePath.of("batches"), "all")
    >>> store.write([b'{"custom_id": "a"}'], "in.jsonl", "batch").bytes
    18

An upload is a multipart form with a file. Whatever its size, memory holds one chunk of it and what
Serve has read ahead (``serve/proxy_errors.py``).

    await receive_upload(request, store, config.serving.batches)      # StoredFile(id='file-...', bytes=1204, ...)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from eagle_ray.config.serve import BatchesConfig
from eagle_ray.requests.values import unsupported
from eagle_ray.serve.batches.batch_models import (
    EXPIRES_S,
    FILE,
    MAX_LIFE_S,
    MIN_LIFE_S,
    StoredFile,
    is_id,
    new_id,
)
from eagle_ray.serve.http.http_answers import ApiError, api_error
from eagle_ray.serve.http.request_body import ClientDisconnected, check_encoding
from eagle_ray.storage.path import StoragePath, read_json_object

UPLOAD_CHUNK_BYTES = 8 << 20
UPLOAD_READ_BYTES = 1 << 20
MAX_FILE_NAME_CHARS = 255


def upload_name(sent: str) -> str:
    r"""Return the name under which an upload is shown, without directories and control characters.

    >>> upload_name("../../etc/in.jsonl"), upload_name("C:\\in.jsonl"), upload_name("..")
    ('in.jsonl', 'in.jsonl', 'upload')
    """
    last = sent.replace("\\", "/").rpartition("/")[2]
    shown = "".join(character for character in last if character.isprintable())[
        :MAX_FILE_NAME_CHARS
    ]
    return shown if shown.strip(". ") else "upload"


class FileStore:
    """Files of one owner. Methods block on storage, and raise OSError if it fails."""

    def __init__(self, root: StoragePath, owner: str):
        self._descriptions = root / owner / "files"
        self._contents = root / owner / "contents"

    def get(self, id: str) -> StoredFile:
        """Return a file. Raises ApiError with 404 if there is none, or if it has expired."""
        file = self.find(id)
        if file is None or (file.expires_at is not None and file.expires_at <= time.time()):
            raise ApiError(
                404, f"there is no file {id!r} of this API key", "file_id", "file_not_found"
            )
        return file

    def find(self, id: str) -> StoredFile | None:
        """Return a file, expired or not; None if there is none."""
        stored = read_json_object(self._description(id)) if is_id(id, FILE) else None
        return StoredFile(**stored) if stored else None

    def ids(self) -> list[str]:
        """Return the ids of all files, oldest first."""
        return [
            path.name.removesuffix(".json") for path in self._descriptions.glob(f"{FILE}*.json")
        ]

    def usage(self) -> tuple[int, int]:
        """Return the number of files and their size in bytes. Unfinished uploads count."""
        sizes = self._contents.list_versions()
        return len(set(self.ids()) | {path.parent.name for path in sizes}), sum(
            file.size for file in sizes.values()
        )

    def unfinished_ids(self) -> list[str]:
        """Return the ids of contents without a description, of unfinished or killed uploads."""
        return sorted(set(listed_ids(self._contents, FILE)) - set(self.ids()))

    def write(
        self,
        parts: Iterable[bytes],
        filename: str,
        purpose: Literal["batch", "batch_output"],
        expires_at: int | None = None,
        id: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> StoredFile:
        """Store a file and return it.

        Args:
            parts: bytes of the file, in parts.
            filename: name under which the file is shown.
            purpose: purpose in OpenAI's API.
            expires_at: Unix time at which it expires; None if it stays until it is deleted.
            id: id of a file that an earlier process may have begun with equal parts; None for a new
                id.
            check: function that is called right before each write. If it raises, nothing is
                written.
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

    def write_chunk(
        self, id: str, number: int, data: bytes, check: Callable[[], None] | None = None
    ) -> None:
        (self._contents / id / f"{number:06d}").write_atomic(data, check)

    def finish(self, file: StoredFile, check: Callable[[], None] | None = None) -> StoredFile:
        """Write the description of a file whose chunks are stored. Before that, the file does not exist."""
        self._description(file.id).write_atomic(file.model_dump_json().encode(), check)
        return file

    def read(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the bytes of a file in parts. Raises FileNotFoundError if it is being deleted."""
        for number in range(file.num_chunks):
            with (self._contents / file.id / f"{number:06d}").open() as chunk:
                while part := chunk.read(UPLOAD_READ_BYTES):
                    yield part

    def lines(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the lines of a file, without line ends."""
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
    """Yield the bytes in chunks of UPLOAD_CHUNK_BYTES or slightly more. The last chunk is smaller."""
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= UPLOAD_CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def listed_ids(directory: StoragePath, prefix: str) -> list[str]:
    """Return the ids among the names in a directory, which need not exist. A bucket lists the first thousand."""
    try:
        return [name for name in directory.list_names() if is_id(name, prefix)]
    except FileNotFoundError:
        return []


PURPOSE: Final = "batch"
MAX_VALUE_BYTES = 4096  # bytes of a field that is no file
# Bytes of the body without the file: boundaries, headers, fields, and all text around them.
MAX_OTHER_BYTES = 64 << 10
NEXT_BYTES_WITHIN_S = 60.0
UPLOAD_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


class UploadForm:
    """A push parser of one upload. Give it bytes by `feed`, and get the file's bytes by `take`.

    Args:
        max_bytes: maximum size of the file.
        too_large: error of a larger file.
    """

    def __init__(self, boundary: bytes, max_bytes: int, too_large: ApiError):
        names = (
            "part_data",
            "header_field",
            "header_value",
            "header_end",
            "headers_finished",
            "end",
        )
        callbacks: Any = {f"on_{name}": getattr(self, f"_on_{name}") for name in names}
        with _form_errors():
            self._parser = MultipartParser(boundary, callbacks)
        self._max_bytes, self._too_large = max_bytes, too_large
        self._num_fed = 0
        self._header = self._header_value = b""
        self._disposition: dict[bytes, bytes] = {}
        self._field = ""
        self._file = bytearray()  # not taken yet
        self._values: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.size = 0
        self.is_whole = False

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the form. Raises ApiError."""
        with _form_errors():
            self._parser.write(data)
        self._num_fed += len(data)
        if self._num_fed - self.size > MAX_OTHER_BYTES:
            message = f"the form has more than {MAX_OTHER_BYTES} bytes that are not the file's. Send the file alone."
            raise ApiError(413, message, code="form_too_large")

    def take(self, min_bytes: int) -> bytes:
        """Return the file's new bytes; empty if there are fewer than `min_bytes`."""
        if len(self._file) < min_bytes:
            return b""
        data, self._file = bytes(self._file), bytearray()
        return data

    def value(self, name: str) -> str | None:
        stored = self._values.get(name)
        return None if stored is None else stored.decode("utf-8", "replace")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(self._header_value)
        self._header = self._header_value = b""

    def _on_headers_finished(self) -> None:
        disposition, self._disposition = self._disposition, {}
        self._field = disposition.get(b"name", b"").decode("utf-8", "replace")
        if self._field not in UPLOAD_FIELDS:
            raise api_error(
                unsupported(
                    self._field or "a field without a name",
                    f"an upload has {', '.join(UPLOAD_FIELDS)}",
                )
            )
        if self._field in self._values or (self._field == "file" and self.filename is not None):
            raise ApiError(400, f"{self._field}: given more than once", self._field, "bad_value")
        if self._field == "file":
            self.filename = upload_name(
                disposition.get(b"filename", b"").decode("utf-8", "replace")
            )
        else:
            self._values[self._field] = bytearray()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._file += data[start:end]
            self.size += end - start
            if self.size > self._max_bytes:
                raise self._too_large
            return
        self._values[self._field] += data[start:end]
        if len(self._values[self._field]) > MAX_VALUE_BYTES:
            raise ApiError(
                400, f"{self._field}: longer than {MAX_VALUE_BYTES} bytes", self._field, "bad_value"
            )

    def _on_end(self) -> None:
        self.is_whole = True


@contextmanager
def _form_errors() -> Iterator[None]:
    """Convert the parser's errors to ApiError."""
    try:
        yield
    except FormParserError as error:
        raise ApiError(400, f"the body is no multipart form: {error}", code="bad_form") from None


def check_room(store: FileStore, limits: BatchesConfig) -> int:
    """Return the bytes that an API key may still store. Raises ApiError if its files are at a limit."""
    num_files, num_bytes = store.usage()
    if num_files >= limits.max_files:
        raise _storage_full(f"{num_files} files", f"max_files is {limits.max_files}")
    if num_bytes >= limits.max_stored_bytes:
        raise _storage_full(
            f"{num_bytes} bytes of files", f"max_stored_bytes is {limits.max_stored_bytes}"
        )
    return limits.max_stored_bytes - num_bytes


def _storage_full(stored: str, limit: str) -> ApiError:
    message = (
        f"file: this API key has {stored} (serving.batches.{limit}). Delete some of them first."
    )
    return ApiError(413, message, "file", "storage_full")


def _limit_of(room: int, limits: BatchesConfig) -> tuple[int, ApiError]:
    """Return the maximum bytes of a file, and the error of a larger one.

    Args:
        room: bytes that the API key may still store.
        limits: limits of batches.
    """
    if room < limits.max_file_bytes:
        return room, _storage_full(
            f"room for {room} more bytes", f"max_stored_bytes is {limits.max_stored_bytes}"
        )
    message = f"file: it has more than {limits.max_file_bytes} bytes (serving.batches.max_file_bytes). Split it."
    return limits.max_file_bytes, ApiError(413, message, "file", "file_too_large")


async def receive_upload(request: Request, store: FileStore, limits: BatchesConfig) -> StoredFile:
    """Store the form's file and return it. If that fails, nothing stays.

    Raises ApiError, ClientDisconnected and OSError.
    """
    check_encoding(request.headers)
    boundary = _boundary(request)
    max_bytes, too_large = _limit_of(await asyncio.to_thread(check_room, store, limits), limits)
    if int(request.headers.get("content-length", 0)) > max_bytes + MAX_OTHER_BYTES:
        raise too_large
    form = UploadForm(boundary, max_bytes, too_large)
    id, num_chunks = new_id(FILE), 0
    try:
        async for data in _body(request):
            form.feed(data)
            if chunk := form.take(UPLOAD_CHUNK_BYTES):
                await asyncio.to_thread(store.write_chunk, id, num_chunks, chunk)
                num_chunks += 1
        life_s = _checked(form)
        if chunk := form.take(1):
            await asyncio.to_thread(store.write_chunk, id, num_chunks, chunk)
            num_chunks += 1
        # Others were uploaded meanwhile.
        if (await asyncio.to_thread(store.usage))[1] > limits.max_stored_bytes:
            raise too_large
        now = int(time.time())
        file = StoredFile(
            id=id,
            bytes=form.size,
            num_chunks=num_chunks,
            created_at=now,
            filename=form.filename or "",
            purpose=PURPOSE,
            expires_at=now + life_s,
        )
        return await asyncio.to_thread(store.finish, file)
    except BaseException:
        await asyncio.to_thread(store.discard, id)
        raise


async def _body(request: Request) -> AsyncIterator[bytes]:
    """Yield the bytes of the body. Raises ClientDisconnected where it breaks off."""
    parts = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(parts), NEXT_BYTES_WITHIN_S)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            message = f"nothing more of the body came within {NEXT_BYTES_WITHIN_S:g} s"
            raise ApiError(408, message, code="body_too_slow") from None
        except Exception:
            raise ClientDisconnected from None
        yield part


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = "Content-Type must be multipart/form-data with a boundary, as OpenAI's clients send uploads"
        raise ApiError(415, message, code="bad_content_type")
    return options[b"boundary"]


def _checked(form: UploadForm) -> int:
    """Return the seconds that the file lasts. Raises ApiError for an incomplete form or a wrong value."""
    if not form.is_whole:
        raise ApiError(400, "the body ends before the form does", code="bad_form")
    if form.filename is None:
        raise ApiError(400, "file: missing; it must be a file", "file", "missing")
    if (purpose := form.value("purpose")) != PURPOSE:
        raise ApiError(
            400, f"purpose: must be {PURPOSE!r}, got {purpose!r}", "purpose", "bad_value"
        )
    anchor, seconds = form.value("expires_after[anchor]"), form.value("expires_after[seconds]")
    if anchor is None and seconds is None:
        return EXPIRES_S
    if anchor != "created_at":
        raise ApiError(
            400,
            f"expires_after.anchor: must be 'created_at', got {anchor!r}",
            "expires_after",
            "bad_value",
        )
    if seconds is None or not seconds.isdecimal() or not MIN_LIFE_S <= int(seconds) <= MAX_LIFE_S:
        message = f"expires_after.seconds: must be {MIN_LIFE_S} to {MAX_LIFE_S}, got {seconds!r}"
        raise ApiError(400, message, "expires_after", "bad_value")
    return int(seconds)
