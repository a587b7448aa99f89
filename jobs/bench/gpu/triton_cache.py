"""Triton's compiled kernels, kept from one call for the next as one archive.

    with triton_cache(Path("out"), given=Path("earlier/triton-cache.tar.gz")):
        ...                                     # TRITON_CACHE_DIR is set; at the end out/triton-cache.tar.gz is written

Triton's cache has hundreds of files, and a machine that is lent returns only a few, so the archive is what is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"
ARCHIVE = "triton-cache.tar.gz"
OMITTED = (".ttir", ".ttgir", ".llir", ".source")  # intermediate code, which a cached kernel does not need


@contextmanager
def triton_cache(out: Path, given: Path | None = None) -> Iterator[Path]:
    """Compile into a directory of this call's own, which starts with what an earlier call compiled.

    Args:
        given: an archive of an earlier call, or a directory with one; None starts with nothing.
    """
    directory = Path(tempfile.mkdtemp(prefix="triton-cache-"))
    if given is not None:
        unpack(given / ARCHIVE if given.is_dir() else given, directory)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(directory)
    try:
        yield directory
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})
        pack(directory, out / ARCHIVE)
        shutil.rmtree(directory, ignore_errors=True)


def pack(directory: Path, archive: Path) -> None:
    """Write the archive whole or not at all; nothing if no kernel was compiled."""
    if not any(directory.iterdir()):
        return
    new = archive.with_name(f".{archive.name}")
    with tarfile.open(new, "w:gz", compresslevel=4) as file:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.suffix not in OMITTED and not path.parent.name.startswith("tmp."):
                file.add(path, path.relative_to(directory))
    os.replace(new, archive)


def unpack(archive: Path, directory: Path) -> None:
    """Extract an archive. Triton's group files name absolute paths, which are written again for this directory."""
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    for group in directory.rglob("__grp__*.json"):
        children = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in children}}))
