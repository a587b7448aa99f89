"""LongRoPE: choose one of a target's two lists of rotary factors, for every position of every sequence.

    config = read_model_config(path)                   # of Phi-4-mini: original length 4096
    choose_factors(config, max_model_len=8192)   # LONG: all positions turn by long_factor
    max_exact_position(config)                   # None: no rotation depends on the length any more

A checkpoint has factors for sequences of up to original_max_position_embeddings, and factors for
longer ones. transformers turns all positions of a sequence otherwise as soon as it is longer, and
computes its cache again. Here sequences of any lengths share a pass and keys stay in the cache, so
one list serves all of them, as in vLLM: the long one if sequences may be longer than the original
length. A sequence whose own length asks for that list has transformers' logits.
"""

from __future__ import annotations

from typing import Any, Literal

from transformers import PretrainedConfig

from eagle_ray.models.supported_models import LONGROPE, LONGROPE_PAIRS, rotations

Factors = Literal["short", "long"]


def original_length(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that the short factors are for; None of a target without LongRoPE."""
    lengths = [rope["original_max_position_embeddings"] for rope in _long_rotations(config)]
    return min(lengths, default=None)


def choose_factors(config: PretrainedConfig, max_model_len: int) -> Factors | None:
    """Write the chosen factors over the others in the config, and return which they are.

    None, and an unchanged config, of a target without LongRoPE.

    Args:
        max_model_len: tokens of the longest sequence, prompt and output.
    """
    original = original_length(config)
    if original is None:
        return None
    chosen: Factors = "long" if max_model_len > original else "short"
    for rope in _long_rotations(config):
        for short, long in LONGROPE_PAIRS:
            if short in rope:
                rope[short] = rope[long] = rope[long if chosen == "long" else short]
    return chosen


def _long_rotations(config: PretrainedConfig) -> list[dict[str, Any]]:
    return [rope for rope in rotations(config) if rope.get("rope_type") == LONGROPE]
