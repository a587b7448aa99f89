"""Read GGUF files: metadata, and tensors as float32 arrays.

    file = GGUFFile.open(path)
    file.metadata["llama.block_count"]        # 30
    file.tensor("token_embd.weight").shape    # (49152, 576)

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all numbers little-endian:

    magic "GGUF" | version | number of tensors | number of metadata entries
    metadata entries: key, type, value
    tensor entries: name, dimensions (fastest first), type, offset into the data
    padding to the alignment | tensor data
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_ray.gguf.block_formats import dequantize, num_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has 32-bit lengths
DEFAULT_ALIGNMENT = 32  # bytes
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type id
STRING = 8
ARRAY = 9


class GGUFError(ValueError):
    """A file that is not GGUF, is cut off, or holds a type that is not supported."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Attributes:
    shape: slowest dimension first, as NumPy has it.
    type_id: the block format.
    offset: in bytes from the start of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """An open file. Use `open` to build it.

    Attributes:
        metadata: values by key: numbers, strings, booleans and lists of them.
        tensors: entries by name.
    """

    def __init__(self, data: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorEntry]):
        self._data = data
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header of a file; tensor data is mapped into memory. Raises GGUFError, OSError."""
        with path.open("rb") as file:
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file cannot be mapped
                raise GGUFError(f"{path}: {error}") from error
        try:
            return cls(data, *_read_header(_Cursor(data)))
        except (struct.error, UnicodeDecodeError, GGUFError) as error:
            raise GGUFError(f"{path}: not a readable GGUF file: {error}") from error

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as float32. Raises KeyError if there is none of this name, GGUFError if its data cannot be
        read.
        """
        entry = self.tensors[name]
        try:
            size = num_bytes(entry.type_id, entry.shape)
            block_data = np.frombuffer(self._data, np.uint8, size, entry.offset)
            return dequantize(block_data, entry.type_id, entry.shape)
        except ValueError as error:
            raise GGUFError(f"tensor {name} cannot be read: {error}") from error


class _Cursor:
    """A position in the header."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self.data, self.offset)[0]
        self.offset += struct.calcsize(f"<{code}")
        return value

    def raw(self, size: int) -> bytes:
        if self.offset + size > len(self.data):
            raise GGUFError("the file ends early")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def string(self) -> str:
        return self.raw(self.scalar("Q")).decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            item_type = self.scalar("I")
            return [self.value(item_type) for _ in range(self.scalar("Q"))]
        if type_id not in SCALARS:
            raise GGUFError(f"unknown metadata type {type_id}")
        return self.scalar(SCALARS[type_id])


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if cursor.raw(len(MAGIC)) != MAGIC:
        raise GGUFError("it does not begin with GGUF")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise GGUFError(f"version {version} is not supported")
    num_tensors = cursor.scalar("Q")
    num_entries = cursor.scalar("Q")

    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))

    relative = {}
    for _ in range(num_tensors):
        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        relative[name] = TensorEntry(tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q"))

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: TensorEntry(t.shape, t.type_id, start + t.offset) for name, t in relative.items()}
    return metadata, tensors
