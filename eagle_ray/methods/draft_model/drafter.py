"""A draft model drafts as an EAGLE head does: EAGLE-2's dynamic tree, here from the model's own tokens."""

from eagle_ray.methods.eagle.drafter import make_drafter

__all__ = ["make_drafter"]
