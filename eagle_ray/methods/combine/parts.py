"""Parts of a method: the drafts that it reads, and its drafter; several if it merges methods.

check_drafts(method, paths, target_config)                      # from headers, before anything is started
weights = load_drafts(method, paths, target_config)             # of model.draft, if the method reads one
target = TargetModel(..., feature_layers=layers_read(drafts_of(weights), num_layers))
drafter = make_drafter(speculative, target, weights)
planner = make_planner(speculative, drafter)                    # if the method decides its tree
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.combine.ensemble import EnsembleDrafter
from eagle_ray.methods.drafter import Drafter, LoadedDraft
from eagle_ray.methods.eagle.draft_buffers import DraftShape
from eagle_ray.methods.method import draft_parts, parts_of
from eagle_ray.methods.pair_drafter import QUEUE_WINDOW
from eagle_ray.models.supported_models import KVSpec
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import Planner


class DraftList(nn.ModuleList):
    """The weights of several drafts, in the order of the method's parts that read one."""


def drafts_of(weights: nn.Module | None) -> list[Any]:
    """Return each of the drafts that `load_drafts` returned."""
    if weights is None:
        return []
    return list(weights) if isinstance(weights, DraftList) else [weights]


def check_drafts(method: str, paths: Sequence[Path], target: PretrainedConfig) -> list[LoadedDraft]:
    """Return the drafts without their weights. Raises EngineError if `load_drafts` would.

    Args:
        paths: one for each part of the method that reads a draft.
    """
    drafts = [part.check_draft(path, target) for part, path in zip(draft_parts(method), paths, strict=True)]
    _check_features(drafts, target.num_hidden_layers)
    return drafts


def load_drafts(method: str, paths: Sequence[Path], target: PretrainedConfig) -> nn.Module:
    """Return the weights of model.draft in fp32. Raises EngineError if they do not fit the method or the target."""
    drafts = [part.load_draft(path, target) for part, path in zip(draft_parts(method), paths, strict=True)]
    _check_features(drafts, target.num_hidden_layers)
    return drafts[0] if len(drafts) == 1 else DraftList(drafts)


def _check_features(drafts: Sequence[LoadedDraft], num_layers: int) -> None:
    """Raise EngineError if some drafts read the target's last output and others its layers: no pass returns both."""
    reads = [draft.feature_layers(num_layers) for draft in drafts]
    if None in reads and any(reads):
        raise EngineError(
            "some of these heads read the target's last output (EAGLE-1/2, Medusa, Hydra) and others its layers "
            "(EAGLE-3, DFlash), so they cannot be merged; merge heads of one kind, or a head and a draft_model"
        )


def layers_read(drafts: Sequence[LoadedDraft], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of the target that the drafters read; None is the last hidden state.

    Args:
        drafts: loaded, or as `check_drafts` returns them.
    """
    layers = [draft.feature_layers(num_layers) for draft in drafts]
    return tuple(dict.fromkeys(layer for each in layers for layer in each or ())) or None


def kv_numbers(drafts: Sequence[LoadedDraft]) -> int:
    """Return the numbers of a token's keys and values in the caches of the drafters; Medusa heads have none."""
    specs: list[KVSpec | None] = [getattr(draft, "kv_spec", None) for draft in drafts]
    return sum(s.num_layers * s.num_kv_heads * (s.key_dim + s.value_dim) for s in specs if s is not None)


def slot_bytes(
    drafts: Sequence[LoadedDraft], num_features: int, hidden_size: int, bounds: TreeBounds, itemsize: int
) -> int:
    """Return about the bytes that the drafters keep for a sequence: queued features, and one draft each.

    Args:
        num_features: numbers of a token's feature.
        itemsize: bytes of a number.
    """
    draft = DraftShape(1, bounds.top_k, bounds.top_k, bounds.max_depth)
    return len(drafts) * (QUEUE_WINDOW * num_features * itemsize + draft.num_bytes(hidden_size, itemsize))


def make_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: nn.Module | None) -> Drafter:
    """Return the drafter of a method; an ensemble if several are merged."""
    parts = parts_of(speculative.method)
    if len(parts) == 1:
        return parts[0].make_drafter(speculative, target, weights)
    drafts = drafts_of(weights)
    features = [_features_read(draft, drafts, target) for draft in drafts]
    drafters = [
        part.make_drafter(speculative, _with_features(target, own), draft)
        for part, draft, own in zip(draft_parts(speculative.method), drafts, features, strict=True)
    ]
    drafters += [part.make_drafter(speculative, target, None) for part in parts if part.draft is None]
    blend = EnsembleCalibration(speculative.max_depth, len(drafters), target.device)
    return EnsembleDrafter(drafters, blend, features)


def make_planner(speculative: SpeculativeConfig, drafter: Drafter) -> Planner | None:
    """Return the planner of a method that decides its tree, or None if speculative.budget does."""
    parts = parts_of(speculative.method)
    return parts[0].make_planner(speculative, drafter) if len(parts) == 1 else None


def _features_read(draft: LoadedDraft, drafts: Sequence[LoadedDraft], target: TargetModel) -> Int[Tensor, " F"]:
    """Return the indices of the target's features that one of several drafts reads."""
    num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    width, device = target.hidden_size, target.device
    own = draft.feature_layers(num_layers)
    if own is None:
        return torch.arange(width, device=device)
    layers = layers_read(drafts, num_layers) or ()
    spans = [torch.arange(width, device=device) + width * layers.index(layer) for layer in own]
    return torch.cat(spans) if spans else torch.arange(0, device=device)


def _with_features(target: TargetModel, features: Int[Tensor, " F"]) -> TargetModel:
    """Return the target as the drafter of these features sees it; models and caches are the target's own."""
    view = copy(target)
    view.feature_size = len(features)
    return view
