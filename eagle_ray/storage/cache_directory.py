"""The cache directory of a machine: ~/.cache/eagle_ray, or EAGLE_RAY_CACHE.

    directory = made_once(cache_home() / "models" / "llama-5b3c", convert)

Processes that start together make a directory once: the first one holds a file lock, the others
wait. A directory appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import log_while_waiting

log = logging.getLogger("eagle_ray")
ASK_AGAIN_S = 0.1  # seconds between two tries of a lock that has a time limit


def cache_home() -> Path:
    """Return the cache directory of this machine."""
    return Path(os.environ.get("EAGLE_RAY_CACHE") or Path.home() / ".cache" / "eagle_ray")


def cached_file(folder: str, key: Mapping[str, object], suffix: str) -> Path:
    """Return the cache file for a key.

    Args:
        key: parts of the key: JSON values, or objects with a text form.
    """
    text = dump_json(key, default=str, sort_keys=True)
    return cache_home() / folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"


@contextmanager
def locked(path: Path, waiting: str, limit_s: float | None = None) -> Iterator[bool]:
    """Hold an exclusive lock on a file in a context, which gets whether it is held. The system releases it on a kill.

    After limit_s, or on a file system without locks, the context runs without it. So the caller's
    work must be right even if several processes do it at once.

    Args:
        waiting: text of the log line while another process holds the lock.
        limit_s: maximum seconds to wait; None waits without a limit.
    """
    with path.open("ab") as file:
        with log_while_waiting(waiting):
            is_locked = _lock(file, limit_s)
        yield is_locked


def _lock(file: BinaryIO, limit_s: float | None) -> bool:
    ends_at = None if limit_s is None else time.monotonic() + limit_s
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if ends_at is None else fcntl.LOCK_NB))
                return True
            except BlockingIOError:
                if ends_at is not None and time.monotonic() > ends_at:
                    raise
                time.sleep(ASK_AGAIN_S)
    except OSError as error:
        log.warning("%s cannot be locked: %s", file.name, error)
        return False


def made_once(directory: Path, make: Callable[[Path], None], waiting: str) -> Path:
    """Return the directory. If it does not exist, call `make` with an empty directory, which is renamed afterwards.

    Raises OSError and what `make` raises; then nothing is left.

    Args:
        waiting: text of the log line, as for `locked`.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.with_name(f".{directory.name}.lock"), waiting) as is_alone:
        if directory.is_dir():
            return directory
        # Killed processes leave such files.
        for unfinished in directory.parent.glob(f".{directory.name}.*.tmp") if is_alone else ():
            shutil.rmtree(unfinished, ignore_errors=True)
        temporary = Path(
            tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent)
        )
        try:
            make(temporary)
            temporary.chmod(0o755)
            _publish(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _publish(temporary: Path, directory: Path) -> None:
    for path in temporary.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    try:
        temporary.rename(directory)
    except OSError:
        if not directory.is_dir():  # it is there if another process published it first
            raise
