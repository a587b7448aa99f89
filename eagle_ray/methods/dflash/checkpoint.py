"""Published DFlash heads: which head a config and its tensors describe, and whether it fits a target.

    head = meta_dflash(path, target.config)     # parameters on the meta device: shapes without numbers
    head = load_dflash(path, target.config)     # DFlash, JetSpec's causal head, DSpark, DFlash2 or Domino

Published layouts name the same tensors of the layers (fc, hidden_norm, layers.*, norm), and differ in config.json:

    z-lab, JetSpec   block_size at the top level or in dflash_config, which has target_layer_ids (the layers whose
                     outputs are read), mask_token_id and, if true, causal_head; NeMo Automodel, whose heads vLLM
                     serves, calls that causal
    speculators      the layers' shape in transformer_layer_config; aux_hidden_state_layer_ids (the layers whose inputs
                     are read), mask_token_id, sliding_window_non_causal, sample_from_anchor; embed_tokens, and lm_head
                     over a draft vocabulary (d2t, t2d)
    DeepSpec         everything at the top level; embed_tokens and lm_head are the target's, repeated; a block of
                     block_size rows predicts as many tokens (sample_from_anchor of speculators)

The relatives that add to a block's logits what the drafted path says (V tokens, Dv drafted, H hidden):

    DSpark    DeepSpec's layout (architectures Qwen3DSparkModel) or speculators' (speculators_model_type dspark, where
              sample_from_anchor is true by default): markov_rank R, markov_head_type vanilla, gated or rnn:
              markov_head.markov_w1.weight [V, R], markov_w2.weight [Dv, R]; gate_proj [R, H + R] or joint_proj
              [3 R, 2 R + H] with biases. enable_confidence_head, confidence_head_with_markov:
              confidence_head.proj.weight [1, H] or [1, H + R], bias [1]
    DFlash2   z-lab's layout (architectures DFlash2DraftModel); dflash_config has selector_rank R, selector_top_k,
              conv_kernel_size T, conv_group_size G: candidate_selector.predecessor_codebook and successor_codebook
              [V, R], hidden_projection.weight [R, H]; in each layer attention_conv and mlp_conv: base_kernel [2, T, H],
              kernel_projection.weight [2 T H/G, H]. is_causal, at the top level or in dflash_config
    Domino    z-lab's layout; dflash_config has projector_type domino, gru_hidden_dim S, emb_dim E,
              pure_draft_prefix_len, shift_label (as sample_from_anchor): prefix_gru.weight_ih_l0 [3 S, H],
              weight_hh_l0 [3 S, S], embed_proj.0.weight [E, H + S], embed_proj.2.weight [V, E]

Not read: DSpark modules within DeepSeek-V4's checkpoints (mtp.*: other layers), Gemma 4's DSpark layers, speculators'
Domino heads (not released), DFlash2 with a draft vocabulary (none is published), scaled or capped draft logits.

Sources: z-lab/dflash dflash/model.py (44947fb), hao-ai-lab/JetSpec jetspec/models/draft_head.py (2c7b3fa),
vllm-project/speculators models/{dflash,dspark}/{config,core,attention,model_definitions}.py and
convert/dflash/converter.py (c05b95b3), deepseek-ai/DeepSpec deepspec/modeling/dspark/ (afdfa7c9),
NVIDIA-NeMo/Automodel components/speculative/dflash/draft_qwen3_dflash2.py (f9b4d0ae; pull request 3605 compares it with
z-lab/Qwen3.8-27B-DFlash2, all 81 tensors), draft_qwen3.py and domino_core.py (38eebfbc), pull request 2913.
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
from eagle_ray.methods.dflash.paths import MARKOV_TYPES, NO_PATH, ConvShape, PathShape
from eagle_ray.methods.head_files import (
    IGNORED_KEYS,
    SPECULATORS,
    VOCABULARY_MAPS,
    Named,
    Shape,
    TensorHeader,
    attention_heads,
    check_counts,
    check_equal,
    check_tensors,
    first_few,
    is_count,
    is_dflash,
    load_into,
    on_meta,
    read_config,
    read_headers,
    read_shapes,
    read_tensors,
    rope_of,
    with_path,
    without_nulls,
)
from eagle_ray.parallel.draft_shards import split_head
from eagle_ray.parallel.rank_group import RankGroup

SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
MAX_LAYERS = 256  # of a head; published ones have 3 to 8
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size")
MIN_BLOCK = 2  # rows: the root and one token
MAX_BLOCK = 64  # rows of a block: as many as a row of a tree's mask names
CAUSAL = ("causal_head", "causal", "is_causal")
FROM_ROOT = ("sample_from_anchor", "shift_label")
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
SWITCHES = (*CAUSAL, *FROM_ROOT, *CONFIDENCE, "sliding_window_non_causal")
DFLASH, DSPARK, DFLASH2, DOMINO = "dflash", "dspark", "dflash2", "domino"
ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "Qwen3DSparkModel": DSPARK,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "DFlash2DraftModel": DFLASH2,
    "Qwen3DFlash2DraftModel": DFLASH2,
}
OF_SPECULATORS = ("DSparkDraftModel", "DSparkSpeculator")  # only with speculators_model_type
MARKOV_KEYS = ("markov_rank", "markov_head_type", *CONFIDENCE)
SELECTOR_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
DOMINO_KEYS = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
KEYS_OF = {DSPARK: MARKOV_KEYS, DFLASH2: SELECTOR_KEYS, DOMINO: DOMINO_KEYS}
UNREAD = {"output_multiplier": 1, "final_logit_softcapping": 0}  # with the value that asks for nothing
TIED_TO_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's own, which some files repeat


def load_dflash(path: Path, target: PretrainedConfig, ranks: RankGroup | None = None) -> DFlashHead:
    """Return the DFlash head in `path`, in fp32. Raises EngineError if it cannot be read or does not fit the target.

    ranks: group in which this rank reads its part of a shared head; None reads the whole head.
    """
    head = meta_dflash(path, target)
    part = None if ranks is None else split_head(head, ranks)
    return load_into(head, path, own_names(read_tensors(path, part=part)), part)


def meta_dflash(path: Path, target: PretrainedConfig) -> DFlashHead:
    """Return the DFlash head with its parameters on the meta device; no weights are read. Raises EngineError."""
    raw, shapes = read_config(path), read_shapes(path)
    with with_path(path):
        head = build_dflash(raw, shapes, target)
        _check_floats(read_headers(path) or {})
    return head


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
    kind_of(raw)
    layers, own = _sections(raw)
    check_counts(layers, SIZES, {**layers, **own}, OPTIONAL_SIZES)
    if layers["num_hidden_layers"] > MAX_LAYERS:
        raise ValueError(f"its num_hidden_layers is {layers['num_hidden_layers']}; a head has {MAX_LAYERS} at most")
    _check_target(layers, own, target)
    block = block_of(raw, target)
    has_lm_head = "lm_head.weight" in shapes
    if has_lm_head and block.path.selector_rank:
        raise ValueError("its candidate_selector chooses among the target's tokens, and it has an lm_head of its own")
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


def kind_of(raw: Mapping[str, Any]) -> str:
    """Return which head a config.json describes: dflash, dspark, dflash2 or domino.

    Raises ValueError with the keys that contradict each other, or that name a head which drafts otherwise.
    """
    _, own = _sections(raw)
    declared = raw.get(SPECULATORS)
    if declared not in (None, DFLASH, DSPARK):
        raise ValueError(f"its {SPECULATORS} is {declared!r}; this release drafts with {DFLASH} and {DSPARK}")
    classes = raw.get("architectures") or ["DSparkSpeculator" if declared == DSPARK else "DFlashDraftModel"]
    if not isinstance(classes, list):
        raise ValueError(f"its architectures are {classes!r}; they must be a list of names")
    known = [DFLASH if re.search(r"DFlash(?!\d)", str(name)) else ARCHITECTURES.get(str(name)) for name in classes]
    kinds = {kind for kind in known if kind is not None}
    if len(kinds) != 1:
        raise ValueError(f"its architectures are {classes}; this release drafts with {', '.join(ARCHITECTURES)}")
    kind = kinds.pop()
    is_own = any(str(name) in OF_SPECULATORS for name in classes)
    if (declared is not None or is_own) and kind != declared:
        raise ValueError(f"its {SPECULATORS} is {declared!r}, and its architectures are {classes}")
    projector = own.get("projector_type")
    if projector not in (None, DOMINO) or (projector is not None and kind != DFLASH):
        raise ValueError(
            f"its projector_type is {projector!r} in a {kind} head; this release reads {DOMINO} in {DFLASH}"
        )
    kind = kind if projector is None else DOMINO
    for other, keys in KEYS_OF.items():
        if foreign := [key for key in keys if own.get(key) and other != kind]:
            raise ValueError(f"its {foreign[0]} is {own[foreign[0]]!r}, which a {kind} head has not")
    for key, neutral in UNREAD.items():
        if kind != DFLASH and own.get(key, neutral) != neutral:
            raise ValueError(f"its {key} is {own[key]!r}; this release drafts without it")
    return kind


def path_of(raw: Mapping[str, Any]) -> PathShape:
    """Return which path head a config.json describes. Raises ValueError with the key that does not fit."""
    kind, (_, own) = kind_of(raw), _sections(raw)
    if kind == DSPARK:
        rank, head_type = _number(own, "markov_rank", minimum=0), own.get("markov_head_type", MARKOV_TYPES[0])
        if head_type not in MARKOV_TYPES:
            raise ValueError(f"its markov_head_type is {head_type!r}; this release reads {', '.join(MARKOV_TYPES)}")
        has_confidence, with_markov = (own.get(key, SPECULATORS in raw) for key in CONFIDENCE)
        if has_confidence and with_markov and not rank:
            raise ValueError("its confidence_head_with_markov is true, and its markov_rank is 0")
        return PathShape(rank, head_type, has_confidence, has_confidence and with_markov)
    if kind == DFLASH2:
        rank, top_k = (_number(own, key) for key in ("selector_rank", "selector_top_k"))
        return PathShape(selector_rank=rank, selector_top_k=top_k)
    if kind == DOMINO:
        state, inner = (_number(own, key) for key in ("gru_hidden_dim", "emb_dim"))
        prefix = _number({"pure_draft_prefix_len": 0, **own}, "pure_draft_prefix_len", minimum=0)
        return PathShape(gru_hidden_dim=state, emb_dim=inner, pure_draft_prefix_len=prefix)
    return NO_PATH


def conv_of(raw: Mapping[str, Any], hidden_size: int) -> ConvShape | None:
    """Return the convolution of DFlash2's layers; None of other heads. Raises ValueError."""
    if kind_of(raw) != DFLASH2:
        return None
    _, own = _sections(raw)
    shape = ConvShape(_number(own, "conv_kernel_size"), _number(own, "conv_group_size"))
    if hidden_size % shape.group_size:
        raise ValueError(
            f"its conv_group_size is {shape.group_size}, which does not divide its hidden_size {hidden_size}"
        )
    return shape


