"""Refuse a directory that does not contain the kind of head that the configuration names.

    raw, shapes = read_head(path, target)      # config.json and the shapes of a head's tensors

Refused with a message that says what was found:

- an adapter (LoRA), a language model, two heads; - a head of a kind that this release does not
draft with (OTHER_HEADS), by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.head_files import (
    HEAD_WEIGHTS,
    SAFETENSORS,
    SPECULATORS,
    Shape,
    read_config,
    read_shapes,
    with_path,
)

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MAX_NESTED = 8  # directories of heads that are named
ABSENT_FILE = "absent"  # in place of the name of a file that is not looked at
OF_PATH_HEADS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
OF_MODELS = re.compile(r"^(model|transformer|language_model|gpt_neox)\..*(layers|h)\.(\d+)\.")
INSTEAD = (
    "use an EAGLE, Medusa, Hydra or DFlash head of this target, a small model "
    "(speculative.method: draft_model), or drafts without a model (speculative.method: suffix)"
)
# Heads by their names in config.json (classes, speculators_model_type, projector_type) or by a part
# of a tensor's name, and what they are.
OTHER_HEADS: tuple[tuple[str, str, str], ...] = (
    (
        r"deepseek\w*eagle|eagle3?deepseek|eagle3?mla|kimi\w*eagle",
        r"\.kv_a_proj_with_mqa\.|\.kv_b_proj\.",
        "a draft with multi-head latent attention (MLA)",
    ),
    (r"gemma4", r"\.layer_scalar$|per_layer_", "a head with Gemma 4's layers"),
    (r"xpress", r"(^|\.)xpress", "an xPress head"),
    (r"lilicorr", r"(^|\.)lilicorr", "a LiLiCorr head"),
    (r"^uno|unodraft|unospec", r"(^|\.)uno_", "a UNO head"),
    (r"eagle-?_?4", r"(^|\.)eagle4", "an EAGLE-4 head"),
    (
        r"mtp|nextn",
        r"(^|\.)(mtp|eh_proj|enorm|hnorm|shared_head)\.|^mtp_",
        "a target's own module for multi-token prediction (MTP)",
    ),
    (r"mlpspeculator|^mlp_speculator", r"^speculator\.", "an MLP speculator"),
    (
        r"^eagle$",
        r"^embedding_layernorm\.",
        "a head in the form of EAGLE-1 that speculators or vLLM made",
    ),
)
RECORDS = "acceptance-*.safetensors"  # how often a head was accepted


def read_head(
    path: Path, target: PretrainedConfig | None = None
) -> tuple[dict[str, Any], dict[str, Shape]]:
    """Return config.json and the shapes of the tensors of a head.

    Raises EngineError if the directory holds something else, or a head of another kind.

    Args:
        target: the target's config, whose sizes appear in the error for a language model.
    """
    check_directory(path)
    raw = read_config(path)
    shapes = read_shapes(path)
    with with_path(path):
        refuse_other_heads(raw, shapes)
        _refuse_models(raw, shapes, target)
    return raw, shapes


def check_directory(path: Path, names: tuple[str, str] = HEAD_WEIGHTS) -> None:
    """Raise EngineError if a directory holds an adapter, a second head, or heads in directories of its own.

    Args:
        names: names of the head's file as safetensors and as pickle.
    """
    adapter = next((name for name in ADAPTERS if (path / name).exists()), None)
    if adapter is not None and not any((path / name).exists() for name in names):
        raise EngineError(
            f"{path}: it holds an adapter ({adapter}) and no head; merge an adapter into the target, and name a head"
        )
    nested = sorted(file.parent.name for file in path.glob("*/config.json"))
    if nested and not (path / "config.json").exists():
        raise EngineError(
            f"{path} has no config.json, and its directories {', '.join(nested[:MAX_NESTED])} have: name one of them"
        )
    others = [*_unread_weights(path, names)]
    if others:
        raise EngineError(
            f"{path}: it holds {names[0]} and {', '.join(sorted(others))}, which are two heads; leave one of "
            "them in the directory"
        )
    if all((path / name).exists() for name in names):
        ours = read_shapes(path, (names[0], ABSENT_FILE))
        theirs = read_shapes(path, (ABSENT_FILE, names[1]))
        if ours != theirs:
            raise EngineError(
                f"{path}: {names[0]} has {len(ours)} tensors and {names[1]} has {len(theirs)}, of which "
                f"{len({*ours.items()} & {*theirs.items()})} are equal in name and shape: they are two heads; "
                "leave one of them in the directory"
            )


def refuse_other_heads(raw: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError for a head of a kind that this release does not draft with."""
    words = [*_names_of_kind(raw)]
    for in_config, in_tensors, what in OTHER_HEADS:
        named = next((word for word in words if re.search(in_config, word, re.IGNORECASE)), None)
        if named is None:
            named = next((name for name in names if re.search(in_tensors, name)), None)
        if named is not None:
            raise ValueError(f"it is {what} ({named}), which this release does not run: {INSTEAD}")


