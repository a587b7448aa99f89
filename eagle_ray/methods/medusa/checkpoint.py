"""Published Medusa and Hydra heads: read and write a directory with config.json and one file of tensors.

    Medusa    medusa_lm_head     N.k.linear.{weight, bias}, and N.K.weight if the heads have an lm_head
    Hydra     hydra_lm_head      hydra_mlp.N.k.{linear, res_connection}.{weight, bias}, hydra_lm_head.N.{weight, bias}

The file is a .pt (read as weights only) or a .safetensors. Missing, unexpected or misshapen tensors
are refused by name; `check_*` does so from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.head_contents import (
    BY_TENSORS,
    HeadContents,
    contents_of,
    known_keys,
    refuse_unknown_keys,
)
from eagle_ray.methods.head_directory import check_directory
from eagle_ray.methods.head_files import (
    Shape,
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

MEDUSA = "medusa_lm_head"
HYDRA = "hydra_lm_head"
Read = TypeVar("Read")
Heads = TypeVar("Heads", MedusaHeads, HydraHeads)
IGNORED = {"input_embed_fn.weight": "the target's own embedding, which was saved along"}
OF_TARGET_CONFIG = """
    hidden_size vocab_size intermediate_size num_attention_heads num_key_value_heads head_dim
    num_hidden_layers hidden_act rms_norm_eps max_position_embeddings attention_bias mlp_bias
    rope_theta rope_scaling rope_parameters sliding_window
    """
HARMLESS_IN_MEDUSA = {
    **dict.fromkeys(OF_TARGET_CONFIG.split(), "of the target, whose shape the tensors must have"),
    "architectures": BY_TENSORS,
    "medusa_hidden_size": BY_TENSORS,
    "version": "of the file's format, which the tensors tell",
    "dropout_rate": "of training",
}
MEDUSA_HEADS = "Medusa heads"
HYDRA_HEADS = "Hydra heads"
KNOWN_MEDUSA_KEYS = {
    MEDUSA_HEADS: known_keys(
        ("medusa_num_layers",),
        {},
        {**HARMLESS_IN_MEDUSA, "medusa_num_heads": BY_TENSORS},
        {},
        IGNORED,
    ),
    HYDRA_HEADS: known_keys(
        (
            "hydra_num_heads",
            "hydra_num_layers",
            "hydra_head_arch",
            "grounded_heads",
            "hidden_state_offset",
        ),
        {},
        HARMLESS_IN_MEDUSA,
        {},
        IGNORED,
    ),
}


def load_medusa(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> MedusaHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target.

    Args:
        ranks: ranks of the target; each has all of the heads.
    """
    return _load(check_medusa(path, target), path, MEDUSA, ranks)


def load_hydra(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> HydraHeads:
    """Return the heads in `path`, in fp32. Raises EngineError if they cannot be read or do not fit the target.

    Args:
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
    raw = read_config(path)
    shapes = _read(path, MEDUSA, read_shapes)
    with with_path(path):
        refuse_unknown_keys(MEDUSA_HEADS, KNOWN_MEDUSA_KEYS[MEDUSA_HEADS], raw)
        heads = _make_medusa(raw, shapes, target)
        check_tensors(MEDUSA_HEADS, heads, shapes)
    return heads


def check_hydra(path: Path, target: PretrainedConfig) -> HydraHeads:
    """Check that Hydra heads fit the target. Raises EngineError if they read more than the last feature."""
    raw = read_config(path)
    shapes = _read(path, HYDRA, read_shapes)
    with with_path(path):
        refuse_unknown_keys(HYDRA_HEADS, KNOWN_MEDUSA_KEYS[HYDRA_HEADS], raw)
        heads = _make_hydra(raw, target)
        check_tensors(HYDRA_HEADS, heads, shapes)
    return heads


def medusa_contents(path: Path, target: PretrainedConfig) -> HeadContents:
    """Sort the tensors of Medusa heads into used, harmless and unknown. Raises EngineError if they cannot be read."""
    raw = read_config(path)
    shapes = read_shapes(path, _file_names(path, MEDUSA))
    return contents_of(
        MEDUSA_HEADS,
        KNOWN_MEDUSA_KEYS[MEDUSA_HEADS],
        raw,
        {name: name for name in shapes},
        make=lambda: _make_medusa(raw, shapes, target),
        check=lambda: check_medusa(path, target),
    )


def hydra_contents(path: Path, target: PretrainedConfig) -> HeadContents:
    """Sort the tensors of Hydra heads into used, harmless and unknown. Raises EngineError if they cannot be read."""
    raw = read_config(path)
    return contents_of(
        HYDRA_HEADS,
        KNOWN_MEDUSA_KEYS[HYDRA_HEADS],
        raw,
        {name: name for name in read_shapes(path, _file_names(path, HYDRA))},
        make=lambda: _make_hydra(raw, target),
        check=lambda: check_hydra(path, target),
    )


def _make_medusa(
    raw: dict[str, Any], shapes: dict[str, Shape], target: PretrainedConfig
) -> MedusaHeads:
    """Build Medusa heads of these sizes; tensors are checked later. Raises ValueError."""
    num_layers = _number(raw, "medusa_num_layers")
    first_parts = [key.partition(".")[0] for key in shapes]
    num_heads = 1 + max((int(part) for part in first_parts if part.isdecimal()), default=-1)
    own_lm_head = f"0.{num_layers}.weight" in shapes
    sizes = max(num_heads, 1), num_layers, target.hidden_size, target.vocab_size
    with torch.device("meta"):
        return MedusaHeads(*sizes, own_lm_head=own_lm_head)


def _make_hydra(raw: dict[str, Any], target: PretrainedConfig) -> HydraHeads:
    """Build Hydra heads of these sizes; tensors are checked later. Raises ValueError."""
    for key, wanted in (
        ("hydra_head_arch", "mlp"),
        ("grounded_heads", True),
        ("hidden_state_offset", 0),
    ):
        if raw.get(key, wanted) != wanted:
            raise ValueError(
                f"Hydra heads with {key} {raw[key]!r} are not run here, only with {wanted!r}"
            )
    num_heads = _number(raw, "hydra_num_heads")
    num_layers = _number(raw, "hydra_num_layers")
    with torch.device("meta"):
        return HydraHeads(num_heads, num_layers, target.hidden_size, target.vocab_size)


def _number(raw: dict[str, Any], key: str) -> int:
    if not (isinstance(raw.get(key), int) and raw[key] >= 1):
        raise ValueError(
            f"{key} in config.json must be an integer, 1 or more, got {raw.get(key)!r}"
        )
    return raw[key]


def _read(
    path: Path, kind: str, read: Callable[[Path, tuple[str, str]], dict[str, Read]]
) -> dict[str, Read]:
    """Return the result of `read` for the heads' file, without ignored tensors."""
    names = _file_names(path, kind)
    check_directory(path, names)
    return {key: value for key, value in read(path, names).items() if key not in IGNORED}


def _file_names(path: Path, kind: str) -> tuple[str, str]:
    """Return the possible file names of these heads. Raises EngineError if none exists."""
    names = f"{kind}.safetensors", f"{kind}.pt"
    if not any((path / name).exists() for name in names):
        raise EngineError(
            f"{path} holds neither {names[0]} nor {names[1]}: name a directory of such heads"
        )
    return names
