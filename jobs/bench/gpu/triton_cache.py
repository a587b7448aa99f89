"""Triton's compiled kernels, kept from one call for the next as one archive.

    with triton_cache(Path("out"), given=Path("earlier/triton-cache.tar.gz")):
        ...                                     # TRITON_CACHE_DIR is set; at the end out/triton-cache.tar.gz is written

Triton's cache has hundreds of files, and a machine that is lent returns only a few, so the archive
is what is kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_ray.kernels.triton_cache import CACHE_VARIABLE, entries, pack, unpack

ARCHIVE = "triton-cache.tar.gz"


@contextmanager
def triton_cache(out: Path, given: Path | None = None) -> Iterator[Path]:
    """Compile into a directory of this call's own, which starts with what an earlier call compiled.

    Args:
        given: an archive of an earlier call, or a directory with one; None starts with nothing.
    """
    directory = Path(tempfile.mkdtemp(prefix="triton-cache-"))
    if given is not None:
        unpack((given / ARCHIVE if given.is_dir() else given).read_bytes(), directory)
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(directory)
    try:
        yield directory
    finally:
        os.environ.pop(CACHE_VARIABLE) if before is None else os.environ.update(
            {CACHE_VARIABLE: before}
        )
        _write(out / ARCHIVE, pack(directory, entries(directory)))
        shutil.rmtree(directory, ignore_errors=True)


def _write(archive: Path, data: bytes) -> None:
    """Write the archive whole or not at all; nothing if no kernel was compiled."""
    if data:
        new = archive.with_name(f".{archive.name}")
        new.write_bytes(data)
        os.replace(new, archive)
