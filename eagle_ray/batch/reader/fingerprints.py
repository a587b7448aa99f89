"""Fingerprints of input files, which a run records, so that a resume detects changed input.

S3's ETag identifies an object's content. A local file's time does not: a copy, a checkout or
``touch`` changes it alone, and a program can set it back. So each local file is read once when a
run first meets it, for a digest, and again if its state has changed. The state is its inode and
ctime, which no program can set. A file that changed less than SETTLED_NS before it was read has no
state, because a second change could fall into the same tick of the file system's clock: it is read
again at the next start. Files of more than MAX_HASHED_BYTES are compared by size and time only,
since hashing terabytes at every start would take too long.

    fingerprints(plan.files, known={})
    # {'/data/in.jsonl': {'size': 12, 'mtime_ns': 1700000000000000000, 'state': '5-17...', 'digest': '0a2f...'}}
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.jsonl_files import is_json
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import Incomplete, WorkerDefect
from eagle_ray.runs.recorded_inputs import Fingerprint, what_changed
from eagle_ray.storage.path import StoragePath

MAX_HASHED_BYTES = 16 << 30  # about half a minute
PIECE = 1 << 20
SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system in use, FAT's


def fingerprints(
    files: Iterable[InputFile], known: Mapping[str, Fingerprint]
) -> dict[str, Fingerprint]:
    """Return the fingerprint of each file as it is now, by path.

    Args:
        known: recorded fingerprints; a file with a recorded version and state is not read again.
    """
    files = list(files)
    prints = {file.path: _noted(file, known) or file.version.as_json() for file in files}
    unread = [
        file for file in files if file.storage_path.is_local and "digest" not in prints[file.path]
    ]
    if sum(file.version.size for file in unread) > MAX_HASHED_BYTES:
        return prints

    for file in unread:
        began_ns = time.time_ns()
        prints[file.path]["digest"] = _digest(file.storage_path)

        # A file that changed just now may change again without another state.
        changed_ns = file.version.changed_ns
        if changed_ns is not None and changed_ns < began_ns - SETTLED_NS:
            prints[file.path]["state"] = file.version.state
    return prints


def begins_with(file: StoragePath, was: Fingerprint, now: Fingerprint) -> bool:
    """Return whether a local file of lines is the recorded file with further lines appended.

    The recorded last line may have been cut: it was no row then (``rows_in_jsonl``). If it was a
    row, it must not have become another one.
    """
    if not file.is_local or "digest" not in was:
        return False
    if was["size"] == 0 or now["size"] <= was["size"]:
        return False

    with file.open() as stream:
        content = hashlib.blake2b(digest_size=16)
        left = was["size"]
        last_line = b""
        while left > 0 and (piece := stream.read(min(PIECE, left))):
            content.update(piece)
            left -= len(piece)
            *ended, rest = piece.rsplit(b"\n", 1)
            last_line = rest if ended else last_line + rest
        next_byte = stream.read(1)
    if content.hexdigest() != was["digest"]:
        return False

    has_line_end = next_byte in (b"\n", b"\r")
    was_row = bool(last_line.strip()) and is_json(last_line)
    return has_line_end or not was_row


def check_unchanged(files: Iterable[InputFile], noted: Mapping[str, Fingerprint]) -> None:
    """Raise InputChanged if a local file has changed since it was scanned.

    Args:
        noted: fingerprints by path. If only a file's time has changed, its content is compared with
            the recorded digest. Readers check S3 objects themselves: an ETag is valid everywhere, a
            local time only on this machine.
    """
    for file in files:
        if file.storage_path.is_local and (
            difference := _difference(file, noted.get(file.path, {}))
        ):
            raise file.changed_error(difference)


@contextmanager
def detect_changes(files: Sequence[InputFile], noted: Mapping[str, Fingerprint]) -> Iterator[None]:
    """Raise InputChanged instead of an error that a changed file may have caused. Arguments as for check_unchanged."""
    try:
        yield
    except (ConfigError, Incomplete, WorkerDefect):
        check_unchanged(files, noted)
        raise


def _difference(file: InputFile, noted: Fingerprint) -> str | None:
    with file.detect_changes():
        stamp = file.storage_path.stat()
        if stamp == file.version:
            return None
        now = stamp.as_json()
        if "digest" in noted and stamp.size == file.version.size:
            now["digest"] = _digest(file.storage_path)
    return what_changed(noted | file.version.as_json(), now)


def _noted(file: InputFile, known: Mapping[str, Fingerprint]) -> Fingerprint | None:
    noted = known.get(file.path, {})
    if not noted.items() >= file.version.as_json().items():
        return None
    if "digest" in noted and noted.get("state") != file.version.state:
        return None
    return dict(noted)


def _digest(location: StoragePath) -> str:
    content = hashlib.blake2b(digest_size=16)
    with location.open() as stream:
        while piece := stream.read(PIECE):
            content.update(piece)
    return content.hexdigest()
