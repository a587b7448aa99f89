"""Download models from object storage, once per machine, into its cache.

    fetch_model("s3://bucket/models/llama-8b", omitted=["*.pth"])
    # PosixPath('/home/me/.cache/eagle_ray/models/llama-8b-5b3c77e0f1d2a401')

A URL is s3:// or any other that fsspec reads. The directory's name has a hash of the files' names,
sizes and ETags, so a changed model gets another directory. It is renamed to that name once it is
complete. If several processes start together, one downloads and the others wait.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from eagle_ray.core.json_text import dump_json
from eagle_ray.storage.cache_directory import cache_home, made_once
from eagle_ray.storage.gguf_names import file_name, has_gguf_name
from eagle_ray.storage.model_files import only_gguf
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import (
    DISK_FULL,
    FileVersion,
    NotFound,
    NotSupported,
    ObjectChanged,
    StorageError,
)

log = logging.getLogger("eagle_ray")
NUM_DOWNLOADS = 8  # pieces at once
# Bytes of a piece of a file in S3; other storage may have no ranges, so its files are read whole.
DOWNLOAD_PIECE_BYTES = 64 << 20
DOWNLOAD_CHUNK_BYTES = 8 << 20
PROGRESS_EVERY_S = 10.0
NAME_CHARS = 40


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model's files by their names below its URL.

    Attributes:
        is_file: whether the URL itself is the only file.
    """

    url: str
    files: dict[str, tuple[StoragePath, FileVersion]]
    is_file: bool = False

    @classmethod
    def of_file(cls, url: str) -> RemoteModel:
        """Look up a file that is a model by itself. Raises NotFound if it does not exist, StorageError."""
        file = StoragePath(url)
        return cls(url, {file_name(url): (file, file.stat())}, is_file=True)

    @classmethod
    def of(cls, url: str, omitted: Sequence[str]) -> RemoteModel:
        """List the files of a model, without GGUF files that are not its weights.

        Args:
            omitted: patterns of file names to leave out.

        Raises:
            NotFound: there are no files.
            StorageError: the directory cannot be read.
            EngineError: as only_gguf does.
        """
        directory = StoragePath(url.rstrip("/"))
        files = {}
        for file, version in directory.list_versions().items():
            name = _path_of(file).removeprefix(_path_of(directory)).lstrip("/")
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise NotSupported(f"{file}: not the name of a file below {url}. Rename it there.")
            if not any(fnmatch(name, pattern) for pattern in omitted):
                files[name] = file, version
        if not files:
            raise NotFound(f"{url}: there are no files of a model below it")

        weights = only_gguf(files, directory.text)
        read = {}
        for name, listed in files.items():
            if name == weights or not has_gguf_name(name):
                read[name] = listed
        return cls(directory.text, read)

    @property
    def num_bytes(self) -> int:
        return sum(version.size for _, version in self.files.values())

    @property
    def directory_name(self) -> str:
        parts = {name: [version.size, version.version] for name, (_, version) in self.files.items()}
        digest = hashlib.sha256(
            dump_json([self.url, parts], sort_keys=True, default=str).encode()
        ).hexdigest()[:16]
        last = re.sub(r"[^\w.-]", "_", self.url.rpartition("/")[2])
        return f"{last[:NAME_CHARS]}-{digest}"

    def without(self, patterns: Sequence[str]) -> RemoteModel:
        """Return the model without the files whose names match."""
        remaining = {
            name: file
            for name, file in self.files.items()
            if not any(fnmatch(name, pattern) for pattern in patterns)
        }
        return RemoteModel(self.url, remaining)


def _path_of(place: StoragePath) -> str:
    return place.text.partition("://")[2].lstrip("/")


