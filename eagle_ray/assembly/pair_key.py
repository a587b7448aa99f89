"""pair_key: identify a pair of target and draft, to store its costs and acceptance on this machine."""

from __future__ import annotations

from dataclasses import astuple

from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.config import SpeculativeConfig
from eagle_ray.engine.engine import Engine


def pair_key(engine: Engine, speculative: SpeculativeConfig) -> dict[str, object]:
    """Return the shapes of an engine's models and the bounds of its trees, by name. It is
    independent of the models' paths."""
    config = engine.target.model.config.to_dict()
    return {
        "target": {name: value for name, value in config.items() if name != "_name_or_path"},
        "method": speculative.merged_methods,
        "draft": engine.drafter.cost_key,
        # Quantised weights have the dtype of activations.
        "weight_bytes": weight_bytes(engine.target.model),
        "tree": astuple(speculative.tree_bounds),
    }
