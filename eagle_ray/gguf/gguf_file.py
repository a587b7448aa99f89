"""Open a GGUF file: its metadata by key, its tensors by name.

    file = GGUFFile.open(path)
    file.metadata["general.architecture"]     # "llama"
    file.tensor("output_norm.weight")         # float32, dequantised if it is quantised

The package `gguf` reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize

from eagle_ray.gguf.blocks import DENSE, BlockValues, GGUFError, read_blocks


class GGUFFile:
    """An open GGUF file. Built by `open`.

    Attributes:
        metadata: values by key: numbers, strings, booleans and lists of them.
        tensors: tensors by name; `data` has a tensor's blocks as stored, mapped into memory.
    """

    def __init__(self, metadata: dict[str, Any], tensors: dict[str, ReaderTensor]):
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Open a file and read its header. Raises GGUFError, OSError."""
        try:
            reader = _BoundedReader(path)
            metadata = {
                key: field.contents()
                for key, field in reader.fields.items()
                if not key.startswith("GGUF.")
            }
        except (ValueError, KeyError, GGUFError) as error:
            raise GGUFError(f"{path}: not a readable GGUF file: {error}") from error
        return cls(metadata, {tensor.name: tensor for tensor in reader.tensors})

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as float32. Raises KeyError if there is none of this name, GGUFError if
        its type is not supported.
        """
        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GGUFError(f"tensor {name} cannot be read: {error}") from error

    def is_dense(self, name: str) -> bool:
        """Return whether a tensor is stored as floating-point numbers, not as quantised blocks. Raises KeyError."""
        return self.tensors[name].tensor_type.name in DENSE

    def blocks(self, name: str) -> BlockValues:
        """Return a quantised matrix without dequantising it. Raises KeyError, or GGUFError if its
        type is not supported."""
        return read_blocks(self.tensors[name])


class _BoundedReader(GGUFReader):
    """A reader that refuses to read past the end of the file. It also opens SmolLM2 four times as
    fast as its base, which slices a memmap for each of 150,000 tokens and merges (0.39 s and 1.59 s
    on 2 CPU cores).
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> np.ndarray:
        ordered = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        if offset + int(count) * ordered.itemsize > self.data.size:
            raise GGUFError("the file ends early")
        return np.frombuffer(self.data, ordered, int(count), offset)
