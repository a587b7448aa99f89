"""Files that appear whole or not at all.

A reader, or a driver that starts again after a kill, never sees half a file: bytes go to a hidden temporary file beside
the final name, to the disk, and only then get that name. Does not know what the files are for.

    >>> write_json(Path("runs/a/_progress.json"), {"rows": 3})
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

TEMP_SUFFIX = ".tmp"


def write_whole(path: Path, data: bytes, before_rename: Callable[[], None] | None = None) -> None:
    """Replace path by data in one step.

    before_rename: the last look before the file becomes visible; what it raises leaves path as it was.
    """
    temp = path.with_name(f".{path.name}.{uuid4().hex[:8]}{TEMP_SUFFIX}")
    try:
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    _sync_directory(path.parent)


def write_parquet(path: Path, table: pa.Table, compression: str, before_rename: Callable[[], None]) -> None:
    """The whole file is made in memory first."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=compression)
    write_whole(path, buffer.getvalue(), before_rename)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any | None:
    """The file's value, or None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def remove_temp_files(directory: Path) -> None:
    """Delete what a killed writer left half-written in this directory."""
    for temp in directory.glob(f".*{TEMP_SUFFIX}"):
        temp.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    """The rename itself is on the disk only once its directory is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
