"""Pack Triton's compiled kernels for another machine or a later start.

    data = pack(cache_directory(), entries(cache_directory()))
    unpack(data, cache_directory())

An entry is a directory whose name is a hash of source, options and compiler, so entries of another
program or version are never loaded. Host modules are left out: an archive contains device code
only.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eagle_ray.core.json_text import dump_json

CACHE_VARIABLE = "TRITON_CACHE_DIR"
# Intermediate code, which a cached kernel does not need.
OMITTED = (
    ".ttir",
    ".ttgir",
    ".llir",
    ".source",
)
HOST_MODULE = ".so"
UNFINISHED = "tmp."  # how the directory begins in which Triton writes a file
GROUPS = "__grp__*.json"  # the last file of a kernel to be written
# Bytes of an unpacked archive; one model's kernels take a few percent of it.
MAX_ARCHIVE_BYTES = 1 << 30
ARCHIVE_DAMAGES = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)


def cache_directory() -> Path:
    """Return the directory in which Triton stores compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get(CACHE_VARIABLE) or home / ".triton" / "cache")


def entries(directory: Path) -> set[str]:
    """Return the names of the entries that hold a complete kernel."""
    return {group.parent.name for group in directory.glob(f"*/{GROUPS}")}


def pack(directory: Path, names: Iterable[str]) -> bytes:
    """Return an archive of these entries, or no bytes if they contain no kernel."""
    files: list[Path] = []
    for name in sorted(names):
        paths = sorted((directory / name).rglob("*"))
        files += [path for path in paths if _is_needed(path)]
    if not files:
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=4) as archive:
        for path in files:
            archive.add(path, path.relative_to(directory))
    return packed.getvalue()


def _is_needed(path: Path) -> bool:
    is_omitted = path.suffix in (*OMITTED, HOST_MODULE) or path.parent.name.startswith(UNFINISHED)
    return path.is_file() and not is_omitted


def unpack(data: bytes, directory: Path) -> set[str]:
    """Add an archive's missing entries to a directory, and return the names of all its entries.

    Raises ValueError if the data is damaged or no archive; then nothing is added.
    """
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=directory))
    try:
        plain = _decompress(data)
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            members = [
                member
                for member in archive
                if member.isfile() and Path(member.name).suffix != HOST_MODULE
            ]
            archive.extractall(temporary, members, filter="data")
        for group in temporary.rglob(GROUPS):
            _set_paths(group, directory / group.parent.relative_to(temporary))
        names = entries(temporary)
        for name in names - entries(directory):
            with suppress(OSError):  # another process has made it since
                (temporary / name).rename(directory / name)
        return names
    except ARCHIVE_DAMAGES as error:
        raise ValueError(f"it holds no kernels ({type(error).__name__}: {error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _decompress(data: bytes) -> bytes:
    """Return the data of a gzip file. Raises ValueError if there is more of it than any kernels have."""
    with gzip.open(io.BytesIO(data)) as stream:
        plain = stream.read(MAX_ARCHIVE_BYTES + 1)  # to its end, where the checksum is
    if len(plain) > MAX_ARCHIVE_BYTES:
        raise ValueError(f"more than {MAX_ARCHIVE_BYTES >> 20} MiB")
    return plain


def _set_paths(group: Path, directory: Path) -> None:
    """Write the absolute paths of a group's files again, for the directory in which they will be."""
    children = json.loads(group.read_text("utf-8"))["child_paths"]
    group.write_text(
        dump_json({"child_paths": {name: str(directory / name) for name in children}}), "utf-8"
    )