def fetch_model(url: str, omitted: Sequence[str], weights: Sequence[str] = ()) -> Path:
    """Return a local directory with the model's files, downloading them if they are not in this machine's cache.

    Args:
        omitted: patterns of files to leave out.
        weights: patterns of files to leave out unless they are in the cache already.

    Raises:
        StorageError: the URL cannot be read, or the files have no room here (errno ENOSPC).
        OSError: the cache directory cannot be written.
    """
    model = RemoteModel.of(url, omitted)
    directory = cache_home() / "models" / model.directory_name
    if weights and not directory.is_dir():
        model = model.without(weights)
        directory = directory.with_name(f"{directory.name}-metadata")
    return _made(model, directory)


def fetch_file(url: str) -> Path:
    """Return a local copy of a file that is a model by itself, downloading it first. Raises as fetch_model does."""
    model = RemoteModel.of_file(url)
    return _made(model, cache_home() / "models" / model.directory_name) / file_name(url)


def _made(model: RemoteModel, directory: Path) -> Path:
    waiting = f"waiting for another process of this machine, which downloads {model.url}"
    return made_once(directory, lambda temporary: _download(model, temporary), waiting)


def _download(model: RemoteModel, directory: Path) -> None:
    """Write all files of the model into the directory. Raises as fetch_model does."""
    room = shutil.disk_usage(directory).free
    if model.num_bytes > room:
        raise _no_room(model, directory, room)
    log.info("downloading %s: %.1f GB into %s", model.url, model.num_bytes / 1e9, directory.parent)
    pieces = list(_pieces(model, directory))
    try:
        _copy_all(pieces, model)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _no_room(model, directory, shutil.disk_usage(directory).free) from error
        raise
    place = StoragePath(model.url)
    now = {place: place.stat()} if model.is_file else place.list_versions()
    for name, (file, version) in model.files.items():
        if now.get(file) != version:
            raise ObjectChanged(
                f"{model.url}: {name} changed while it was downloaded. Start again."
            )


@dataclass(frozen=True, slots=True)
class CopiedPiece:
    """A range of bytes, start to stop, to copy from a remote file into a local one."""

    source: StoragePath
    target: Path
    start: int
    stop: int

    def copy(self) -> int:
        """Copy the bytes and return their number."""
        left = self.stop - self.start
        with self.source.open() as stream, self.target.open("r+b") as file:
            stream.seek(self.start)
            file.seek(self.start)
            while left:
                chunk = stream.read(min(DOWNLOAD_CHUNK_BYTES, left))
                if not chunk:
                    raise ObjectChanged(
                        f"{self.source} became shorter while it was downloaded. Start again."
                    )
                file.write(chunk)
                left -= len(chunk)
        return self.stop - self.start


def _pieces(model: RemoteModel, directory: Path) -> Iterator[CopiedPiece]:
    """Make the files, empty, and yield their pieces."""
    for name, (source, version) in model.files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        step = DOWNLOAD_PIECE_BYTES if source.is_s3 else max(version.size, 1)
        for start in range(0, version.size, step):
            yield CopiedPiece(source, target, start, min(start + step, version.size))


def _copy_all(pieces: list[CopiedPiece], model: RemoteModel) -> None:
    """Copy all pieces, some at once, and log how far they are. The first error ends it."""
    done = 0
    logged_at = time.monotonic()
    with ThreadPoolExecutor(NUM_DOWNLOADS, "eagle-ray-download") as pool:
        left = {pool.submit(piece.copy) for piece in pieces}
        try:
            while left:
                ended, left = wait(left, PROGRESS_EVERY_S, FIRST_COMPLETED)
                done += sum(future.result() for future in ended)
                if time.monotonic() - logged_at > PROGRESS_EVERY_S:
                    logged_at = time.monotonic()
                    log.info(
                        "downloading %s: %.1f of %.1f GB",
                        model.url,
                        done / 1e9,
                        model.num_bytes / 1e9,
                    )
        finally:
            pool.shutdown(cancel_futures=True)


def _no_room(model: RemoteModel, directory: Path, free: int) -> StorageError:
    error = StorageError(
        f"{model.url} has {model.num_bytes:,} bytes, and {free:,} are free in {directory.parent}. Free some space "
        "there, or set EAGLE_RAY_CACHE to a directory with room."
    )
    error.errno = errno.ENOSPC
    return error
