"""Published DFlash heads: which head a config and its tensors describe, and whether it fits a target.

    head = meta_dflash(path, target.config)     # parameters on the meta device: shapes without numbers
    head = load_dflash(path, target.config)     # DFlash, or a causal head of JetSpec

Two published layouts name the same tensors (fc, hidden_norm, layers.*, norm), and differ in config.json:

    z-lab, JetSpec   block_size at the top level or in dflash_config, which has target_layer_ids (the layers whose
                     outputs are read), mask_token_id and, if true, causal_head; NeMo Automodel, whose heads vLLM
                     serves, calls that causal
    speculators      the layers' shape in transformer_layer_config; aux_hidden_state_layer_ids (the layers whose inputs
                     are read), mask_token_id, sliding_window_non_causal, sample_from_anchor; embed_tokens, and lm_head
                     over a draft vocabulary (d2t, t2d)

Sources: z-lab/dflash dflash/model.py (44947fb), hao-ai-lab/JetSpec jetspec/models/draft_head.py (2c7b3fa),
vllm-project/speculators models/dflash/{config,core,attention}.py and convert/dflash/converter.py (c05b95b3),
NVIDIA-NeMo/Automodel pull request 2913.
A sliding layer sees keys less than `sliding_window` positions before a row, as in z-lab's attention call; speculators'
sliding layers are causal within the block unless sliding_window_non_causal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from eagle_ray.methods.dflash.heads import FULL, SLIDING, BlockShape, DFlashHead
from eagle_ray.methods.head_files import (
    IGNORED_KEYS,
    SPECULATORS,
    Named,
    Shape,
    attention_heads,
    check_counts,
    check_equal,
    check_tensors,
    is_count,
    is_dflash,
    load_into,
    on_meta,
    read_config,
    read_shapes,
    read_tensors,
    rope_of,
    with_path,
    without_nulls,
)

SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
MIN_BLOCK = 2  # rows: the root and one token
MAX_BLOCK = 64  # rows of a block: as many as a row of a tree's mask names
SWITCHES = ("causal_head", "causal", "sample_from_anchor", "sliding_window_non_causal")
TIED_TO_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's own, which some files repeat


def load_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target."""
    head = meta_dflash(path, target)
    return load_into(head, path, own_names(read_tensors(path)))


def meta_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        return build_dflash(raw, shapes, target)


def build_dflash(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: PretrainedConfig) -> DFlashHead:
    """Return the head with its parameters and buffers on the meta device.

    raw: its config.json. shapes: of its tensors, by published name. Raises ValueError with the key, tensor or pair
    of numbers that does not fit the target.
    """
    if not is_dflash(raw, shapes):
        raise ValueError(
            "not a DFlash head: its config.json has no dflash_config, and it has no tensor hidden_norm.weight. For an "
            "EAGLE head set speculative.method to eagle2 or eagle3"
        )
    _check_kind(raw)
    layers, own = _sections(raw)
    check_counts(layers, SIZES, {**layers, **own}, OPTIONAL_SIZES)
    _check_target(layers, own, target)
    block = block_of(raw, target)
    has_lm_head = "lm_head.weight" in shapes
    head = on_meta(
        lambda: DFlashHead(
            layer_config(raw),
            block,
            draft_vocab_size=(own.get("draft_vocab_size") or target.vocab_size) if has_lm_head else None,
            own_embedding="embed_tokens.weight" in shapes,
        )
    )
    check_tensors("a DFlash head", head, own_names(shapes), _optional(head))
    return head


def _check_kind(raw: Mapping[str, Any]) -> None:
    """Refuse relatives with tensors of these names that draft otherwise: DFlash2, DSpark, and others to come."""
    kind, classes = raw.get(SPECULATORS, "dflash"), raw.get("architectures") or ["DFlashDraftModel"]
    if kind != "dflash":
        raise ValueError(f"its {SPECULATORS} is {kind!r}; this release drafts with dflash")
    if not any(re.search(r"DFlash(?!\d)", str(name)) for name in classes):
        raise ValueError(f"its architectures are {classes}; this release drafts with DFlashDraftModel")


def own_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return the entries that are the head's own: no buffers that are recomputed, no tensors of the target."""
    skipped = (*IGNORED_KEYS, *TIED_TO_TARGET)
    has_lm_head = "lm_head.weight" in published
    maps = () if has_lm_head else ("d2t", "t2d")  # maps of a vocabulary without an lm_head over it say nothing
    return {name: value for name, value in published.items() if not name.endswith(skipped) and name not in maps}


def _optional(head: DFlashHead) -> set[str]:
    """Return the tensors that may be missing: vocabulary maps if every token can be drafted, and t2d always."""
    if head.lm_head is None:
        return set()
    return {"t2d"} if head.token_ids is not None else {"t2d", "d2t"}