def _number(own: Mapping[str, Any], key: str, minimum: int = 1) -> int:
    value = own.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"its {key} is {value!r}; it must be a whole number, {minimum} or more")
    return value


def own_names(published: Mapping[str, Named]) -> dict[str, Named]:
    """Return the entries that are the head's own: no buffers that are recomputed, no tensors of the target."""
    skipped = (*IGNORED_KEYS, *TIED_TO_TARGET)
    has_lm_head = "lm_head.weight" in published
    maps = () if has_lm_head else ("d2t", "t2d")  # maps of a vocabulary without an lm_head over it say nothing
    return {name: value for name, value in published.items() if not name.endswith(skipped) and name not in maps}


def _check_floats(headers: Mapping[str, TensorHeader]) -> None:
    """Check that weights are numbers of a kind that can be cast: no whole numbers, and no 8-bit ones with scales."""
    others = [name for name, header in own_names(headers).items() if not header.is_float]
    if wrong := first_few(sorted({*others} - {*VOCABULARY_MAPS})):
        raise ValueError(f"{', '.join(wrong)} holds no floating-point numbers of 16 bits or more")


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
    path = path_of(raw)
    if path.selector_top_k > target.vocab_size:
        raise ValueError(f"its selector_top_k is {path.selector_top_k}; the target has {target.vocab_size} tokens")
    causal_windows = raw.get(SPECULATORS) is not None and not switches["sliding_window_non_causal"]
    is_causal = any(switches[key] for key in CAUSAL)
    is_deepspec = kind_of(raw) == DSPARK and SPECULATORS not in raw
    is_anchored = kind_of(raw) == DSPARK and "sample_from_anchor" not in own
    return BlockShape(
        size=size,
        mask_token_id=mask,
        feature_layers=_feature_layers(layers, own, target.num_hidden_layers, first=-1 if is_deepspec else 0),
        causal=tuple(is_causal or (kind == SLIDING and causal_windows) for kind in _layer_types(layers)),
        from_root=is_anchored or any(switches[key] for key in FROM_ROOT),
        path=path,
        conv=conv_of(raw, layers["hidden_size"]),
    )


def _feature_layers(
    layers: Mapping[str, Any], own: Mapping[str, Any], num_layers: int, first: int = 0
) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads. The last layer's output is not among them: it is normed.

    first: the least of target_layer_ids; -1 is the embedding's output.
    """
    if "aux_hidden_state_layer_ids" in own:
        key, offset, ids = "aux_hidden_state_layer_ids", 0, own["aux_hidden_state_layer_ids"]
    elif "target_layer_ids" in own:
        key, offset, ids = "target_layer_ids", 1, own["target_layer_ids"]
    else:
        key, offset, ids = "target_layer_ids", 1, spread_layers(num_layers, layers["num_hidden_layers"])
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not ids or len({*ids}) < len(ids):
        raise ValueError(f"its {key} is {ids!r}; it must be a list of different layers")
    if not (min(ids) >= (first if offset else 0) and max(ids) + offset < num_layers):
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
