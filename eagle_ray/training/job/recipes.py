"""Build the recipe of a configuration: the head's config.json in its published layout, and the module to train.

EAGLE-1/2    architectures ["EagleLlamaForCausalLM"]: vLLM's name; no bias in fc, which vLLM's loader refuses
EAGLE-3      architectures ["LlamaForCausalLMEagle3"]: SGLang's and vLLM's name, with draft_vocab_size
DFlash       architectures ["DFlashDraftModel"]: z-lab's name, with block_size and dflash_config;
             with a draft vocabulary speculators_model_type "dflash", whose layout has an lm_head
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.config.head_training import TrainConfig, num_passes
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.dflash.checkpoint import block_of, layer_config, spread_layers
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.dflash.recipe import BlockLoss, DFlashRecipe
from eagle_ray.methods.eagle.heads import MIN_TARGET_LAYERS, Eagle3Head, EagleHead
from eagle_ray.methods.eagle.recipe import Eagle3Recipe, EagleLoss, EagleRecipe, UnrolledLoss
from eagle_ray.methods.head_files import PUBLISHED_ROPE_THETA, SPECULATORS
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.methods.medusa.recipe import MedusaRecipe
from eagle_ray.models.loader import CausalLM
from eagle_ray.training.frozen_target import FrozenTarget
from eagle_ray.training.job.published_head import StartHead
from eagle_ray.training.optimization import HeadRecipe

AnyHead = TypeVar("AnyHead", EagleHead, Eagle3Head)
PUBLISHED_DRAFT_VOCAB = 32_000  # tokens of published EAGLE-3 heads
SCALED = ("eagle3", "dflash")  # methods whose features come before any norm, so their numbers differ much in size
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
    if size < vocab_size and config.head.method == "dflash" and config.head.causal_head:
        raise ConfigError(
            "head.causal_head: speculators' layout, in which a dflash head with a draft vocabulary is written, has no "
            "causal heads. Leave out head.draft_vocab_size"
        )
    return min(size, vocab_size)


def feature_layers(config: TrainConfig, causal_lm: CausalLM, start: StartHead | None) -> tuple[int, ...] | None:
    """Return the target's layers that the head reads. Raises ConfigError if it has too few."""
    if config.head.method not in SCALED:
        return None
    num_layers = causal_lm.config.get_text_config(decoder=True).num_hidden_layers
    if start is not None:
        return start.head.feature_layers(num_layers)
    if config.head.method == "dflash":
        return tuple(i + 1 for i in _outputs_read(config, num_layers))
    if num_layers < MIN_TARGET_LAYERS:
        raise ConfigError(
            f"head.method: eagle3 reads a target of {MIN_TARGET_LAYERS} layers or more, and {config.model.target} has "
            f"{num_layers}. Use eagle2"
        )
    return 2, num_layers // 2, num_layers - 3


def _outputs_read(config: TrainConfig, num_layers: int) -> list[int]:
    """Return the layers whose outputs a DFlash head reads.

    They are head.target_layer_ids, or the published choice, or all of a target of few layers.
    """
    if num_layers < 2:
        raise ConfigError(
            f"head.method: dflash reads the outputs of layers before the last one, and {config.model.target} has one"
        )
    if named := config.head.target_layer_ids:
        if len({*named}) < len(named) or max(named) > num_layers - 2:
            raise ConfigError(
                f"head.target_layer_ids: must be different layers of the target, 0 to {num_layers - 2} (its last "
                f"layer's output is normed), got {named}"
            )
        return named
    spread = spread_layers(num_layers, config.head.num_layers)
    is_fit = len({*spread}) == len(spread) and min(spread) >= 0 and max(spread) < num_layers - 1
    return spread if is_fit else list(range(num_layers - 1))


