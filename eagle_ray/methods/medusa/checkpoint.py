"""Published Medusa and Hydra heads: read and write a directory with config.json and one file of tensors.

    Medusa    medusa_lm_head     N.k.linear.{weight, bias}, and N.K.weight if the heads have an lm_head
    Hydra     hydra_lm_head      hydra_mlp.N.k.{linear, res_connection}.{weight, bias}, hydra_lm_head.N.{weight, bias}

The file is a .pt (read as weights only) or a .safetensors. Missing, unexpected or misshapen tensors are refused by
name; `check_*` does so from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.head_files import (
    check_tensors,
    load_into,
    read_config,
    read_shapes,
    read_tensors,
    save_head,
    with_path,
)
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.parallel.draft_shards import log_whole
from eagle_ray.parallel.rank_group import RankGroup

MEDUSA, HYDRA = "medusa_lm_head", "hydra_lm_head"
Read = TypeVar("Read")
Heads = TypeVar("Heads", MedusaHeads, HydraHeads)
IGNORED_KEYS = ("input_embed_fn.weight",)  # the target's own embedding, which was saved along


def load_medusa(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> MedusaHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target.

    ranks: ranks of the target; each has all of the heads.
    """
    return _load(check_medusa(path, target), path, MEDUSA, ranks)


def load_hydra(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> HydraHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target.

    ranks: ranks of the target; each has all of the heads.
    """
    return _load(check_hydra(path, target), path, HYDRA, ranks)


def _load(heads: Heads, path: Path, kind: str, ranks: RankGroup | None) -> Heads:
    if ranks is not None:
        log_whole(heads, ranks)
    return load_into(heads, path, _read(path, kind, read_tensors))


def save_path_heads(heads: MedusaHeads | HydraHeads, path: Path) -> None:
    """Write the published layout: config.json, and the heads in bf16."""
    [(kind, (num_heads, num_layers, *_))] = heads.shape.items()
    config: dict[str, Any] = {f"{kind}_num_heads": num_heads, f"{kind}_num_layers": num_layers}
    if isinstance(heads, HydraHeads):
        config |= {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    save_head(heads, config, path, f"{kind}_lm_head.safetensors")


def check_medusa(path: Path, target: PretrainedConfig) -> MedusaHeads:
    """Return the heads on the meta device; no weights are read. Raises EngineError.

    The file tells their number, since published configs do not always.
    """
    raw, shapes = read_config(path), _read(path, MEDUSA, read_shapes)
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
    raw, shapes = read_config(path), _read(path, HYDRA, read_shapes)
    for key, wanted in (("hydra_head_arch", "mlp"), ("grounded_heads", True), ("hidden_state_offset", 0)):
        if raw.get(key, wanted) != wanted:
            raise EngineError(f"{path}: Hydra heads with {key} {raw[key]!r} are not run here, only with {wanted!r}")
    num_heads, num_layers = (_number(path, raw, key) for key in ("hydra_num_heads", "hydra_num_layers"))
    with torch.device("meta"):
        heads = HydraHeads(num_heads, num_layers, target.hidden_size, target.vocab_size)
    with with_path(path):
        check_tensors("Hydra heads", heads, shapes)
    return heads


def _number(path: Path, raw: dict[str, Any], key: str) -> int:
    if not (isinstance(raw.get(key), int) and raw[key] >= 1):
        raise EngineError(f"{path}: {key} in config.json must be an integer, 1 or more, got {raw.get(key)!r}")
    return raw[key]


def _read(path: Path, kind: str, read: Callable[[Path, tuple[str, str]], dict[str, Read]]) -> dict[str, Read]:
    """Return what `read` does of the file of such heads, without ignored tensors."""
    names = f"{kind}.safetensors", f"{kind}.pt"
    if not any((path / name).exists() for name in names):
        raise EngineError(f"{path} holds neither {names[0]} nor {names[1]}: name a directory of such heads")
    return {key: value for key, value in read(path, names).items() if key not in IGNORED_KEYS}
