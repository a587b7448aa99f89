"""Build the recipe of a configuration: the head's config.json in its published layout, and the module to train.

EAGLE-1/2    architectures ["EagleLlamaForCausalLM"]: vLLM's name; no bias in fc, which vLLM's loader refuses
EAGLE-3      architectures ["LlamaForCausalLMEagle3"]: SGLang's and vLLM's name, with draft_vocab_size
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.config import ConfigError
from eagle_ray.config.head_training import TrainConfig, num_passes
from eagle_ray.models.eagle_heads import MIN_TARGET_LAYERS
from eagle_ray.models.head_spec import PUBLISHED_ROPE_THETA
from eagle_ray.models.medusa_heads import HydraHeads, MedusaHeads
from eagle_ray.training.eagle3_recipe import Eagle3Recipe, UnrolledLoss
from eagle_ray.training.eagle_recipe import EagleLoss, EagleRecipe
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.head_recipe import HeadRecipe
from eagle_ray.training.medusa_recipe import MedusaRecipe
from eagle_ray.training.start_head import StartHead

PUBLISHED_DRAFT_VOCAB = 32_000  # tokens of published EAGLE-3 heads
ARCHITECTURES = {"eagle2": "EagleLlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
COPIED = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings")
OPTIONAL = ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "pad_token_id")


def draft_vocab_size(config: TrainConfig, vocab_size: int) -> int:
    """Return the size of the draft vocabulary; vocab_size is every token."""
    size = config.head.draft_vocab_size
    if size is None:
        size = PUBLISHED_DRAFT_VOCAB if config.head.method == "eagle3" else vocab_size
    if size < vocab_size and config.head.method in ("medusa", "hydra"):
        raise ConfigError(f"head.draft_vocab_size: of no use for {config.head.method}, which drafts every token")
    return min(size, vocab_size)


def feature_layers(config: TrainConfig, causal_lm: nn.Module, start: StartHead | None) -> tuple[int, ...] | None:
    """Return the target's layers that the head reads. Raises ConfigError if it has too few."""
    if config.head.method != "eagle3":
        return None
    num_layers = causal_lm.config.get_text_config(decoder=True).num_hidden_layers
    if start is not None:
        return start.head.feature_layers(num_layers)
    if num_layers < MIN_TARGET_LAYERS:
        raise ConfigError(
            f"head.method: eagle3 reads a target of {MIN_TARGET_LAYERS} layers or more, and {config.model.target} has "
            f"{num_layers}. Use eagle2"
        )
    return 2, num_layers // 2, num_layers - 3


def make_recipe(
    config: TrainConfig,
    causal_lm: nn.Module,
    target: FrozenTarget,
    feature_scale: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
    start: StartHead | None = None,
) -> HeadRecipe:
    """Return the recipe with a new head, drawn from the configuration's seed, or with the one to start from.

    feature_scale: of an EAGLE-3 head's features.
    """
    torch.manual_seed(config.training.seed % 2**63)
    method, loss = config.head.method, config.loss
    target_config = causal_lm.config.get_text_config(decoder=True)
    if method == "eagle2":
        weights = EagleLoss(loss.feature, loss.token, loss.noise, num_passes(config), loss.decay)
        raw = start.raw_config if start else head_json(config, target_config)
        return EagleRecipe(target, raw, weights, dtype, start=start.head if start else None)
    if method == "eagle3":
        raw = start.raw_config if start else head_json(config, target_config)
        assert feature_scale is not None
        return Eagle3Recipe(
            target,
            raw | {"draft_vocab_size": len(target.token_ids)},
            feature_scale,
            UnrolledLoss(num_passes(config), loss.decay),
            dtype,
            start=start.head if start else None,
        )
    sizes = config.head.num_levels, 1, target_config.hidden_size, target_config.vocab_size
    heads = MedusaHeads(*sizes, own_lm_head=True) if method == "medusa" else HydraHeads(*sizes)
    return MedusaRecipe(target, heads, loss.decay, dtype)


def head_json(config: TrainConfig, target: Any) -> dict[str, Any]:
    """Return the config.json of an EAGLE head. target: the target's config."""
    values = {key: getattr(target, key) for key in COPIED}
    values |= {key: value for key in OPTIONAL if (value := getattr(target, key, None)) is not None}
    return {
        "architectures": [ARCHITECTURES[config.head.method]],
        "model_type": "llama",
        **values,
        "intermediate_size": config.head.intermediate_size or target.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "bias": False,
        "mlp_bias": False,
        "rope_theta": PUBLISHED_ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": PUBLISHED_ROPE_THETA},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
