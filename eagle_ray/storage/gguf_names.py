"""Recognise the names of GGUF files: local files, URLs, and files in hub repositories.

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
    """Return whether a local file is a GGUF file, by its name or its first bytes. An unreadable file is none."""
    try:
        with open(path, "rb") as file:
            return has_gguf_name(path) or file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def has_gguf_name(name: str) -> bool:
    """Return whether a path or a URL has the extension of a GGUF file."""
    return file_name(name).lower().endswith(GGUF_SUFFIX)


def file_name(name: str) -> str:
    """Return the last part of a path or a URL. Only an HTTP URL has a query; in a bucket, ? is an
    ordinary character."""
    path = re.split("[?#]", name)[0] if re.match("https?://", name) else name
    return path.rpartition("/")[2]


def hub_file(name: str) -> tuple[str, str] | None:
    """Return repository and path if a name stands for a GGUF file in a hub repository, else None."""
    match = HUB_FILE.fullmatch(name)
    return match.groups() if match and has_gguf_name(name) else None  # type: ignore[return-value]
