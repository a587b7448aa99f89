"""Local files with atomic writes: the local half of ``storage.StoragePath``.

A reader never sees a partly written file, also after a kill: bytes go to a hidden temporary file in
the same directory, are flushed to disk, and are then renamed.

    >>> write_atomic("runs/a/_progress.json", b"{}").size
    2
"""

from __future__ import annotations

import glob as globbing
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from stat import S_ISREG
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from eagle_ray.storage.store import DISK_FULL, FileVersion, Precondition

# Names of our temporary files; other programs may keep hidden files where a run writes.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


class Modes(NamedTuple):
    """Permissions of new files and directories, before the umask is applied."""

    file: int
    directory: int


BY_UMASK = Modes(0o666, 0o777)
PRIVATE = Modes(0o600, 0o700)  # modes of files for their owner alone


def is_file(path: str) -> bool:
    return os.path.isfile(path)


def is_directory(path: str) -> bool:
    return os.path.isdir(path)


def stat(path: str) -> FileVersion:
    return _version(os.stat(path))


def _version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def read_with_version(path: str) -> tuple[bytes, FileVersion]:
    """Return a file's bytes and the version that the file had when they were read."""
    with open(path, "rb") as file:
        version = _version(os.fstat(file.fileno()))
        return file.read(), version


def open_file(path: str) -> BinaryIO:
    return open(path, "rb")


def list_files(directory: str) -> dict[str, FileVersion]:
    """Return every file below a directory; linked directories are skipped."""
    return _versions(
        os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names
    )


def _versions(paths: Iterable[str]) -> dict[str, FileVersion]:
    """Return the versions of the paths that are files."""
    versions = {}
    for path in paths:
        with suppress(OSError):  # a link to nowhere
            status = os.stat(path)
            if S_ISREG(status.st_mode):
                versions[path] = _version(status)
    return versions


def list_names(directory: str) -> list[str]:
    return sorted(os.listdir(directory))


def glob(directory: str, pattern: str) -> dict[str, FileVersion]:
    names = globbing.glob(pattern, root_dir=directory, recursive=True)
    return _versions(os.path.join(directory, name) for name in names)


def write_atomic(
    path: str, data: bytes, precondition: Precondition = None, modes: Modes = BY_UMASK
) -> FileVersion:
    """Replace a file in one step, creating its directory if missing."""
    return _publish(path, data, precondition, modes, os.replace)


def create(
    path: str, data: bytes, precondition: Precondition = None, modes: Modes = BY_UMASK
) -> FileVersion | None:
    """Create a file in one step. If it exists, return None and leave it unchanged."""
    try:
        return _publish(path, data, precondition, modes, _link)
    except FileExistsError:
        if not os.path.lexists(path):  # it was the directory: a file has its name
            raise
        return None


def replace(
    path: str,
    data: bytes,
    version: int | str,
    precondition: Precondition = None,
    modes: Modes = BY_UMASK,
) -> FileVersion | None:
    """Replace a file if it still has this version, else return None. Check and rename are two
    steps: the caller must hold the lock."""
    with suppress(FileNotFoundError):
        if stat(path).version == version:
            return write_atomic(path, data, precondition, modes)
    return None


def remove(path: str, missing_ok: bool) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise


def remove_tree(directory: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)


def make_directory(path: str, modes: Modes = BY_UMASK) -> None:
    """Create a directory and its missing parents, all with this mode."""
    parent = os.path.dirname(path)
    if modes is not BY_UMASK and parent != path and not os.path.isdir(parent):
        make_directory(parent, modes)
    os.makedirs(path, modes.directory, exist_ok=True)


def restrict(path: str) -> None:
    """Allow only the owner to use an existing file or directory. Does nothing if it belongs to another user."""
    with suppress(FileNotFoundError, PermissionError):
        os.chmod(path, PRIVATE.directory if os.path.isdir(path) else PRIVATE.file)


def remove_temporary(directory: str) -> None:
    """Delete temporary files of killed writers in a directory and below."""
    for parent, _, names in os.walk(directory):
        for name in names:
            if TEMPORARY.fullmatch(name):
                remove(os.path.join(parent, name), missing_ok=True)


def check_writable(directory: str) -> None:
    """Raise OSError if a directory, or the parent in which it would be created, is not writable. Leaves no file."""
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, directory) from None


def _publish(
    path: str,
    data: bytes,
    precondition: Precondition,
    modes: Modes,
    rename: Callable[[str, str], None],
) -> FileVersion:
    directory, name = os.path.split(path)
    make_directory(directory, modes)
    temp = os.path.join(directory, f".{name}.{uuid4().hex[:8]}.tmp")
    try:
        _write_synced(temp, data, path, modes.file)
        written = stat(temp)
        if precondition is not None:
            precondition()
        rename(temp, path)
    finally:
        remove(temp, missing_ok=True)
    _sync_directory(directory)
    return FileVersion(written.size, written.version)  # the rename changed its ctime


def _write_synced(temp: str, data: bytes, path: str, mode: int) -> None:
    """Write data to temp and to the disk. Raises OSError with the final path, and with the sizes for a full disk."""
    try:
        with open(temp, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in DISK_FULL:
            reason += f" ({len(data):,} bytes needed, {_free_bytes(os.path.dirname(temp)):,} free)"
        raise OSError(error.errno, reason, path) from None


def _free_bytes(directory: str) -> int:
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def _link(temp: str, path: str) -> None:
    """Give the file a name that must not exist; raises FileExistsError."""
    try:
        os.link(temp, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system: look, then rename
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(temp, path)


def _sync_directory(path: str) -> None:
    """Flush the directory to disk, so that a rename survives a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
