"""Published Medusa and Hydra heads: read and write a directory with config.json and one file of tensors.

    Medusa    medusa_lm_head     N.k.linear.{weight, bias}, and N.K.weight if the heads have an lm_head
    Hydra     hydra_lm_head      hydra_mlp.N.k.{linear, res_connection}.{weight, bias}, hydra_lm_head.N.{weight, bias}

The file is a .pt (read as weights only) or a .safetensors. Missing, unexpected or misshapen tensors are refused by
name; `check_*` does so from the shapes alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.head_files import check_tensors, load_pickle, read_config, read_file, with_path
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads

MEDUSA, HYDRA = "medusa_lm_head", "hydra_lm_head"
IGNORED_KEYS = ("input_embed_fn.weight",)  # the target's own embedding, which was saved along


def load_medusa(path: Path, target: PretrainedConfig) -> MedusaHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target."""
    return _load_into(check_medusa(path, target), _tensors(path, MEDUSA))


def load_hydra(path: Path, target: PretrainedConfig) -> HydraHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target."""
    return _load_into(check_hydra(path, target), _tensors(path, HYDRA))


def save_path_heads(heads: MedusaHeads | HydraHeads, path: Path) -> None:
    """Write the published layout: config.json, and the heads in bf16."""
    [(kind, (num_heads, num_layers, *_))] = heads.shape.items()
    config: dict[str, Any] = {f"{kind}_num_heads": num_heads, f"{kind}_num_layers": num_layers}
    if isinstance(heads, HydraHeads):
        config |= {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {key: value.detach().bfloat16().contiguous() for key, value in heads.state_dict().items()}
    save_file(tensors, path / f"{kind}_lm_head.safetensors", metadata={"format": "pt"})


def check_medusa(path: Path, target: PretrainedConfig) -> MedusaHeads:
    """Return the heads on the meta device; no weights are read. Raises EngineError.

    The file tells their number, since published configs do not always.
    """
    raw, shapes = read_config(path), _shapes(path, MEDUSA)
    num_layers = _number(path, raw, "medusa_num_layers")
    num_heads = 1 + max((int(key.split(".")[0]) for key in shapes if key.split(".")[0].isdecimal()), default=-1)
    own_lm_head = f"0.{num_layers}.weight" in shapes
    sizes = max(num_heads, 1), num_layers, target.hidden_size, target.vocab_size
    with torch.device("meta"):
        heads = MedusaHeads(*sizes, own_lm_head=own_lm_head)
    with with_path(path):
        check_tensors("Medusa heads", heads, shapes)
    return heads


def check_hydra(path: Path, target: PretrainedConfig) -> HydraHeads:
    """Do the same for Hydra heads. Raises EngineError for architectures that read more than the last feature."""
    raw, shapes = read_config(path), _shapes(path, HYDRA)
    for key, wanted in (("hydra_head_arch", "mlp"), ("grounded_heads", True), ("hidden_state_offset", 0)):
        if raw.get(key, wanted) != wanted:
            raise EngineError(f"{path}: Hydra heads with {key} {raw[key]!r} are not run here, only with {wanted!r}")
    num_heads, num_layers = (_number(path, raw, key) for key in ("hydra_num_heads", "hydra_num_layers"))
    with torch.device("meta"):
        heads = HydraHeads(num_heads, num_layers, target.hidden_size, target.vocab_size)
    with with_path(path):
        check_tensors("Hydra heads", heads, shapes)
    return heads


def _load_into(heads: nn.Module, tensors: dict[str, Tensor]) -> Any:
    heads.load_state_dict(tensors, assign=True)
    return heads.float()


def _number(path: Path, raw: dict[str, Any], key: str) -> int:
    if not (isinstance(raw.get(key), int) and raw[key] >= 1):
        raise EngineError(f"{path}: {key} in config.json must be an integer, 1 or more, got {raw.get(key)!r}")
    return raw[key]


def _shapes(path: Path, name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in _read(path, name, "meta").items()}


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    return _read(path, name, "cpu")


def _read(path: Path, name: str, device: str) -> dict[str, Tensor]:
    """On the meta device: shapes, without reading the numbers."""
    safetensors, pickled = path / f"{name}.safetensors", path / f"{name}.pt"
    if not safetensors.exists() and not pickled.exists():
        raise EngineError(f"{path} holds neither {safetensors.name} nor {pickled.name}: name a directory of such heads")
    if safetensors.exists():
        tensors = read_file(safetensors, load_file if device == "cpu" else _headers)
    else:
        tensors = read_file(pickled, lambda file: load_pickle(file, device))
    return {key: value for key, value in tensors.items() if key not in IGNORED_KEYS}


def _headers(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        return {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}
