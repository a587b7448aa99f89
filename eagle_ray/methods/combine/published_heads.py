"""Read what is in a directory of a published head, of whichever kind, without its target.

    contents = read_contents(path)                       # a HeadContents; unknown keys and tensors are in it
    contents.kind, contents.unknown_keys, contents.unknown_tensors, contents.fault
    shape_of_target(path)                                # the target that the head says it is for

A head is normally checked against its target. Without a target, the check uses a config made of the
sizes in the head's own config.json and tensors, so it finds only contradictions within the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.dflash.checkpoint import dflash_contents
from eagle_ray.methods.drafter import LoadedDraft
from eagle_ray.methods.eagle.checkpoint import eagle_contents, is_eagle3, is_peagle
from eagle_ray.methods.head_contents import HeadContents
from eagle_ray.methods.head_directory import check_directory, is_model, read_head
from eagle_ray.methods.head_files import (
    Shape,
    is_count,
    is_dflash,
    read_config,
    read_shapes,
    without_nulls,
)
from eagle_ray.methods.medusa.checkpoint import (
    HYDRA,
    MEDUSA,
    hydra_contents,
    medusa_contents,
)
from eagle_ray.methods.method import METHODS
from eagle_ray.parallel.rank_group import RankGroup

MANY_LAYERS = 1000  # layers of a stand-in target if the head does not say


def check_any_draft(path: Path, target: PretrainedConfig) -> LoadedDraft:
    """Return the draft in a directory without its weights, for source `head`, which names no method.

    Raises EngineError with the reason of the method that its files are of, or every method's reason
    if they are of none.
    """
    reasons: dict[str, str] = {}
    for method in METHODS.values():
        if method.is_kind:
            try:
                return method.check_draft(path, target)
            except EngineError as error:
                reasons[method.name] = str(error)
    own = method_of_files(path)
    if own is not None:
        raise EngineError(reasons[own])
    every = ". ".join(f"as {METHODS[name].draft}: {reason}" for name, reason in reasons.items())
    raise EngineError(f"{path} is no draft that a method can read. {every}")


def load_any_draft(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> LoadedDraft:
    """Return the draft in a directory with its weights, for source `head`, which names no method.
    Raises EngineError."""
    return METHODS[check_any_draft(path, target).method].load_draft(path, target, ranks)


def read_contents(path: Path, target: PretrainedConfig | None = None) -> HeadContents:
    """Return which keys and tensors of a head are used, ignored or unknown, and why it does not load, if it does not.

    Raises EngineError if its files cannot be read, or if they are no head of a kind that drafts
    here.

    Args:
        target: the target's config; None checks the head against its own sizes.
    """
    check_directory(path)
    given = target
    target = target or shape_of_target(path)
    for name, contents in ((MEDUSA, medusa_contents), (HYDRA, hydra_contents)):
        if any((path / f"{name}{end}").exists() for end in (".safetensors", ".pt")):
            return contents(path, target)
    raw, shapes = read_head(path, given)
    contents_of_head = dflash_contents if is_dflash(raw, shapes) else eagle_contents
    return contents_of_head(raw, shapes, target)


def method_of_files(path: Path) -> str | None:
    """Return the method of the draft that files are by their names, fit for a target or not; None if they are none.

    Raises EngineError if they cannot be read, or are two heads.
    """
    for name, method in ((MEDUSA, "medusa"), (HYDRA, "hydra")):
        if any((path / f"{name}{end}").exists() for end in (".safetensors", ".pt")):
            return method
    check_directory(path)
    raw = read_config(path)
    shapes = read_shapes(path)
    if is_dflash(raw, shapes):
        return "dflash"
    if is_peagle(raw, shapes):
        return "peagle"
    if "fc.weight" in shapes or is_eagle3(shapes):
        return "eagle2"
    return "draft_model" if is_model(shapes) else None


def shape_of_target(path: Path) -> PretrainedConfig:
    """Return a minimal target config with the sizes that a head's files state. Raises EngineError."""
    raw = without_nulls(read_config(path))
    sizes: dict[str, Any] = {}
    for section in (raw, raw.get("transformer_layer_config"), raw.get("dflash_config")):
        if isinstance(section, Mapping):
            sizes = {**without_nulls(section), **sizes}
    hidden_size = sizes.get("target_hidden_size", sizes.get("hidden_size"))
    vocab_size = sizes.get("vocab_size")
    if not is_count(hidden_size) or not is_count(vocab_size):
        hidden_size, vocab_size = _sizes_of_path_heads(path)
    layers = sizes.get("num_target_layers")
    return LlamaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=layers if is_count(layers) else MANY_LAYERS,
        num_attention_heads=1,
    )


def _sizes_of_path_heads(path: Path) -> tuple[int, int]:
    """Return the target's hidden size and vocabulary by the tensors of Medusa's or Hydra's heads."""
    shapes: dict[str, Shape] = {}
    for name in (MEDUSA, HYDRA):
        names = f"{name}.safetensors", f"{name}.pt"
        if any((path / each).exists() for each in names):
            shapes = read_shapes(path, names)
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    if not matrices:
        raise EngineError(
            f"{path}: its config.json says neither hidden_size nor vocab_size, so its target is unknown"
        )
    hidden_size = min(inputs for _, inputs in matrices)
    return hidden_size, max(outputs for outputs, _ in matrices)
