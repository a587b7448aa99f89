"""Make the drafter of a draft model: EAGLE-2's dynamic tree, from the model's own tokens."""

from __future__ import annotations

from typing import cast

from eagle_ray.methods.candidate_ranker import corrections
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.eagle.heads import DraftHead
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: DraftModel) -> EagleDrafter:
    """Return the drafter over a loaded model."""
    calibration, coupling = corrections(speculative, target.device)
    head = cast(DraftHead, weights)  # a protocol of variables, of which a causal LM has some as properties
    return EagleDrafter(head, target, calibration=calibration, coupling=coupling)
