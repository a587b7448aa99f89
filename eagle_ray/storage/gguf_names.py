"""How a GGUF file is named: as a local file, below a URL, or in a hub repository.

    is_gguf_file("blobs/sha256-1a2b")                      # by its name or its first bytes
    has_gguf_name("https://host/A.GGUF?download=true")     # True
    hub_file("org/name/q4/model.gguf")                     # ("org/name", "q4/model.gguf")

Only a local file is opened.
"""

from __future__ import annotations

import re

MAGIC = b"GGUF"  # how the files begin
GGUF_SUFFIX = ".gguf"
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+)")


def is_gguf_file(path: str) -> bool:
    """Return whether a local file is one, by its name or by how it begins. One that cannot be read is none."""
    try:
        with open(path, "rb") as file:
            return has_gguf_name(path) or file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def has_gguf_name(name: str) -> bool:
    """Return whether a path or a URL ends as the name of a GGUF file."""
    return file_name(name).lower().endswith(GGUF_SUFFIX)


def file_name(name: str) -> str:
    """Return the last part of a path or a URL. Only HTTP has queries; in a bucket, ? is a letter."""
    path = re.split("[?#]", name)[0] if re.match("https?://", name) else name
    return path.rpartition("/")[2]


def hub_file(name: str) -> tuple[str, str] | None:
    """Return the repository and the path in it, if a name is that of a GGUF file in a hub repository."""
    match = HUB_FILE.fullmatch(name)
    return match.groups() if match and has_gguf_name(name) else None  # type: ignore[return-value]
