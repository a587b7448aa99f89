"""Supported models: the architectures of transformers that this engine computes exactly, and within which limits.

    check_config(config)           # EngineError naming the model and the reason, before any weight is read
    max_exact_position(config)        # 4096 where rotations change past position 4095 (longrope, dynamic), else None

A family stands in SUPPORTED because tests/models/test_supported_models.py holds its packed trees equal to transformers'
own forward on every path; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from eagle_ray.core.errors import EngineError

# model_type of each family whose every path was equal; the first ten are those that published draft heads are for
# fmt: off
SUPPORTED = frozenset([
    "gemma2", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granite_swa", "granitemoe", "granitemoeshared",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "minimax_m2", "ministral", "ministral3", "nanochat", "olmo",
    "olmo2", "olmo3", "olmoe", "phi", "phimoe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
    "youtu",
])
# fmt: on
DYNAMIC_ROPE = ("dynamic", "longrope")  # all positions turn otherwise once one of a pass is past the original ones


def check_config(config: PretrainedConfig) -> None:
    """Refuse, by name, a family whose rows this engine would not, or might not, compute exactly."""
    if config.get_text_config(decoder=True) is not config:
        raise EngineError(f"unsupported model_type {config.model_type!r}: it reads more than text. Use a text model.")
    if config.model_type not in SUPPORTED:
        raise EngineError(f"unsupported model_type {config.model_type!r}. Supported: {', '.join(sorted(SUPPORTED))}")


def max_exact_position(config: PretrainedConfig) -> int | None:
    """Return how many positions have rotations that do not depend on the rest of the pass; None for all.

    A rotary embedding of DYNAMIC_ROPE chooses its frequencies by the largest position of a pass. Past this many
    positions a row would depend on other rows, and cached keys would be outdated.
    """
    own = getattr(config, "max_position_embeddings", None)
    limits = [
        rope.get("original_max_position_embeddings") or own
        for rope in _rotations(getattr(config, "rope_parameters", None) or {})
        if rope.get("rope_type") in DYNAMIC_ROPE
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def head_dims(config: PretrainedConfig) -> tuple[int, int]:
    """Numbers of a key and of a value, as the heads read them."""
    if getattr(config, "kv_lora_rank", None) is not None:  # multi-head latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def kv_elements_per_token(config: PretrainedConfig) -> int:
    """Keys and values that one layer keeps of a token, counted in numbers; as examined models have them."""
    latent = getattr(config, "kv_lora_rank", None) is not None  # kept for every head
    kv_heads = None if latent else getattr(config, "num_key_value_heads", None)
    return (kv_heads or config.num_attention_heads) * sum(head_dims(config))


def logits_postprocessor(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return what the family does to the lm_head's output, by the keys of its config: a factor, then a soft-cap."""
    scale, softcap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    return scale if softcap is None else lambda logits: torch.tanh(scale(logits) / softcap) * softcap


def logit_scale(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Before a soft-cap."""
    multiplier, divisor = (getattr(config, key, None) for key in ("logit_scale", "logits_scaling"))
    if multiplier is not None:  # Cohere
        return partial(torch.mul, other=multiplier)
    if divisor is not None:  # Granite
        return partial(torch.div, other=divisor)
    return _unchanged


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _rotations(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One set of rotary parameters, or one for each kind of layer."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (inner for inner in parameters.values() if isinstance(inner, dict))
