"""Read files of other storage through fsspec: the gs://, hf:// and http(s):// part of ``storage.StoragePath``.

They are input only: without conditional writes, an output could not be exactly-once. Credentials
come from the file system's own package. A file's version is its ETag or the file system's
equivalent, or else its size.

    stat("https://host/prompts.jsonl")      # FileVersion(size=4096, version='"5f3e..."')
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, BinaryIO, NoReturn

from eagle_ray.storage.store import (
    FileVersion,
    NotAllowed,
    NotFound,
    NotSupported,
    ReadOnlyFile,
    StorageError,
)

# Packages by scheme.
PACKAGE_OF_SCHEME = {
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "blob_id",
    "oid",
    "mtime",
    "updated",
    "last_modified",
)
REMOTE_BUFFER_BYTES = 256 << 10


def missing_package(url: str) -> str | None:
    """Return the package that the URL's scheme needs and this environment lacks, or None."""
    package = PACKAGE_OF_SCHEME[url.partition("://")[0]]
    return None if find_spec(package) is not None else package


def is_file(url: str) -> bool:
    try:
        stat(url)
    except NotFound:
        return False
    return True


def is_directory(url: str) -> bool:
    with _storage_errors(url):
        return bool(_file_system(url).isdir(url))


def stat(url: str) -> FileVersion:
    with _storage_errors(url):
        info = _file_system(url).info(url)
    if info.get("type", "file") != "file":
        raise NotFound(f"{url}: there is no such file")
    return _version(info)


def read_with_version(url: str) -> tuple[bytes, FileVersion]:
    """Return a file's bytes and the version that it had right before."""
    version = stat(url)
    with _storage_errors(url):
        return _file_system(url).cat_file(url), version


def open_file(url: str) -> BinaryIO:
    """Open a file as a seekable stream. From an HTTP server without byte ranges it is first copied
    to a temporary file."""
    system = _file_system(url)
    with _storage_errors(url):
        if url.startswith("http") and not system.info(url).get("partial"):
            return _copy(system, url)
        return io.BufferedReader(RemoteFile(url, system.open(url, "rb")), REMOTE_BUFFER_BYTES)


def list_files(directory: str) -> dict[str, FileVersion]:
    with _storage_errors(directory):
        system = _file_system(directory)
        infos = system.find(directory, detail=True)
        # `find` leaves out what it cannot list; `ls` raises if the server does not answer.
        if not infos:
            with suppress(FileNotFoundError):
                system.ls(directory, detail=False)
        return _versions(directory, infos)


def list_names(directory: str) -> list[str]:
    with _storage_errors(directory):
        return sorted(
            name.rstrip("/").rpartition("/")[2]
            for name in _file_system(directory).ls(directory, False)
        )


def glob(directory: str, pattern: str) -> dict[str, FileVersion]:
    with _storage_errors(directory):
        return _versions(
            directory, _file_system(directory).glob(f"{directory}/{pattern}", detail=True)
        )


def refuse_write(url: str, *arguments: Any, **options: Any) -> NoReturn:
    """Raise NotSupported; stands in for every write operation of this storage."""
    raise NotSupported(
        f"{url}: this storage is read only here. Write to a local path or to s3://bucket/key."
    )


write_atomic = create = replace = remove = make_directory = remove_temporary = check_writable = (
    refuse_write
)


class RemoteFile(ReadOnlyFile):
    """A file opened through fsspec, all of whose failures are StorageErrors with the URL."""

    def __init__(self, url: str, file: Any):
        self._url = url
        self._file = file

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def _read(self, size: int) -> bytes:
        with _storage_errors(self._url):
            return bytes(self._file.read(size))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@lru_cache(maxsize=8)
def file_system_of(scheme: str) -> Any:
    import fsspec  # with its file systems half a second: local jobs do without

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def _file_system(url: str) -> Any:
    try:
        return file_system_of(url.partition("://")[0])
    except (
        ImportError,
        ValueError,
        TypeError,
    ) as error:
        # No package, no such scheme, no URL alone.
        words = f"{url}: fsspec has no file system for it here ({error}). Install its package, or use another storage."
        raise NotSupported(words) from error


def _copy(system: Any, url: str) -> BinaryIO:
    copy = tempfile.TemporaryFile(prefix="eagle-ray-")  # noqa: SIM115 (the caller closes it)
    with system.open(url, "rb", block_size=0) as stream:
        shutil.copyfileobj(stream, copy, REMOTE_BUFFER_BYTES)
    copy.seek(0)
    return copy


def _versions(directory: str, infos: dict[str, dict[str, Any]]) -> dict[str, FileVersion]:
    """Return the versions by URL. A listing of an HTTP server has no sizes, so each file is asked for."""
    scheme = directory.partition("://")[0]
    infos_by_url = {}
    for name, info in infos.items():
        if info.get("type") == "file":
            url = name if "://" in name else f"{scheme}://{name}"
            infos_by_url[url] = info

    versions = {}
    for url, info in infos_by_url.items():
        versions[url] = stat(url) if info.get("size") is None else _version(info)
    return versions


def _version(info: dict[str, Any]) -> FileVersion:
    size = int(info.get("size") or 0)
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), f"{size} bytes")
    return FileVersion(size, version)


@contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Turn every failure into a StorageError with the URL: each file system raises classes of its own."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        # fsspec says the same of a server that does not answer, and keeps the reason as the cause.
        if isinstance(error.__cause__, OSError):
            raise StorageError(f"{url}: {error.__cause__}") from error
        raise NotFound(f"{url}: there is no such file") from None
    except PermissionError as error:
        raise NotAllowed(
            f"{url}: {error}. Check the credentials of the file system's package."
        ) from error
    except Exception as error:
        raise StorageError(f"{url}: {type(error).__name__}: {str(error) or 'no answer'}") from error
