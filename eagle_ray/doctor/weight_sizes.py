"""The tensors of a checkpoint directory by their headers: how many bytes they will take, without reading any weight.

>>> loaded_bytes(Path("eagle_ray/assets/tiny/draft"), torch.float32)
2363392
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

FILES = ("model.safetensors", "pytorch_model.bin")  # as the loaders look for them, single or with an index
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of what is cast to the model's dtype


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """numel: elements. num_bytes: in the file. is_float: whether loading casts it to the model's dtype."""

    name: str
    numel: int
    num_bytes: int
    is_float: bool


def loaded_bytes(path: Path, dtype: torch.dtype | None) -> int | None:
    """What the checkpoint's tensors take in memory; None where it has no weights.

    dtype: of the model; None keeps every tensor as it is stored. Raises ValueError naming a file that is damaged.
    """
    headers = tensor_headers(path)
    if headers is None:
        return None
    return sum(h.numel * dtype.itemsize if dtype is not None and h.is_float else h.num_bytes for h in headers)


def tensor_headers(path: Path) -> list[TensorHeader] | None:
    """Of every tensor of a checkpoint directory; None where it has no weights. Raises ValueError naming the file."""
    files = weight_files(path)
    return [header for file in files for header in _headers(file)] if files else None


def weight_files(path: Path) -> list[Path]:
    """The files that a loader would read, in order; those an index names, where there is one."""
    for name in FILES:
        index = path / f"{name}.index.json"
        if (path / name).exists():
            return [path / name]
        if index.exists():
            return [path / shard for shard in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    return []


def _headers(file: Path) -> Iterator[TensorHeader]:
    try:
        yield from _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except (OSError, ValueError, LookupError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _safetensors(file: Path) -> Iterator[TensorHeader]:
    """The file begins with the length of its header, which is JSON (huggingface.co/docs/safetensors, Format)."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            numel = torch.Size(tensor["shape"]).numel()
            yield TensorHeader(name, numel, end - start, tensor["dtype"] in FLOATS)


def _pickled(file: Path) -> Iterator[TensorHeader]:
    """On the meta device torch reads shapes alone."""
    for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
        yield TensorHeader(name, tensor.numel(), tensor.nbytes, tensor.is_floating_point())
