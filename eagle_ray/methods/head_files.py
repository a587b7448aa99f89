"""Published heads: read and write a directory with config.json and weights as a draft head.

    head = load_head(path, target.config)        # EAGLE-1, 2 or 3, recognized by its tensors
    head = load_dflash(path, target.config)      # DFlash, or a causal head of JetSpec

Weights are safetensors or pickles (weights only), single or sharded. `head_spec` decides whether a head fits a
target; `meta_head` answers that from headers alone, before anything is read.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.methods.dflash.checkpoint import build_dflash, own_names
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.eagle.checkpoint import Shape, build_head, normalize_names
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.storage.model_files import check_no_pointers

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError, pickle.PickleError)
FLOATS = ("F64", "F32", "F16", "BF16")  # of safetensors
VOCABULARY_MAPS = ("d2t", "t2d")
Read = TypeVar("Read")


def load_head(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target."""
    head = meta_head(path, target)
    tensors = normalize_names(read_tensors(path))
    if isinstance(head, Eagle3Head):
        with with_path(path):
            tensors |= vocabulary_maps(head, tensors)
    head.load_state_dict(tensors, assign=True)
    return head.float()


def meta_head(path: Path, target: PretrainedConfig) -> EagleHead | Eagle3Head:
    """Return the head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        return build_head(raw, shapes, target)


def load_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target."""
    head = meta_dflash(path, target)
    tensors = own_names(read_tensors(path))
    if head.lm_head is not None:
        with with_path(path):
            tensors |= vocabulary_maps(head, tensors)
    head.load_state_dict(tensors, assign=True)
    return head.float()


def meta_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        return build_dflash(raw, shapes, target)


def save_head(head: nn.Module, raw_config: dict[str, Any], path: Path) -> None:
    """Write the published layout: the given config.json, and model.safetensors in bf16.

    Vocabulary maps are left out if the head drafts every token: vLLM 0.33 refuses them then.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    skipped = VOCABULARY_MAPS if isinstance(head, Eagle3Head) and head.token_ids is None else ()
    tensors = {key: value.detach().contiguous() for key, value in head.state_dict().items() if key not in skipped}
    halves = {key: value.bfloat16() if value.is_floating_point() else value for key, value in tensors.items()}
    save_file(halves, path / SAFETENSORS, metadata={"format": "pt"})


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises EngineError."""
    check_no_pointers([path / "config.json"])
    try:
        return dict(json.loads((path / "config.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"the head's config in {path} cannot be read: {one_line(error)}") from error


class TensorHeader(NamedTuple):
    """num_bytes: as stored. is_float: loading casts it to the model's dtype."""

    shape: Shape
    num_bytes: int
    is_float: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_headers(path: Path) -> dict[str, TensorHeader] | None:
    """Return the header of every tensor by name; None if there are no weights. Raises EngineError."""
    has_weights = any(_files(path, name) for name in (SAFETENSORS, PICKLE))
    return _read(path, _headers_of_safetensors, _headers_of_pickle) if has_weights else None


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shape of every tensor by name, from headers. Raises EngineError."""
    return {name: header.shape for name, header in _read(path, _headers_of_safetensors, _headers_of_pickle).items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor by name. Raises EngineError."""
    return _read(path, load_file, lambda file: load_pickle(file, "cpu"))


def _read(
    path: Path, safetensors: Callable[[Path], Mapping[str, Read]], pickled: Callable[[Path], Mapping[str, Read]]
) -> dict[str, Read]:
    for name, read in ((SAFETENSORS, safetensors), (PICKLE, pickled)):
        if files := _files(path, name):
            return {key: value for file in files for key, value in read_file(file, read).items()}
    raise EngineError(f"the weights in {path} cannot be read: there is neither {SAFETENSORS} nor {PICKLE}")


def read_file(file: Path, read: Callable[[Path], Mapping[str, Read]]) -> Mapping[str, Read]:
    """Return what `read` returns for a file of weights. Raises EngineError with the file and the fix."""
    check_no_pointers([file])
    try:
        return read(file)
    except pickle.UnpicklingError as error:
        raise EngineError(
            f"the weights in {file} cannot be read: it is damaged, or holds more than weights, which is never "
            "run here; convert it to safetensors"
        ) from error
    except UNREADABLE as error:
        remedy = "" if isinstance(error, ValueError) else "; if it was cut off, fetch it again"
        reason = one_line(error) or type(error).__name__
        raise EngineError(f"the weights in {file} cannot be read: {reason}{remedy}") from error


def _files(path: Path, name: str) -> list[Path]:
    """Return the file of this name, or the shards that its index names, or nothing."""
    index = path / f"{name}.index.json"
    if (path / name).exists() or not index.exists():
        return [path / name] if (path / name).exists() else []
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if all(Path(shard).name == shard for shard in shards):
            return [path / shard for shard in shards]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(f"{index} is no index of weights: {one_line(error)}") from error
    raise EngineError(f"{index} names shards that are missing from its directory")


def _headers_of_safetensors(file: Path) -> dict[str, TensorHeader]:
    with safe_open(file, "pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return {key: _header(tuple(one.get_shape()), one.get_dtype()) for key, one in slices.items()}


def _header(shape: Shape, dtype: str) -> TensorHeader:
    """Return the header of a tensor of safetensors. dtype: such as BF16, BOOL or F8_E4M3, with its bits."""
    bits = re.search(r"\d+", dtype)
    return TensorHeader(shape, prod(shape) * int(bits[0] if bits else 8) // 8, dtype in FLOATS)


def _headers_of_pickle(file: Path) -> dict[str, TensorHeader]:
    tensors = load_pickle(file, "meta")
    return {key: TensorHeader(tuple(x.shape), x.nbytes, x.is_floating_point()) for key, x in tensors.items()}


def load_pickle(file: Path, device: str) -> dict[str, Tensor]:
    """Load weights only; anything else in a pickle is refused. Archives are memory-mapped, so reading
    shapes is cheap.
    """
    loaded = torch.load(file, map_location=device, mmap=zipfile.is_zipfile(file), weights_only=True)
    named = isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)
    if not (named and all(isinstance(value, Tensor) for value in loaded.values())):
        raise ValueError(f"{file.name} holds something else than named tensors")
    return loaded


def vocabulary_maps(head: Eagle3Head | DFlashHead, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return d2t and t2d. Missing maps, and maps of a head that drafts every token, are made and not read.

    Raises ValueError if d2t does not select tokens of the target.
    """
    count, vocab_size = len(head.d2t), head.config.vocab_size
    if tensors.get("d2t", head.d2t).is_floating_point():
        raise ValueError("d2t holds no whole numbers")
    ids = torch.arange(count) + (0 if count == vocab_size else tensors["d2t"].long())
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"d2t maps to tokens {int(ids.min())} to {int(ids.max())}, and the target has {vocab_size}")
    if len(ids.unique()) < count:
        raise ValueError(f"d2t maps {count} draft tokens to {len(ids.unique())} different tokens of the target")
    chosen = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(count), "t2d": chosen}


@contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Add the directory to errors of heads that do not fit."""
    try:
        yield
    except ValueError as error:
        raise EngineError(f"{path}: {error}") from error