def make_recipe(
    config: TrainConfig,
    causal_lm: CausalLM,
    target: FrozenTarget,
    feature_scale: Float[Tensor, " F"] | None,
    dtype: torch.dtype,
    start: StartHead | None = None,
) -> HeadRecipe:
    """Return the recipe with a new head, drawn from the configuration's seed, or with the one to start from.

    feature_scale: of the features, if the method is one of SCALED.
    """
    torch.manual_seed(config.training.seed % 2**63)
    method, loss = config.head.method, config.loss
    target_config = causal_lm.config.get_text_config(decoder=True)
    if method == "eagle2":
        weights = EagleLoss(loss.feature, loss.token, loss.noise, num_passes(config), loss.decay)
        raw = start.raw_config if start else head_json(config, target_config)
        return EagleRecipe(target, raw, weights, dtype, start=_start_of(start, EagleHead))
    if method == "eagle3":
        raw = start.raw_config if start else head_json(config, target_config)
        assert feature_scale is not None
        return Eagle3Recipe(
            target,
            raw | {"draft_vocab_size": len(target.token_ids)},
            feature_scale,
            UnrolledLoss(num_passes(config), loss.decay),
            dtype,
            start=_start_of(start, Eagle3Head),
        )
    if method == "dflash":
        size = None if target.covers_all else len(target.token_ids)
        raw = dflash_json(config, target_config, size)
        head = DFlashHead(layer_config(raw), block_of(raw, target_config), draft_vocab_size=size)
        assert feature_scale is not None
        return DFlashRecipe(target, head, raw, feature_scale, BlockLoss(loss.gamma, loss.anchor_every), dtype)
    sizes = config.head.num_levels, 1, target_config.hidden_size, target_config.vocab_size
    heads = MedusaHeads(*sizes, own_lm_head=True) if method == "medusa" else HydraHeads(*sizes)
    return MedusaRecipe(target, heads, loss.decay, dtype)


def _start_of(start: StartHead | None, kind: type[AnyHead]) -> AnyHead | None:
    """Return the head to start from, whose kind `StartHead.load` has checked."""
    if start is None:
        return None
    assert isinstance(start.head, kind)
    return start.head


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


def dflash_json(config: TrainConfig, target: Any, draft_vocab_size: int | None = None) -> dict[str, Any]:
    """Return the config.json of a DFlash head: z-lab's layout, or speculators' with a draft vocabulary.

    target: the target's config. Raises ConfigError.
    """
    layers, outputs = _dflash_layers(config, target), _outputs_read(config, target.num_hidden_layers)
    own = {"block_size": config.head.block_size, "tie_word_embeddings": False, "dtype": "bfloat16"}
    mask = {"mask_token_id": _mask_token(config, target)}
    if draft_vocab_size is not None:
        return {
            "architectures": ["DFlashSpeculator"],
            SPECULATORS: "dflash",
            "transformer_layer_config": layers,
            "draft_vocab_size": draft_vocab_size,
            "aux_hidden_state_layer_ids": [i + 1 for i in outputs],
            **mask,
            **own,
        }
    causal = {"causal_head": True} if config.head.causal_head else {}
    return {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {**mask, "target_layer_ids": outputs, **causal},
        **own,
    }


def _dflash_layers(config: TrainConfig, target: Any) -> dict[str, Any]:
    """Return the shape of a DFlash head's layers, under the keys of a Qwen3 config."""
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return {
        "model_type": "qwen3",
        **{key: getattr(target, key) for key in COPIED},
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "intermediate_size": config.head.intermediate_size or target.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": config.head.num_layers,
        "layer_types": ["full_attention"] * config.head.num_layers,
        "attention_bias": False,
        "rope_theta": rope.get("rope_theta", PUBLISHED_ROPE_THETA),
    }


def _mask_token(config: TrainConfig, target: Any) -> int:
    """Return head.mask_token, or the target's padding or end token. Raises ConfigError."""
    token = config.head.mask_token
    if token is not None and token >= target.vocab_size:
        raise ConfigError(f"head.mask_token: must be a token of the target, 0 to {target.vocab_size - 1}, got {token}")
    ends = target.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    found = next((known for known in (token, target.pad_token_id, end) if known is not None), None)
    if found is None:
        raise ConfigError("head.mask_token: missing; the target has neither a padding nor an end token to take for it")
    return found