def _sections(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json says of the layers, and what it says of the head, both without nulls."""
    sections = []
    for key in ("transformer_layer_config", "dflash_config"):
        section = raw.get(key)
        if not isinstance(section, dict | None):
            raise ValueError(f"its config.json has a {key} that is no section")
        sections.append(without_nulls(section or {}))
    top = without_nulls(raw)
    return {**top, **sections[0]}, {**top, **sections[1]}


def _check_target(layers: Mapping[str, Any], own: Mapping[str, Any], target: PretrainedConfig) -> None:
    for key in ("hidden_size", "vocab_size"):
        check_equal(key, layers[key], key, target)
    width = own.get("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise ValueError(f"its target_hidden_size is {width}, and the target's hidden_size is {target.hidden_size}")
    count = own.get("num_target_layers")
    if count is not None and count != target.num_hidden_layers:
        raise ValueError(f"its num_target_layers is {count}, and the target has {target.num_hidden_layers} layers")


def block_of(raw: Mapping[str, Any], target: PretrainedConfig) -> BlockShape:
    """Return what a head with this config.json drafts. Raises ValueError with the key that does not fit."""
    layers, own = _sections(raw)
    size, mask = own.get("block_size"), own.get("mask_token_id")
    if not is_count(size) or not MIN_BLOCK <= size <= MAX_BLOCK:
        raise ValueError(f"its block_size is {size!r}; it must be a whole number from {MIN_BLOCK} to {MAX_BLOCK}")
    if mask is None:
        raise ValueError("its config.json has no mask_token_id (in dflash_config, or at the top level)")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise ValueError(f"its mask_token_id is {mask!r}; the target's tokens are 0 to {target.vocab_size - 1}")
    switches = {key: own.get(key, False) for key in SWITCHES}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"its {key} is {value!r}; it must be true or false")
    causal_windows = raw.get(SPECULATORS) is not None and not switches["sliding_window_non_causal"]
    is_causal = switches["causal_head"] or switches["causal"]
    return BlockShape(
        size=size,
        mask_token_id=mask,
        feature_layers=_feature_layers(layers, own, target.num_hidden_layers),
        causal=tuple(is_causal or (kind == SLIDING and causal_windows) for kind in _layer_types(layers)),
        from_root=switches["sample_from_anchor"],
    )


def _feature_layers(layers: Mapping[str, Any], own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads. The last layer's output is not among them: it is normed."""
    if "aux_hidden_state_layer_ids" in own:
        key, offset, ids = "aux_hidden_state_layer_ids", 0, own["aux_hidden_state_layer_ids"]
    elif "target_layer_ids" in own:
        key, offset, ids = "target_layer_ids", 1, own["target_layer_ids"]
    else:
        key, offset, ids = "target_layer_ids", 1, spread_layers(num_layers, layers["num_hidden_layers"])
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not ids or len({*ids}) < len(ids):
        raise ValueError(f"its {key} is {ids!r}; it must be a list of different layers")
    if not (min(ids) >= 0 and max(ids) + offset < num_layers):
        raise ValueError(f"its {key} is {ids}; layers 0 to {num_layers - 1 - offset} of the target can be read")
    return tuple(i + offset for i in ids)


def spread_layers(num_layers: int, num_draft_layers: int) -> list[int]:
    """Return the layers that are read if none are named: one per draft layer, from the second to the last but two."""
    if num_draft_layers == 1:
        return [num_layers // 2]
    last = num_layers - 3
    return [round(1 + i * (last - 1) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def _layer_types(layers: Mapping[str, Any]) -> list[str]:
    count = layers["num_hidden_layers"]
    types = layers.get("layer_types", [FULL] * count)
    if not isinstance(types, list) or len(types) != count:
        raise ValueError(f"its layer_types is {types!r}; it must be a list of {count}, one for each layer")
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise ValueError(f"its layer_types has {unknown[0]!r}, which is neither {FULL} nor {SLIDING}")
    if SLIDING in types and not is_count(layers.get("sliding_window")):
        raise ValueError(f"its sliding_window is {layers.get('sliding_window')!r}; {SLIDING} needs 1 or more")
    return types


def layer_config(raw: Mapping[str, Any]) -> Qwen3Config:
    """Return the config of a head's layers from its config.json. Raises ValueError."""
    layers, _ = _sections(raw)
    activation = layers.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"its hidden_act is {activation!r}; DFlash layers run silu only")
    heads, kv_heads, head_dim = attention_heads(layers)
    types = _layer_types(layers)
    return Qwen3Config(
        vocab_size=layers["vocab_size"],
        hidden_size=layers["hidden_size"],
        intermediate_size=layers["intermediate_size"],
        num_hidden_layers=layers["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=activation,
        rms_norm_eps=layers.get("rms_norm_eps", 1e-6),
        max_position_embeddings=layers.get("max_position_embeddings", 32768),
        attention_bias=layers.get("attention_bias", False),
        rope_parameters=rope_of(layers),
        layer_types=types,
        use_sliding_window=SLIDING in types,
        sliding_window=layers.get("sliding_window") if SLIDING in types else None,
    )
