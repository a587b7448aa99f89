"""From the name of a method to who drafts and who plans: the one table of both.

    check_weights(speculative, path, target_config)                 # from headers: before anything is started
    weights = load_weights(speculative, path, target_config)        # what model.draft holds, if the method reads one
    target = Target(..., feature_layers=feature_layers(weights, num_layers))
    drafter = make_drafter(speculative, target, weights)

Names and what they need stand in `config/methods.py`. Does not know rows, files of prompts or Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from eagle_ray.config import SpeculativeConfig
from eagle_ray.config.methods import HEAD, HEAD_3, needs
from eagle_ray.drafting.drafter import Drafter
from eagle_ray.drafting.eagle import EagleDrafter
from eagle_ray.errors import EngineError
from eagle_ray.models.checkpoint import blank_head, load_head
from eagle_ray.models.heads import DraftHead, Eagle3Head
from eagle_ray.models.target import Target
from eagle_ray.speculative.calibration import Calibration
from eagle_ray.speculative.coupling import Coupling

Weights = nn.Module | None  # what a method reads from model.draft


def check_weights(speculative: SpeculativeConfig, path: Path, target: PretrainedConfig) -> None:
    """What `load_weights` would refuse, told without reading weights. Raises EngineError."""
    CHECKS[needs(speculative.method)](path, target)


def load_weights(speculative: SpeculativeConfig, path: Path, target: PretrainedConfig) -> nn.Module:
    """What model.draft holds, in fp32. Raises EngineError where it does not fit the method or the target."""
    return LOADERS[needs(speculative.method)](path, target)


def feature_layers(weights: Weights, num_layers: int) -> tuple[int, ...] | None:
    """The layers of the target that the drafter reads; None is what the lm_head reads."""
    return weights.feature_layers(num_layers) if isinstance(weights, DraftHead) else None


def make_drafter(speculative: SpeculativeConfig, target: Target, weights: Weights) -> Drafter:
    """Who drafts; a merge of all where several are named."""
    [drafter] = [DRAFTERS[part](speculative, target, weights) for part in speculative.method.split("+")]
    return drafter


def _check_head_3(path: Path, target: PretrainedConfig) -> None:
    if not isinstance(blank_head(path, target), Eagle3Head):
        raise EngineError(f"{path} is an EAGLE-1/2 head: set speculative.method to eagle2, or choose an EAGLE-3 head")


def _load_head_3(path: Path, target: PretrainedConfig) -> nn.Module:
    _check_head_3(path, target)
    return load_head(path, target)


def _eagle(speculative: SpeculativeConfig, target: Target, head: Weights) -> EagleDrafter:
    calibration = Calibration(speculative.max_depth, target.device)
    coupling = Coupling(speculative.max_depth, target.device) if speculative.coupled else None
    return EagleDrafter(head, target, calibration=calibration, coupling=coupling)


CHECKS: dict[str | None, Callable[[Path, PretrainedConfig], object]] = {HEAD: blank_head, HEAD_3: _check_head_3}
LOADERS: dict[str | None, Callable[[Path, PretrainedConfig], nn.Module]] = {HEAD: load_head, HEAD_3: _load_head_3}
DRAFTERS: dict[str, Callable[[SpeculativeConfig, Target, Weights], Drafter]] = {"eagle2": _eagle, "eagle3": _eagle}