def _names_of_kind(raw: Mapping[str, Any]) -> list[str]:
    """Return the words of a config.json that name a kind of head."""
    classes = raw.get("architectures")
    words = [str(name) for name in classes] if isinstance(classes, list) else []
    words += [str(raw[key]) for key in (SPECULATORS, "model_type") if raw.get(key)]
    for key in ("dflash_config", "transformer_layer_config"):
        section = raw.get(key)
        if isinstance(section, Mapping):
            words += [
                str(section[key]) for key in ("projector_type", "model_type") if section.get(key)
            ]
    if raw.get("projector_type"):
        words.append(str(raw["projector_type"]))
    if raw.get("kv_lora_rank"):
        words.append("eagle3mla")
    return words


def is_model(names: Collection[str]) -> bool:
    """Return whether tensor names are those of a language model."""
    return "fc.weight" not in names and any(OF_MODELS.search(name) for name in names)


def _refuse_models(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig | None
) -> None:
    """Raise ValueError for the tensors of a language model, or of an adapter."""
    adapted = next((name for name in shapes if ".lora_A." in name or "lora_A.weight" in name), None)
    if adapted is not None:
        raise ValueError(
            f"it is an adapter ({adapted}) and no head; merge an adapter into the target, and name a head"
        )
    if not is_model(shapes):
        return
    matches = [match for name in shapes if (match := OF_MODELS.search(name)) is not None]
    num_layers = 1 + max(int(match[3]) for match in matches)
    own = f"hidden_size {raw.get('hidden_size')}, vocab_size {raw.get('vocab_size')}"
    line = f"it is a language model of {num_layers} layers ({own}) and no head"
    if target is not None:
        line += (
            f"; the target has {target.num_hidden_layers} layers, hidden_size {target.hidden_size} and "
            f"vocab_size {target.vocab_size}"
        )
    raise ValueError(
        f"{line}. Name a head as model.draft, or set speculative.method to draft_model for a small model"
    )


def _unread_weights(path: Path, names: tuple[str, str]) -> set[str]:
    """Return the files of weights next to a head's own: other safetensors, and files of path heads."""
    if not any((path / name).exists() for name in names):
        return set()
    files = {file.name for file in path.glob("*.safetensors")}
    files -= {file.name for file in path.glob(RECORDS)}
    files |= {name for name in OF_PATH_HEADS if (path / name).exists()}
    if names != HEAD_WEIGHTS:
        own = (path / name for name in HEAD_WEIGHTS)
        is_head = any(file.exists() for file in own) and "fc.weight" in read_shapes(path)
        files = {SAFETENSORS} if is_head else set()
    return files - {*names} - _sharded(path) - {*ADAPTERS}


def _sharded(path: Path) -> set[str]:
    """Return the files that an index names."""
    files: set[str] = set()
    for index in path.glob("*.index.json"):
        try:
            files |= {
                str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()
            }
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            continue  # reading it says what is wrong
    return files
